"""Trajectories to tensors: what a training step works on, and what one forward reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from agentrl.algorithm import Layout, branch_weights
from agentrl.record import Branch, Group, Trajectory


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """A branch, and whose it is.

    Attributes:
        episode, group: numbers within the batch.
        mini_batch: which optimiser step of the batch trains it.
        trajectory: the episode.
        elsewhere: the turn rewards of the episode's other branches.
        greedy: a greedy episode of the same task, where there was one.
        episode_tokens: trained tokens of the whole episode.
        weight: how much it counts in the loss.
        trained: whether any of its tokens is.
    """

    branch: Branch
    episode: int
    group: int
    mini_batch: int
    trajectory: Trajectory
    elsewhere: float
    greedy: Trajectory | None
    episode_tokens: int
    weight: float = 1.0
    trained: bool = True


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Some sequences, and columns of numbers over their trained tokens.

    Attributes:
        columns: tensors `[1, N]`, the trained tokens of all sequences one after the other. From the start:
            `behav_logp` (recorded at sampling), `versions`, `turn_rewards` (on the last token of each turn), `turn`
            (number of the token's turn) and `place` (tokens since the branch's first trained one). `mask`, where there
            is one, is 0 at tokens that are not trained after all.
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
                credit = sum(map(turn_credit, trajectory.branches))
                sequences += [
                    TrainingSequence(
                        branch=branch,
                        episode=episode,
                        group=number,
                        mini_batch=number // groups_per_mini_batch,
                        trajectory=trajectory,
                        elsewhere=credit - turn_credit(branch),
                        greedy=group.greedy,
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
            "turn_rewards": [_turn_rewards(b)[mask] for b, mask in zip(branches, masks, strict=True)],
            "turn": [_turn_numbers(b)[mask] for b, mask in zip(branches, masks, strict=True)],
            "place": [np.flatnonzero(mask) - np.flatnonzero(mask)[0] for mask in masks],
        }
        return cls(sequences, {name: torch.from_numpy(np.concatenate(c))[None] for name, c in columns.items()})

    def __getitem__(self, column: str) -> torch.Tensor:
        return self.columns[column]

    @property
    def branches(self) -> list[Branch]:
        return [sequence.branch for sequence in self.sequences]

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

        def ids(values: Sequence[float] | np.ndarray) -> torch.Tensor:
            return torch.as_tensor(values, device=device)

        return Layout(
            sequence=ids(np.repeat(np.arange(len(counts)), counts))[None],
            episode=ids([sequence.episode for sequence in self.sequences]),
            group=ids([sequence.group for sequence in self.sequences]),
            episode_tokens=ids([sequence.episode_tokens for sequence in self.sequences]),
            weight=None if self._unweighted else ids([sequence.weight for sequence in self.sequences]),
            turn=self.columns["turn"],
            place=self.columns["place"],
        )

    @property
    def _unweighted(self) -> bool:
        return all(sequence.weight == 1 for sequence in self.sequences)

    @property
    def last_tokens(self) -> torch.Tensor:
        """Where in the columns the last token of each sequence is, long `[S]`."""
        counts = torch.tensor([sequence.branch.trained_tokens for sequence in self.sequences])
        return (counts.cumsum(0) - 1).to(self.columns["behav_logp"].device)

    def with_branch_weights(self, mode: str) -> TrainingData:
        """The same data with the weights of its sequences (`algorithm.branch_weights`)."""
        if len({sequence.episode for sequence in self.sequences}) == len(self.sequences):
            return self
        weights = branch_weights(mode, self.mask, self.layout).tolist()
        pairs = zip(self.sequences, weights, strict=True)
        return replace(self, sequences=[replace(sequence, weight=weight) for sequence, weight in pairs])

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

    def computed(self, max_tokens: int, function: Callable[[TrainingData], dict[str, torch.Tensor]]) -> TrainingData:
        """The same data with the columns, `[1, N]` in float32, that `function` computes for micro-batches; 0 for
        sequences that are not trained."""
        columns: dict[str, torch.Tensor] = {}
        for indices in self.micro_batches(max_tokens):
            for name, values in function(self.select(indices)).items():
                column = columns.setdefault(name, torch.zeros_like(self.columns["behav_logp"]))
                column[:, self.tokens_of(indices)] = values
        return self.with_columns(**columns)

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


def turn_credit(branch: Branch) -> float:
    """What the turns of a branch earned."""
    return sum(turn.reward for turn in branch.turns if turn.reward is not None)


def _turn_rewards(branch: Branch) -> np.ndarray:
    """What each turn earned, at its last token; of a turn that is not trained, at the last trained token before it."""
    rewards = np.zeros(len(branch.token_ids), np.float32)
    for turn in branch.turns:
        if turn.reward is not None:
            trained = np.flatnonzero(branch.loss_mask[: turn.end])
            rewards[trained[-1] if len(trained) else turn.end - 1] += turn.reward
    return rewards


def _turn_numbers(branch: Branch) -> np.ndarray:
    numbers = np.zeros(len(branch.token_ids), np.int64)
    for number, turn in enumerate(branch.turns):
        numbers[turn.start : turn.end] = number
    return numbers
