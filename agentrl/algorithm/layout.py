"""Which sequence each position belongs to: the one thing that padded and packed rows differ in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentrl.algorithm.masking import is_trained, masked, widened


@dataclass(frozen=True, eq=False)
class Layout:
    """The sequence of each position, and the episode and group of each sequence.

    A sequence (one branch of an episode) lies in one row, its tokens in order; a row may hold several. Only
    positions with mask 1 are read: the others may carry any sequence id. Episode and group ids are any
    integers; sequences with the same id belong together.

    Attributes:
        sequence: [B, T] integers, 0..S-1 at trained positions.
        episode: [S] integers.
        group: [S] integers, the same for all sequences of an episode.
        episode_tokens: [S], trained tokens of the sequence's whole episode over the optimiser step; None
            counts those of the call. Needed by `episode-mean` alone, and only where the sequences of an
            episode are spread over several calls (micro-batches, ranks).
        weight: [S] floats, how much a sequence counts in the loss relative to others (`branch_weights`); None
            counts all as 1.
        turn: [B, T] integers, which turn of its sequence a trained token belongs to, ascending; None takes each run
            of neighbouring trained tokens for a turn. Read by GAE over turns.
        place: [B, T] integers, how far a trained token stands from the beginning of its sequence's response, tokens
            that are not trained counted; None counts from the first position that `sequence` gives the sequence in
            its row. Read by `optimal_token_baseline`.
    """

    sequence: Tensor
    episode: Tensor
    group: Tensor
    episode_tokens: Tensor | None = None
    weight: Tensor | None = None
    turn: Tensor | None = None
    place: Tensor | None = None

    def __post_init__(self) -> None:
        if self.sequence.dim() != 2:
            raise ValueError(f"layout.sequence has shape {list(self.sequence.shape)}: pass [B, T] ids")
        for name in ("turn", "place"):
            numbers = getattr(self, name)
            if numbers is not None and numbers.shape != self.sequence.shape:
                raise ValueError(
                    f"layout.{name} has shape {list(numbers.shape)}: pass [B, T], like layout.sequence "
                    f"({list(self.sequence.shape)})"
                )
        for name in ("episode", "group", "episode_tokens", "weight"):
            ids = getattr(self, name)
            if ids is not None and ids.shape != (self.episode.numel(),):
                raise ValueError(
                    f"layout.{name} has shape {list(ids.shape)}: pass one value per sequence, [S], S being "
                    f"the length of layout.episode ({self.episode.numel()})"
                )
        for name in ("sequence", "episode", "group"):
            ids = getattr(self, name)
            if ids.is_floating_point() or ids.dtype == torch.bool:
                raise ValueError(f"layout.{name} has dtype {ids.dtype}: ids are integers")

    @classmethod
    def rows(
        cls,
        mask: Tensor,
        group: Tensor | Sequence[int] | None = None,
        episode: Tensor | Sequence[int] | None = None,
    ) -> Layout:
        """The layout of padded rows: row i of `mask` [B, T] is sequence i.

        Args:
            group: [B] group ids; None makes each episode a group of its own.
            episode: [B] episode ids; None makes each row an episode of its own.
        """
        row = torch.arange(mask.shape[0], device=mask.device)
        episodes = row if episode is None else torch.as_tensor(episode, device=mask.device)
        groups = episodes if group is None else torch.as_tensor(group, device=mask.device)
        return cls(row[:, None].expand(mask.shape), episodes, groups)

    @property
    def sequences(self) -> int:
        """S, the number of sequences."""
        return self.episode.numel()

    def slots(self, mask: Tensor) -> Tensor:
        """[B, T] sequence ids at trained positions, S at all others: one slot more than there are sequences."""
        return torch.where(is_trained(mask), self.sequence, self.sequences)

    def turns(self, mask: Tensor) -> Tensor:
        """[B, T] the turn of each trained token; numbers ascend along a sequence."""
        if self.turn is not None:
            return self.turn
        slots = self.slots(mask)
        begins = torch.ones_like(slots, dtype=torch.bool)
        begins[:, 1:] = slots[:, 1:] != slots[:, :-1]
        return begins.cumsum(dim=1)

    def places(self, mask: Tensor) -> Tensor:
        """[B, T] how far each trained token stands from the beginning of its sequence's response."""
        if self.place is not None:
            return self.place
        slots = self.slots(mask)
        row, column = (
            torch.arange(size, device=mask.device).view(shape).expand(mask.shape)
            for size, shape in zip(mask.shape, ((-1, 1), (1, -1)), strict=True)
        )
        home = row.new_full((self.sequences + 1,), -1).scatter(0, slots.flatten(), row.flatten())
        known = (self.sequence >= 0) & (self.sequence < self.sequences)
        owner = torch.where(known, self.sequence, self.sequences)
        own = torch.where(home[owner] == row, owner, self.sequences)
        first = column.new_full((self.sequences + 1,), mask.shape[1])
        first = first.scatter_reduce(0, own.flatten(), column.flatten(), "amin")
        return column - first[slots]

    def sums(self, values: Tensor, mask: Tensor) -> Tensor:
        """[S] sums of `values` [B, T] over each sequence's trained tokens, in fp32 or wider."""
        flat = widened(masked(values, is_trained(mask))).flatten()
        table = flat.new_zeros(self.sequences + 1)
        return table.index_add(0, self.slots(mask).flatten(), flat)[:-1]

    def maxima(self, values: Tensor, mask: Tensor) -> Tensor:
        """[S] maxima of the non-negative `values` [B, T] over each sequence's trained tokens; 0 without any."""
        table = values.new_zeros(self.sequences + 1)
        flat = masked(values, is_trained(mask)).flatten()
        return table.scatter_reduce(0, self.slots(mask).flatten(), flat, "amax")[:-1]

    def counts(self, mask: Tensor) -> Tensor:
        """[S] trained tokens of each sequence, fp32 (exact below 2**24)."""
        return self.sums(is_trained(mask).float(), mask)

    def spread(self, per_sequence: Tensor, mask: Tensor) -> Tensor:
        """[B, T]: each trained token gets the value of its sequence, every other position 0."""
        return torch.cat([per_sequence, per_sequence.new_zeros(1)])[self.slots(mask)]

    def weights(self, mask: Tensor) -> Tensor | None:
        """[S] the weights of the sequences with a trained token, 0 for the others; None where all count as 1."""
        return None if self.weight is None else masked(self.weight, self.counts(mask) > 0)

    def episode_counts(self, mask: Tensor) -> Tensor:
        """[S] trained tokens of each sequence's whole episode, fp32 (`episode_tokens` where that is set)."""
        if self.episode_tokens is not None:
            return self.episode_tokens.float()
        return self._same_episode().float() @ self.counts(mask)

    def episode_count(self, mask: Tensor) -> Tensor:
        """The number of episodes with a trained token, a scalar; no host synchronisation."""
        present = self.counts(mask) > 0
        seen_before = (self._same_episode() & present).tril(-1).any(dim=1)
        return (present & ~seen_before).sum()

    def _same_episode(self) -> Tensor:
        return self.episode[:, None] == self.episode


