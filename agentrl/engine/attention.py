"""Attention of one engine step: decoding sequences and new prompts together, without padding elsewhere.

A step's tokens lie flat in one row, `[1, T]`: first one token of each decoding sequence, then the whole prompts of
the new ones. Everything but attention is the same for all tokens, so only attention has to tell them apart. It is
registered with transformers' attention interface and works for every model that uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agentrl.engine.kv_cache import KVCache

ENGINE_ATTENTION = "agentrl_engine"


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where the tokens of a step belong.

    Attributes:
        slots, positions: long `[T]`, cache slot and position of each token.
        decoding: how many of the first tokens belong to decoding sequences (in slots 0, 1, ...).
        visible: bool `[decoding, 1, 1, L]`, what each decoding token may attend to.
        padded: long `[m, P]`, indices of the new prompts' tokens, each row padded at its end.
        flat: long `[sum of lengths]`, where those tokens are in `padded`, flattened.
    """

    cache: KVCache
    slots: torch.Tensor
    positions: torch.Tensor
    decoding: int
    visible: torch.Tensor
    padded: torch.Tensor
    flat: torch.Tensor


def engine_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    step_layout: StepLayout,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attends over the cache; `query` is `[1, heads, T, head_dim]`, the result `[1, T, heads, head_dim]`."""
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise NotImplementedError("the torch engine has no soft-capped or sink attention: choose a model without")
    step = step_layout
    queries, new_keys, new_values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    keys, values = step.cache.write(int(module.layer_idx), new_keys, new_values, step.slots, step.positions)  # type: ignore[arg-type]
    parts = []
    if step.decoding:
        parts.append(_decode(queries[: step.decoding], keys, values, step.visible, scaling))
    if step.padded.numel():
        parts.append(_prefill(queries, new_keys, new_values, step, scaling))
    return torch.cat(parts)[None], None


def _decode(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scaling: float
) -> torch.Tensor:
    # The query heads that share a key head stand where a longer query would have its positions: no repeated keys.
    count, heads, head_dim = queries.shape
    kv_heads, length = keys.shape[1], visible.shape[-1]
    grouped = queries.reshape(count, kv_heads, heads // kv_heads, head_dim)
    out = scaled_dot_product_attention(
        grouped, keys[:count, :, :length], values[:count, :, :length], attn_mask=visible, scale=scaling
    )
    return out.reshape(count, heads, out.shape[-1])


def _prefill(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: StepLayout, scaling: float
) -> torch.Tensor:
    # Padding stands at the end, where no real token looks, so plain causal attention is right for each prompt.
    query, key, value = (tensor[step.padded].transpose(1, 2) for tensor in (queries, keys, values))
    out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)[step.flat]


AttentionInterface.register(ENGINE_ATTENTION, engine_attention)
