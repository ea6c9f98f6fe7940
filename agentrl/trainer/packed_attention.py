"""Attention over sequences packed one after the other into a single row, without padding elsewhere.

All tokens of a micro-batch lie flat in `[1, T]`, so every linear layer works on real tokens only. Attention puts the
sequences side by side for its own product. It is registered with transformers' attention interface and works for
every model that uses it, on every device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED_ATTENTION = "agentrl_packed"


class PackedRows:
    """Where the sequences of a packed row stand.

    Attributes:
        padded: long `[S, L]`, index of each token, rows padded at their end.
        flat: long `[T]`, where each token is in `padded`, flattened.
    """

    def __init__(self, lengths: torch.Tensor) -> None:
        """From the lengths of the sequences, long `[S]`."""
        starts = lengths.cumsum(0) - lengths
        column = torch.arange(int(lengths.max()), device=lengths.device)
        real = column < lengths[:, None]
        self.padded = torch.where(real, starts[:, None] + column, 0)
        self.flat = real.flatten().nonzero()[:, 0]


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    packed_rows: PackedRows,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence.

    Args:
        query, key, value: `[1, heads, T, head_dim]`; keys and values may have fewer heads.

    Returns:
        `[1, T, heads, head_dim]`.
    """
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise NotImplementedError("packed training has no soft-capped or sink attention yet")
    # Padding stands at the end, where no real token looks, so plain causal attention is right for each sequence.
    queries, keys, values = (
        tensor[0].transpose(0, 1)[packed_rows.padded].transpose(1, 2) for tensor in (query, key, value)
    )
    out = scaled_dot_product_attention(
        queries, keys, values, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1)[packed_rows.flat][None], None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
