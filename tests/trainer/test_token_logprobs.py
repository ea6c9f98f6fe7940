"""Log-probs computed some tokens at a time are those computed at once, to the last gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GPT2Config, GraniteConfig

from agentrl.trainer.packed_attention import PACKED_ATTENTION, PackedRows
from agentrl.trainer.packing import PackedInput, pack
from agentrl.trainer.token_logprobs import TokenLogProbs
from tests.support.gradients import assert_gradients_agree, branches_of

Fixture = Callable[..., Any]

ALL = 2**30
"""More elements than any of these tests has: one chunk."""


def plain(model: Any, packed: PackedInput, autocast: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """From all logits at once, by torch's own functions."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(
            input_ids=packed.token_ids, position_ids=packed.positions, packed_rows=PackedRows(packed.lengths)
        ).logits[0]
    logp = torch.log_softmax(logits[packed.predicting].float() / packed.temperatures[:, None], dim=-1)
    return logp.gather(-1, packed.targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1).detach()


def gradients(model: Any, logp: torch.Tensor) -> dict[str, torch.Tensor]:
    weights = torch.linspace(-1, 1, len(logp))
    (logp * weights).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("elements", [1, 61 * 7, ALL], ids=["a token", "7 tokens", "all"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_chunks_change_nothing(
    family: str, elements: int, autocast: bool, new_model: Fixture, new_groups: Fixture
) -> None:
    """`qwen3` ties its output layer to the embedding, `llama` does not."""
    model = new_model(family)
    model.set_attn_implementation(PACKED_ATTENTION)
    packed = pack(branches_of(new_groups(2, 3, temperature=0.7)), torch.device("cpu"))
    expected, expected_entropy = plain(model, packed, autocast)
    expected_gradients = gradients(model, expected)

    chunked = TokenLogProbs(model, elements)
    assert chunked.chunked
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logp, entropy, squares = chunked(packed)
    assert logp.dtype == entropy.dtype == torch.float32
    assert not entropy.requires_grad and not squares.requires_grad
    tolerance = 2e-2 if autocast else 1e-5
    torch.testing.assert_close(logp, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=0, atol=1e-5)
    assert_gradients_agree(gradients(model, logp), expected_gradients, rtol=tolerance)


def test_a_frozen_model_below_a_trained_head_gets_no_gradient(new_model: Fixture, new_groups: Fixture) -> None:
    model = new_model("llama")
    model.set_attn_implementation(PACKED_ATTENTION)
    model.model.requires_grad_(False)
    packed = pack(branches_of(new_groups(1, 2)), torch.device("cpu"))
    expected = gradients(model, plain(model, packed, False)[0])
    assert expected.keys() == {"lm_head.weight"}
    assert_gradients_agree(gradients(model, TokenLogProbs(model, 100)(packed)[0]), expected, rtol=1e-5)


def test_a_bias_of_the_output_layer_counts(new_model: Fixture, new_groups: Fixture) -> None:
    model = new_model("llama")
    model.set_attn_implementation(PACKED_ATTENTION)
    model.lm_head.bias = torch.nn.Parameter(torch.randn(61))
    packed = pack(branches_of(new_groups(1, 2)), torch.device("cpu"))
    expected, _ = plain(model, packed, False)
    expected_gradients = gradients(model, expected)
    assert "lm_head.bias" in expected_gradients
    logp = TokenLogProbs(model, 100)(packed).logp
    torch.testing.assert_close(logp, expected, rtol=0, atol=1e-5)
    assert_gradients_agree(gradients(model, logp), expected_gradients, rtol=1e-5)


@pytest.mark.parametrize("elements", [1, 61 * 7, ALL], ids=["a token", "7 tokens", "all"])
@pytest.mark.parametrize("whole", [False, True], ids=["in chunks", "in one piece"])
def test_entropies_have_a_gradient_where_it_is_asked_for(
    elements: int, whole: bool, new_model: Fixture, new_groups: Fixture
) -> None:
    model = new_model("llama")
    model.set_attn_implementation(PACKED_ATTENTION)
    packed = pack(branches_of(new_groups(1, 3, temperature=0.7)), torch.device("cpu"))
    logits = model(
        input_ids=packed.token_ids,
        position_ids=packed.positions,
        logits_to_keep=packed.predicting,
        packed_rows=PackedRows(packed.lengths),
    ).logits[0]
    distribution = torch.distributions.Categorical(logits=logits.float() / packed.temperatures[:, None])
    weights = torch.linspace(-1, 2, len(packed.targets))

    def combined(logp: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return logp * weights + entropy * weights.flip(0)

    expected = gradients(model, combined(distribution.log_prob(packed.targets), distribution.entropy()))
    log_probs = TokenLogProbs(model, elements)
    log_probs.chunked = not whole
    statistics = log_probs(packed, entropy_gradient=True)
    torch.testing.assert_close(statistics.entropy, distribution.entropy(), rtol=0, atol=1e-5)
    squares = distribution.probs.square().sum(-1)
    torch.testing.assert_close(statistics.sum_pi_squared, squares, rtol=0, atol=1e-5)
    assert_gradients_agree(gradients(model, combined(statistics.logp, statistics.entropy)), expected, rtol=1e-4)


SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.mark.parametrize(
    ("config", "chunked"),
    [
        (CohereConfig(**SHAPE, logit_scale=0.3), False),
        (CohereConfig(**SHAPE, logit_scale=0.0625), True),  # of what the output layer reads: the same, bit by bit
        (GraniteConfig(**SHAPE, logits_scaling=7.0), False),
        (Gemma2Config(**SHAPE, final_logit_softcapping=30.0, attn_logit_softcapping=None), False),
        (Gemma2Config(**SHAPE, final_logit_softcapping=None, attn_logit_softcapping=None), True),
        (GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=4, n_positions=512), True),
    ],
    ids=["scaled", "scaled by a power of 2", "divided", "bounded", "not bounded", "without rotary positions"],
)
def test_logits_that_are_more_than_the_output_layers_are_computed_in_one_piece(
    config: Any, chunked: bool, new_groups: Fixture
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.set_attn_implementation(PACKED_ATTENTION)
    packed = pack(branches_of(new_groups(1, 3)), torch.device("cpu"))
    expected, expected_entropy = plain(model, packed, False)
    log_probs = TokenLogProbs(model, 100)
    assert log_probs.chunked is chunked
    logp, entropy, _ = log_probs(packed)
    torch.testing.assert_close(logp, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=0, atol=1e-5)
    assert_gradients_agree(gradients(model, logp), gradients(model, plain(model, packed, False)[0]), rtol=1e-5)


def test_no_more_logits_exist_at_a_time_than_asked_for(new_model: Fixture, new_groups: Fixture) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.ndim >= 2 and tensor.shape[-1] == 61:
                    largest = max(largest, tensor.numel())
            return out

    model = new_model("llama")
    model.set_attn_implementation(PACKED_ATTENTION)
    packed = pack(branches_of(new_groups(3, 4)), torch.device("cpu"))
    assert len(packed.targets) > 100
    log_probs = TokenLogProbs(model, 61 * 40)
    with Watch():
        log_probs(packed)[0].sum().backward()
    assert largest == 61 * 40


def test_the_model_is_left_as_it_was(new_model: Fixture, new_groups: Fixture) -> None:
    model = new_model()
    model.set_attn_implementation(PACKED_ATTENTION)
    packed = pack(branches_of(new_groups(1, 2)), torch.device("cpu"))
    TokenLogProbs(model)(packed)
    assert "forward" not in vars(model.get_output_embeddings())
    assert plain(model, packed, False)[0].shape == packed.targets.shape
