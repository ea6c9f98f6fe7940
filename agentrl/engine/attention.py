"""Attention of one engine step: decoding sequences and new prompts together, without padding elsewhere.

A step's tokens lie flat in one row, `[1, T]`: first one token of each decoding sequence, then the prompts of the new
ones, each from its first token that is not in the cache. Everything but attention is the same for all tokens, so only
attention has to tell them apart. It is registered with transformers' attention interface and works for every model
that uses it.
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
class Prompt:
    """A new prompt's part of the step.

    Attributes:
        begin, end: its tokens in the flat row.
        row, length: where the cache holds it, with the tokens known before.
        visible: bool `[end - begin, length]`, or None where plain causal attention or no mask at all is right.
    """

    begin: int
    end: int
    row: int
    length: int
    visible: torch.Tensor | None

    @property
    def whole(self) -> bool:
        """Nothing of it was known before."""
        return self.end - self.begin == self.length


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where the tokens of a step belong.

    Attributes:
        rows, positions: long `[T]`, cache row and position of each token.
        decoding: how many of the first tokens belong to decoding sequences (in rows 0, 1, ...).
        bias: `[decoding, 1, 1, L]`, 0 where a decoding token may attend to, else -inf; of the model's type.
        prompts: what the other tokens belong to, in order.
    """

    cache: KVCache
    rows: torch.Tensor
    positions: torch.Tensor
    decoding: int
    bias: torch.Tensor
    prompts: list[Prompt]


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
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend(step_layout, int(module.layer_idx), queries, keys, values, scaling)[None], None  # type: ignore[arg-type]


def attend(
    step: StepLayout, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Writes a step's keys and values `[T, kv_heads, head_dim]` and attends over the cache.

    Args:
        queries: `[T, heads, head_dim]`.

    Returns:
        `[T, heads, head_dim]`.
    """
    all_keys, all_values = step.cache.write(layer, keys, values, step.rows, step.positions)
    parts = [_decode(queries[: step.decoding], all_keys, all_values, step.bias, scaling)] if step.decoding else []
    for prompt in step.prompts:
        if prompt.whole:
            known = keys[prompt.begin : prompt.end].transpose(0, 1), values[prompt.begin : prompt.end].transpose(0, 1)
        else:
            known = all_keys[prompt.row, :, : prompt.length], all_values[prompt.row, :, : prompt.length]
        parts.append(_prefill(prompt, queries, *known, scaling))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, scaling: float
) -> torch.Tensor:
    # The query heads that share a key head stand where a longer query would have its positions: no repeated keys.
    count, length = len(queries), bias.shape[-1]
    out = scaled_dot_product_attention(
        queries.unflatten(1, (keys.shape[1], -1)),
        keys[:count, :, :length],
        values[:count, :, :length],
        attn_mask=bias,
        scale=scaling,
    )
    return out.flatten(1, 2)


def _prefill(
    prompt: Prompt, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> torch.Tensor:
    # Without padding, one prompt after the other: lengths differ a lot, and few prompts are new in a step. A mask
    # may rule out cuda's flash kernel; torch's `causal_lower_right` would not, but on cpu it makes the same mask anew
    # in each layer, and takes longer.
    out = scaled_dot_product_attention(
        queries[prompt.begin : prompt.end].transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=prompt.visible,
        is_causal=prompt.whole,
        scale=scaling,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


AttentionInterface.register(ENGINE_ATTENTION, engine_attention)
