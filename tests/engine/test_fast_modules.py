"""Faster forms of modules compute what the modules did, from the weights there are now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from agentrl.engine.attention import ENGINE_ATTENTION, Prompt, StepLayout
from agentrl.engine.fast_modules import FastModules
from agentrl.engine.kv_cache import KVCache
from tests.support.models import random_model

Fixture = Callable[..., Any]


def large_model(family: str, seed: int) -> Any:
    model = random_model(family, seed, vocab_size=5000, max_position_embeddings=64, initializer_range=0.2)
    model.set_attn_implementation(ENGINE_ATTENTION)
    return model


def logits_of(model: Any, count: int) -> torch.Tensor:
    """Of one prompt of `count` tokens, as in an engine's step."""
    positions = torch.arange(count)
    layout = StepLayout(
        cache=KVCache(1, 64, 64),
        rows=torch.zeros(count, dtype=torch.long),
        positions=positions,
        decoding=0,
        bias=torch.zeros(0, 1, 1, 0),
        prompts=[Prompt(0, count, 0, count, None)],
    )
    with torch.inference_mode():
        return model(
            input_ids=7 + positions[None], position_ids=positions[None], use_cache=False, step_layout=layout
        ).logits


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tokens", [1, 3, 50])
def test_results_are_the_same_and_follow_the_weights(family: str, tokens: int) -> None:
    fast, reference, other = (large_model(family, seed) for seed in (0, 0, 1))
    modules = FastModules(fast)
    assert all("forward" in vars(module) for module in (fast.lm_head, fast.model.norm, *fast.model.layers))
    torch.testing.assert_close(logits_of(fast, tokens), logits_of(reference, tokens), rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        for parameter, new in zip(fast.parameters(), other.parameters(), strict=True):
            parameter.copy_(new)
    modules.refresh()
    torch.testing.assert_close(logits_of(fast, tokens), logits_of(other, tokens), rtol=1e-4, atol=1e-4)


def test_biases_belong_to_the_products() -> None:
    fast, reference = (
        random_model("llama", 0, vocab_size=97, attention_bias=True, mlp_bias=True, initializer_range=0.2)
        for _ in range(2)
    )
    for model in (fast, reference):
        model.set_attn_implementation(ENGINE_ATTENTION)
        for index, parameter in enumerate(model.parameters()):
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(index))
    FastModules(fast)
    assert all("forward" in vars(layer) for layer in fast.model.layers)
    torch.testing.assert_close(logits_of(fast, 9), logits_of(reference, 9), rtol=1e-4, atol=1e-4)


def test_a_layer_that_computes_something_else_is_left_alone() -> None:
    """Families look alike and differ in a factor somewhere."""
    model, reference = large_model("llama", 0), large_model("llama", 0)
    for changed in (model, reference):
        forward = changed.model.layers[1].mlp.forward
        changed.model.layers[1].mlp.forward = lambda x, forward=forward: 0.9 * forward(x)
    FastModules(model)
    assert ["forward" in vars(layer) for layer in model.model.layers] == [True, False]
    torch.testing.assert_close(logits_of(model, 9), logits_of(reference, 9), rtol=1e-4, atol=1e-4)


def test_names_of_parameters_stay() -> None:
    model, reference = large_model("llama", 0), large_model("llama", 0)
    FastModules(model)
    assert dict(model.named_parameters()).keys() == dict(reference.named_parameters()).keys()


class OtherRMSNorm(nn.Module):
    """With 1 added to the weight, as some families do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight)


def test_other_norms_and_other_types_are_left_alone(new_model: Fixture) -> None:
    norm = OtherRMSNorm()
    FastModules(norm)
    assert "forward" not in vars(norm)
    model = new_model().to(torch.bfloat16)
    FastModules(model)
    assert not any("forward" in vars(module) for module in model.modules())
