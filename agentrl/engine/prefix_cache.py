"""Keys and values of prompts and turns seen before, for prompts that begin with the same tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

import torch

from agentrl.engine.kv_cache import KVCache

BLOCK = 16

_Key = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Block:
    """Up to `BLOCK` tokens after a certain prefix.

    Attributes:
        number: of this block among all there ever were: in its key a child names its parent, and with that the whole
            prefix, exactly.
        keys, values: `[layers, kv_heads, tokens, head_dim]`.
    """

    number: int
    tokens: int
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Match:
    """What is known of a prefix.

    Attributes:
        blocks: the known beginning.
        missing: names the first block that is not; None if all is known.
    """

    blocks: list[Block]
    missing: _Key | None

    @property
    def tokens(self) -> int:
        return sum(block.tokens for block in self.blocks)


class PrefixCache:
    """A trie of blocks; the longest unused ones go first when there are too many.

    Blocks are copies. Running sequences never depend on them, so any block may go at any time, and a decoding step
    never gathers them: reuse is one copy into the sequence's row when it is admitted. The last block of what is stored
    may be shorter than the others. It serves prompts equal to the token, those of a group.

    Attributes:
        tokens: held now.
        capacity: most tokens to hold.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[_Key, Block] = OrderedDict()
        self._numbers = count(1)
        self.capacity = 0
        self.tokens = 0

    def limit(self, tokens: int) -> None:
        """Holds no more than that from now on."""
        self.capacity = tokens
        while self.tokens > tokens:
            _, block = self._blocks.popitem(last=False)
            self.tokens -= block.tokens

    def clear(self) -> None:
        """Forgets everything, as after an update of the weights."""
        self._blocks.clear()
        self.tokens = 0

    def match(self, token_ids: list[int]) -> Match:
        """The known blocks at the beginning of `token_ids`, now the last to go."""
        parent, keys, blocks, missing = 0, [], [], None
        for chunk in _chunks(token_ids):
            block = self._blocks.get((parent, chunk))
            if block is None:
                missing = (parent, chunk)
                break
            keys.append((parent, chunk))
            blocks.append(block)
            parent = block.number
        for key in reversed(keys):  # a block without its parent can't be found, so parents stay longer
            self._blocks.move_to_end(key)
        return Match(blocks, missing)

    def store(self, token_ids: list[int], cache: KVCache, row: int) -> None:
        """Copies what is not known yet of `token_ids`, which a row of `cache` holds from its beginning."""
        if len(token_ids) > self.capacity:
            return
        known = self.match(token_ids)
        if known.missing is None:
            return
        keys, values = cache.read(row, known.tokens, len(token_ids))
        parent = known.blocks[-1].number if known.blocks else 0
        position = 0
        for chunk in islice(_chunks(token_ids), len(known.blocks), None):
            span = slice(position, position + len(chunk))
            block = Block(next(self._numbers), len(chunk), keys[:, :, span].clone(), values[:, :, span].clone())
            self._blocks[parent, chunk] = block
            position, parent = span.stop, block.number
        self.match(token_ids)  # for the order in which blocks go
        self.tokens += position
        self.limit(self.capacity)


def _chunks(token_ids: list[int]) -> Iterator[tuple[int, ...]]:
    return (tuple(token_ids[begin : begin + BLOCK]) for begin in range(0, len(token_ids), BLOCK))
