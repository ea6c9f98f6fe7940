"""Random batches in the form both sides take: fp64, ragged rows with holes, groups of several sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithm import Layout

SIZES = (2, 3, 4, 5, 2)
"""Members of each group. The third one's rewards are all equal."""
EXTREMES = (6.0, -6.0, 12.0, -12.0)
"""Log ratios, in nats, of a few tokens."""


@dataclass(frozen=True)
class RandomBatch:
    """Rows of responses, [B, T].

    Attributes:
        mask: 1 on trained tokens, with holes and ragged ends; some rows begin with a hole.
        rewards: the outcome on each row's last trained token, and some on earlier ones.
        index: [B] group numbers.
    """

    logp: Tensor
    prox: Tensor
    behav: Tensor
    advantages: Tensor
    mask: Tensor
    rewards: Tensor
    values: Tensor
    squares: Tensor
    index: np.ndarray

    @property
    def layout(self) -> Layout:
        return Layout.rows(self.mask, group=self.index.tolist())

    @property
    def scores(self) -> Tensor:
        """The same rewards with all of a row's on its last trained token."""
        last = self.mask.shape[1] - 1 - self.mask.flip(1).argmax(1)
        return torch.zeros_like(self.rewards).scatter(1, last[:, None], self.rewards.sum(1, keepdim=True))


def random_batch(seed: int, length: int = 19) -> RandomBatch:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(SIZES)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
    columns = torch.arange(length)
    holes = torch.rand(rows, length, generator=generator) < 0.25
    mask = ((columns < lengths) & (~holes | (columns == lengths - 1))).double()
    behav = -normal(rows, length).abs() - 0.05
    prox = behav + 0.3 * normal(rows, length)
    logp = prox + 0.3 * normal(rows, length)
    places = torch.randint(0, length, (len(EXTREMES),), generator=generator)
    for row, (place, extreme) in enumerate(zip(places.tolist(), EXTREMES, strict=True)):
        prox[row, place] += extreme
        logp[row + len(EXTREMES), place] += extreme
    index = np.repeat(np.arange(len(SIZES)), SIZES)
    last = length - 1 - mask.flip(1).argmax(1)
    rewards = torch.zeros_like(mask).scatter(1, last[:, None], normal(rows, 1).round(decimals=1))
    rewards[torch.from_numpy(index == 2), last[torch.from_numpy(index == 2)]] = 0.3
    squares = torch.rand(rows, length, generator=generator, dtype=torch.float64)
    return RandomBatch(logp, prox, behav, normal(rows, length), mask, rewards, normal(rows, length), squares, index)
