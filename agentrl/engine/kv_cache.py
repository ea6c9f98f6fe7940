"""Keys and values of the sequences in flight: one slot a sequence, grown on demand."""

from __future__ import annotations

import torch

_FIRST_LENGTH = 256


class KVCache:
    """Keys and values by layer, each `[slots, kv_heads, length, head_dim]`.

    The slots in use are always the first ones: a finished sequence's slot takes over the last one's content, so
    that a decoding step reads one contiguous block.
    """

    def __init__(self, slots: int, max_length: int) -> None:
        self._slots = slots
        self._max_length = max_length
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._length = min(_FIRST_LENGTH, max_length)

    def reserve(self, length: int) -> None:
        """Makes room for sequences of `length` tokens."""
        if length <= self._length:
            return
        self._length = max(length, min(2 * self._length, self._max_length))
        for index, pair in self._layers.items():
            self._layers[index] = (self._grown(pair[0]), self._grown(pair[1]))

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores `[T, kv_heads, head_dim]` at (slot, position) and returns the layer's whole keys and values."""
        if layer not in self._layers:
            shape = (self._slots, keys.shape[1], self._length, keys.shape[2])
            self._layers[layer] = (keys.new_zeros(shape), values.new_zeros((*shape[:3], values.shape[2])))
        all_keys, all_values = self._layers[layer]
        all_keys[slots, :, positions] = keys
        all_values[slots, :, positions] = values
        return all_keys, all_values

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of a slot over another slot."""
        for keys, values in self._layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def _grown(self, tensor: torch.Tensor) -> torch.Tensor:
        grown = tensor.new_zeros((*tensor.shape[:2], self._length, tensor.shape[3]))
        grown[:, :, : tensor.shape[2]] = tensor
        return grown
