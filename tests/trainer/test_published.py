"""What engines get: names and layers as in the model's files, or the adapters alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from agentrl.config import load_config
from agentrl.config.schema import ModelConfig
from agentrl.engine.checkpoint import checkpoint_shapes
from agentrl.lora import adapter_shapes, add_lora
from agentrl.tiny import tiny_model_path
from agentrl.trainer.actor import Actor
from agentrl.trainer.lora import write_adapter
from agentrl.trainer.published import published_tensors

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LATENT: dict[str, Any] = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=4, head_dim=8),
    "deepseek_v3": DeepseekV3Config(
        **{**SIZES, **LATENT, "num_key_value_heads": 4, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 2},
        topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_published_as_the_models_files_have_them(family: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    published = dict(published_tensors(model, torch.float32, adapters=False, checkpoint_names=True))
    assert {name: tuple(tensor.shape) for name, tensor in published.items()} == {
        name: shape
        for name, shape in checkpoint_shapes(str(tmp_path)).items()
        if "e_score_correction_bias" not in name  # a buffer, which is not trained
    }
    for name, before in load_file(tmp_path / "model.safetensors").items():
        if name in published:
            torch.testing.assert_close(published[name], before + 1)


def test_adapters_alone_are_what_peft_finds_in_files(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model_path())
    config = ModelConfig(path="tiny", lora_rank=3, target_modules=("q_proj", "down_proj"))
    add_lora(model, config)
    published = dict(published_tensors(model, torch.float32, adapters=True, checkpoint_names=True))
    write_adapter(model, tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert published.keys() == saved.keys()
    assert all(torch.equal(published[name], saved[name]) for name in saved)
    shapes = adapter_shapes(config, str(tiny_model_path()))
    assert shapes == {name: tuple(tensor.shape) for name, tensor in saved.items()}


@pytest.mark.parametrize(
    ("overrides", "merged"),
    [(["rollout.engine=vllm", "model.lora_merge=false"], False), (["rollout.engine=vllm"], True), ([], True)],
)
def test_the_config_says_which(overrides: list[str], merged: bool) -> None:
    config = load_config(
        {
            "model": {"path": "tiny", "lora_rank": 2},
            "data": {"train": "agentrl.envs.math:arithmetic_tasks"},
            "env": {"cls": "agentrl.envs.math:ArithmeticEnv"},
            "trainer": {"total_steps": 1, "device": "cpu"},
        },
        overrides,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model_path())
    add_lora(model, config.model)
    names = [name for name, _ in Actor(config, model, total_optimiser_steps=1).named_tensors()]
    assert any(".lora_A." in name for name in names) is not merged
    assert ("model.norm.weight" in names) is merged
