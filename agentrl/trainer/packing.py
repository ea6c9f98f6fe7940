"""Trajectories to tensors: what a training step works on, and what one forward reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from agentrl.algorithm import Layout
from agentrl.record import Branch, Group


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """A branch, and whose it is.

    Attributes:
        episode, group: numbers within the batch.
        mini_batch: which optimiser step of the batch trains it.
        reward: of the episode, with the turn rewards of its other branches; those of its own turns come on top. So
            every branch carries all that the episode earned.
        episode_tokens: trained tokens of the whole episode.
        trained: whether any of its tokens is.
    """

    branch: Branch
    episode: int
    group: int
    mini_batch: int
    reward: float
    episode_tokens: int
    trained: bool = True


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Some sequences, and columns of numbers over their trained tokens.

    Attributes:
        columns: tensors `[1, N]`, the trained tokens of all sequences one after the other. From the start:
            `behav_logp` (recorded at sampling), `token_rewards` (the outcome stands on a sequence's last trained
            token, a turn's own reward on the turn's last) and `versions`. `mask`, where there is one, is 0 at tokens
            that are not trained after all.
    """

    sequences: list[TrainingSequence]
    columns: dict[str, torch.Tensor]

    @classmethod
    def from_groups(cls, groups: Sequence[Group], groups_per_mini_batch: int) -> TrainingData:
        """The branches of a batch that have anything to train, on the CPU."""
        sequences: list[TrainingSequence] = []
        episode = 0
        for number, group in enumerate(groups):
            for trajectory in group.trajectories:
                credit = sum(map(_turn_credit, trajectory.branches))
                sequences += [
                    TrainingSequence(
                        branch=branch,
                        episode=episode,
                        group=number,
                        mini_batch=number // groups_per_mini_batch,
                        reward=trajectory.reward + credit - _turn_credit(branch),
                        episode_tokens=trajectory.sampled_tokens,
                    )
                    for branch in trajectory.branches
                    if branch.trained_tokens
                ]
                episode += 1
        branches = [sequence.branch for sequence in sequences]
        masks = [branch.loss_mask == 1 for branch in branches]
        columns = {
            "behav_logp": [b.logprobs[mask] for b, mask in zip(branches, masks, strict=True)],
            "versions": [b.versions[mask] for b, mask in zip(branches, masks, strict=True)],
            "token_rewards": [_token_rewards(s)[mask] for s, mask in zip(sequences, masks, strict=True)],
        }
        return cls(sequences, {name: torch.from_numpy(np.concatenate(c))[None] for name, c in columns.items()})

    def __getitem__(self, column: str) -> torch.Tensor:
        return self.columns[column]

    @property
    def mask(self) -> torch.Tensor:
        """`[1, N]`, 1 at tokens that are trained."""
        return self.columns.get("mask", torch.ones_like(self.columns["behav_logp"]))

    @property
    def trained_sequences(self) -> list[TrainingSequence]:
        """Those with a token that is trained."""
        return [sequence for sequence in self.sequences if sequence.trained]

    @property
    def layout(self) -> Layout:
        """Sequence, episode and group of each token."""
        counts = [sequence.branch.trained_tokens for sequence in self.sequences]
        device = self.columns["behav_logp"].device

        def ids(values: list[int] | np.ndarray) -> torch.Tensor:
            return torch.as_tensor(values, device=device)

        return Layout(
            sequence=ids(np.repeat(np.arange(len(counts)), counts))[None],
            episode=ids([sequence.episode for sequence in self.sequences]),
            group=ids([sequence.group for sequence in self.sequences]),
            episode_tokens=ids([sequence.episode_tokens for sequence in self.sequences]),
        )

    def with_columns(self, **columns: torch.Tensor | None) -> TrainingData:
        """The same sequences with further columns; None adds nothing."""
        return replace(self, columns=self.columns | {k: v for k, v in columns.items() if v is not None})

    def trained_from(self, min_version: int | None) -> TrainingData:
        """The same data, its tokens sampled under an older version than this not trained; None trains all."""
        if min_version is None:
            return self
        mask = (self.columns["versions"] >= min_version).to(self.columns["behav_logp"].dtype)
        layout = replace(self.layout, episode_tokens=None)
        own, episodes = (counts.long().tolist() for counts in (layout.counts(mask), layout.episode_counts(mask)))
        sequences = [
            replace(sequence, trained=tokens > 0, episode_tokens=episode_tokens)
            for sequence, tokens, episode_tokens in zip(self.sequences, own, episodes, strict=True)
        ]
        return TrainingData(sequences, self.columns | {"mask": mask})

    def to(self, device: torch.device) -> TrainingData:
        """The same data with its columns on a device."""
        return replace(self, columns={name: column.to(device) for name, column in self.columns.items()})

    def select(self, indices: Sequence[int]) -> TrainingData:
        """Some of the sequences, in the order of `indices`."""
        tokens = self.tokens_of(indices)
        columns = {name: column[:, tokens] for name, column in self.columns.items()}
        return TrainingData([self.sequences[i] for i in indices], columns)

    def tokens_of(self, indices: Sequence[int]) -> torch.Tensor:
        """Where in the columns the tokens of some sequences are, long `[n]`."""
        counts = np.array([sequence.branch.trained_tokens for sequence in self.sequences])
        starts = np.cumsum(counts) - counts
        places = np.concatenate([np.arange(starts[i], starts[i] + counts[i]) for i in indices])
        return torch.from_numpy(places).to(self.columns["behav_logp"].device)

    def mini_batches(self) -> Iterator[TrainingData]:
        """What each optimiser step of the batch trains."""
        for number in sorted({sequence.mini_batch for sequence in self.sequences}):
            yield self.select([i for i, sequence in enumerate(self.sequences) if sequence.mini_batch == number])

    def micro_batches(self, max_tokens: int) -> Iterator[list[int]]:
        """Splits the trained sequences into pieces of at most `max_tokens` tokens each, or of one longer sequence;
        yields their indices. Sequences of similar length come together, so that attention pads little."""
        sizes = [len(sequence.branch.token_ids) for sequence in self.sequences]
        piece: list[int] = []
        used = 0
        trained = [index for index, sequence in enumerate(self.sequences) if sequence.trained]
        for index in sorted(trained, key=lambda i: -sizes[i]):
            if piece and used + sizes[index] > max_tokens:
                yield piece
                piece, used = [], 0
            piece.append(index)
            used += sizes[index]
        if piece:
            yield piece


