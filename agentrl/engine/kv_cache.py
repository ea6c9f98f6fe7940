"""Keys and values of the sequences in flight: one row of a rectangle each, grown on demand within a bound."""

from __future__ import annotations

import logging
from typing import Any

import torch

from agentrl.device import get_device

log = logging.getLogger(__name__)

_FIRST_LENGTH = 256
_STEP = 64
FREE_SHARE = 0.4
"""Of the free memory: a trainer may share the device."""


def affordable_tokens(config: Any, dtype: torch.dtype, free: int) -> int:
    """Tokens whose keys and values fit into `FREE_SHARE` of so many free bytes, for a model of that config."""
    return int(FREE_SHARE * free) // token_bytes(config, dtype)


def token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize


def default_tokens(model: Any, max_batch_size: int, max_model_len: int) -> int:
    """What `rollout.kv_cache_tokens` is where nobody says: room for the sequences and as much again for reuse, or what
    part of the free memory holds."""
    free = get_device(model.device.type).free_memory(model.device.index or 0)
    wanted, affordable = 2 * max_batch_size * max_model_len, affordable_tokens(model.config, model.dtype, free)
    tokens = max(max_model_len, min(wanted, affordable))
    log.info(
        "kv_cache_tokens is %d: %d sequences of %d tokens need %d for themselves and as many for reuse, "
        "and %.0f%% of the %.1f GiB free on %s hold %d",
        *(tokens, max_batch_size, max_model_len, wanted // 2, 100 * FREE_SHARE, free / 2**30, model.device, affordable),
    )
    return tokens


class KVCache:
    """Keys and values by layer, each `[rows, kv_heads, length, head_dim]`.

    The rows in use are always the first ones: a finished sequence's row takes over the last one's content, so that a
    decoding step reads one contiguous block, without gathering.

    Args:
        max_rows: most sequences.
        max_length: tokens of the longest sequence.
        max_tokens: bound on rows * length, at least `max_length`; long sequences leave fewer rows.

    Attributes:
        rows, length: sides of the rectangle now.
    """

    def __init__(self, max_rows: int, max_length: int, max_tokens: int) -> None:
        self._max_rows = max_rows
        self._max_length = max_length
        self._max_tokens = max_tokens
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.length = min(_FIRST_LENGTH, max_length)
        self.rows = min(max_rows, max_tokens // self.length)

    @property
    def tokens(self) -> int:
        """Size of the rectangle in tokens, used or not."""
        return self.rows * self.length

    def fits(self, count: int, length: int) -> bool:
        """Whether there can be room for `count` sequences of up to `length` tokens."""
        return count <= self._max_rows and count * max(length, self.length) <= self._max_tokens

    def sides(self, count: int, length: int) -> tuple[int, int]:
        """Rows and length that the rectangle has with that room; `fits` must hold."""
        if length <= self.length:
            return self.rows, self.length
        roomy = min(-(-max(length, self.length * 5 // 4) // _STEP) * _STEP, self._max_length)
        longer = max(length, min(roomy, self._max_tokens // count))
        return min(self._max_rows, self._max_tokens // longer), longer

    def reserve(self, count: int, length: int) -> None:
        """Makes that room; `fits` must hold."""
        if length <= self.length:
            return
        self.rows, self.length = self.sides(count, length)
        for index, (keys, values) in self._layers.items():  # one layer at a time: little memory is held twice
            self._layers[index] = (self._resized(keys), self._resized(values))

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores `[T, kv_heads, head_dim]` at (row, position) and returns the layer's whole keys and values."""
        if layer not in self._layers:
            self._add_layer(layer, keys, values)
        all_keys, all_values = self._layers[layer]
        all_keys[rows, :, positions] = keys
        all_values[rows, :, positions] = values
        return all_keys, all_values

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of a row over another row."""
        for keys, values in self._layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def read(self, row: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies positions out of a row: keys and values, each `[layers, kv_heads, end - begin, head_dim]`."""
        keys = torch.stack([keys[row, :, begin:end] for keys, _ in self._layers.values()])
        return keys, torch.stack([values[row, :, begin:end] for _, values in self._layers.values()])

    def load(self, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts what `read` gave at the beginning of a row."""
        length = keys.shape[2]
        if not self._layers:
            for layer, (layer_keys, layer_values) in enumerate(zip(keys, values, strict=True)):
                self._add_layer(layer, layer_keys.transpose(0, 1), layer_values.transpose(0, 1))
        for layer, pair in self._layers.items():
            for target, source in zip(pair, (keys[layer], values[layer]), strict=True):
                target[row, :, :length] = source

    def _add_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        # Zeros, since attention multiplies what is hidden from a sequence by 0, and 0 times NaN would be NaN.
        shape = (self.rows, keys.shape[1], self.length)
        pair = keys.new_zeros((*shape, keys.shape[2])), values.new_zeros((*shape, values.shape[2]))
        self._layers[layer] = pair

    def _resized(self, tensor: torch.Tensor) -> torch.Tensor:
        resized = tensor.new_zeros((self.rows, tensor.shape[1], self.length, tensor.shape[3]))
        rows, length = min(self.rows, tensor.shape[0]), tensor.shape[2]
        resized[:rows, :, :length] = tensor[:rows]
        return resized
