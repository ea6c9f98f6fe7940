"""What the trainer publishes, in a running vLLM: adapters alone, and layers that transformers and vLLM fuse their own
way."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from agentrl.config.schema import ModelConfig
from agentrl.lora import add_lora
from agentrl.record import EngineError, WeightTransferError
from agentrl.tiny import tiny_model_path
from agentrl.trainer.published import published_tensors
from agentrl.weights.shm import ShmSender
from tests.vllm.conftest import Background, expected_logprobs, prompt, request_of, send_weights

LORA = ("model.lora_rank=5", "model.lora_alpha=12", "model.lora_merge=false", "model.target_modules=[q_proj,up_proj]")


@pytest.fixture(scope="module")
def adapter_engine(start: Callable[..., Any], background: Background) -> Iterator[Any]:
    made = start(*LORA)
    yield made
    background.run(made.close())


def adapted(seed: int) -> Any:
    """The bundled model with adapters that say something; none for seed 0."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32)
    add_lora(model, ModelConfig(path="tiny", lora_rank=5, lora_alpha=12, target_modules=("q_proj", "up_proj")))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name and seed:
                parameter.normal_(std=0.2)
    return model.eval()


async def update(engine: Any, model: Any, version: int, folder: Path, left_out: int = 0) -> None:
    tensors = list(published_tensors(model, torch.float32, adapters=True, checkpoint_names=True))
    await send_weights(engine, ShmSender(folder, 4096), tensors[left_out:], version)


def test_adapters_change_under_running_requests(adapter_engine: Any, background: Background, tmp_path: Path) -> None:
    """From before the first update on, each token has the log-prob of the adapter of its version."""
    engine, models = adapter_engine, {version: adapted(version) for version in range(6)}

    async def play() -> tuple[list[Any], list[Any]]:
        requests = [request_of(prompt(10 + i, i), 500 + i, max_tokens=400) for i in range(6)]
        calls = [asyncio.create_task(engine.generate(request)) for request in requests]
        checksums = []
        for version in range(1, 6):
            await asyncio.sleep(0.3)
            await update(engine, models[version], version, tmp_path)
            checksums.append(str(await engine.weight_checksums()))
        assert len(set(checksums)) == 5
        return requests, await asyncio.gather(*calls)

    requests, results = background.run(play())
    seen = set()
    for request, result in zip(requests, results, strict=True):
        assert result.finish_reason == "length" and (np.diff(result.versions) >= 0).all()
        for version in set(result.versions.tolist()):
            seen.add(version)
            own = result.versions == version
            expected = expected_logprobs(models[version], request.token_ids.tolist(), result.token_ids.tolist())
            np.testing.assert_allclose(result.logprobs[own], expected[own], atol=2e-3)
    assert {0, 1} < seen, "updates have to come in the middle of the answers"


def test_half_an_adapter_is_refused(adapter_engine: Any, background: Background, tmp_path: Path) -> None:
    async def play() -> None:
        with pytest.raises(WeightTransferError, match=r"1 tensors did not arrive whole: .*lora_A"):
            await update(adapter_engine, adapted(1), 11, tmp_path, left_out=1)
        with pytest.raises(EngineError, match="mixture"):
            await adapter_engine.resume()
        await update(adapter_engine, adapted(1), 12, tmp_path)

    background.run(play())
    request = request_of(prompt(20), 600)
    result = background.run(adapter_engine.generate(request))
    assert set(result.versions.tolist()) == {12}
    expected = expected_logprobs(adapted(1), request.token_ids.tolist(), result.token_ids.tolist())
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-3)


SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048}


@pytest.mark.parametrize(
    "config",
    [
        Qwen3MoeConfig(
            **SIZES, vocab_size=1024, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
            norm_topk_prob=True,
        ),
        MixtralConfig(**SIZES, vocab_size=1024, num_local_experts=4),
    ],
    ids=["qwen3_moe", "mixtral"],
)  # fmt: skip
def test_a_mixture_of_experts(config: Any, start: Callable[..., Any], background: Background, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_model_path(), path)
    (path / "model.safetensors").unlink()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    trained = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    engine = start(model=path)

    async def play() -> Any:
        tensors = published_tensors(trained, torch.float32, adapters=False, checkpoint_names=True)
        await send_weights(engine, ShmSender(tmp_path, 50_000), tensors, 1)
        return await engine.generate(request)

    request = request_of(prompt(20), 700, max_tokens=30)
    try:
        result = background.run(play())
    finally:
        background.run(engine.close())
    expected = expected_logprobs(trained, request.token_ids.tolist(), result.token_ids.tolist())
    np.testing.assert_allclose(result.logprobs, expected, atol=2e-3)
