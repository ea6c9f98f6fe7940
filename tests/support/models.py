"""Small random models of two families."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_FAMILIES = {"qwen3": (Qwen3Config, True), "llama": (LlamaConfig, False)}


def random_model(family: str, seed: int, **shape: Any) -> Any:
    """A `qwen3` (tied embeddings) or `llama` model; `shape` holds further keys of its config."""
    config, tied = _FAMILIES[family]
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(
        config(**_SHAPE, **shape, tie_word_embeddings=tied), dtype=torch.float32
    ).eval()