@dataclass(frozen=True, eq=False)
class TrainedTokens:
    """The trained tokens of each sequence, left-aligned: masked tokens take no place and no time.

    For recursions along a sequence (returns, GAE), which then need not know how the rows are laid out.
    Building it synchronises with the host: once per batch, not per micro-batch.

    Attributes:
        position: [N] index of each trained token in the flattened [B, T].
        sequence: [N] its sequence.
        order: [N] its number among the trained tokens of its sequence, from 0.
    """

    position: Tensor
    sequence: Tensor
    order: Tensor
    sequences: int
    shape: torch.Size

    @classmethod
    def of(cls, layout: Layout, mask: Tensor) -> TrainedTokens:
        """Finds the trained tokens of `mask` [B, T]."""
        position = is_trained(mask).flatten().nonzero().squeeze(1)
        sequence = layout.sequence.flatten()[position]
        by_sequence = sequence.argsort(stable=True)
        position, sequence = position[by_sequence], sequence[by_sequence]
        counts = torch.bincount(sequence, minlength=layout.sequences)
        first = counts.cumsum(0) - counts
        order = torch.arange(len(sequence), device=mask.device) - first[sequence]
        return cls(position, sequence, order, layout.sequences, mask.shape)

    def placed(self, places: Tensor) -> TrainedTokens:
        """The same tokens, each in the column that `places` [B, T] gives it, instead of one beside the other."""
        return replace(self, order=places.flatten()[self.position])

    def align(self, values: Tensor) -> Tensor:
        """[B, T] to [S, L], L being the most trained tokens of a sequence; 0 after a sequence's end."""
        length = int(self.order.max()) + 1 if len(self.order) else 0
        table = values.new_zeros(self.sequences, length)
        table[self.sequence, self.order] = values.flatten()[self.position]
        return table

    def restore(self, table: Tensor) -> Tensor:
        """[S, L] back to [B, T], 0 at positions that are not trained."""
        values = table.new_zeros(self.shape.numel())
        values[self.position] = table[self.sequence, self.order]
        return values.view(self.shape)