@dataclass(frozen=True, slots=True)
class PackedInput:
    """What one forward reads; T tokens in all, N of them trained.

    Attributes:
        token_ids, positions: long `[1, T]`.
        lengths: long `[S]`, of the sequences.
        predicting: long `[N]`, index of the token before each trained one, whose logits predict it.
        targets: long `[N]`, the trained tokens.
        temperatures: float32 `[N]`, what each was sampled at.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    lengths: torch.Tensor
    predicting: torch.Tensor
    targets: torch.Tensor
    temperatures: torch.Tensor


def pack(branches: Sequence[Branch], device: torch.device) -> PackedInput:
    """Lays branches one after the other."""
    lengths = np.array([len(branch.token_ids) for branch in branches])
    starts = np.cumsum(lengths) - lengths
    trained = [np.flatnonzero(branch.loss_mask) for branch in branches]
    ids = [branch.token_ids.astype(np.int64) for branch in branches]
    arrays = {
        "token_ids": np.concatenate(ids)[None],
        "positions": np.concatenate([np.arange(length) for length in lengths])[None],
        "lengths": lengths,
        "predicting": np.concatenate([start + where - 1 for start, where in zip(starts, trained, strict=True)]),
        "targets": np.concatenate([own[where] for own, where in zip(ids, trained, strict=True)]),
        "temperatures": np.concatenate(
            [branch.temperatures()[where] for branch, where in zip(branches, trained, strict=True)]
        ),
    }
    return PackedInput(**{name: torch.from_numpy(array).to(device) for name, array in arrays.items()})


def _turn_credit(branch: Branch) -> float:
    return sum(turn.reward for turn in branch.turns if turn.reward is not None)


def _token_rewards(sequence: TrainingSequence) -> np.ndarray:
    branch = sequence.branch
    rewards = np.zeros(len(branch.token_ids), np.float32)
    for turn in branch.turns:
        if turn.reward is not None:
            rewards[turn.end - 1] += turn.reward
    rewards[np.flatnonzero(branch.loss_mask)[-1]] += sequence.reward
    return rewards
