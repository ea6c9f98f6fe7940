"""Random batches in the form both sides take: fp64, ragged rows with holes, groups of several sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithm import Layout

SIZES = (2, 3, 4, 5, 2)
"""Members of each group. The third one's rewards are all equal."""
EXTREMES = (6.0, -6.0, 12.0, -12.0, 25.0, -25.0)
"""Log ratios, in nats, of trained tokens, each of another row: proximal to behaviour, then current to proximal."""


@dataclass(frozen=True)
class RandomBatch:
    """Rows of responses, [B, T].

    Attributes:
        mask: 1 on trained tokens, with holes and ragged ends; some rows begin with a hole.
        rewards: the outcome on each row's last trained token, and some on earlier trained ones.
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
    last = length - 1 - mask.flip(1).argmax(1)
    for row, extreme in enumerate(EXTREMES):
        prox[row, last[row]] += extreme
        logp[row, last[row]] += extreme
        logp[row + len(EXTREMES), last[row + len(EXTREMES)]] += extreme
    index = np.repeat(np.arange(len(SIZES)), SIZES)
    rewards = torch.zeros_like(mask).scatter(1, last[:, None], normal(rows, 1).round(decimals=1))
    early = mask * (torch.rand(rows, length, generator=generator) < 0.1) * (columns < last[:, None])
    rewards = rewards + early * normal(rows, length).round(decimals=1)
    equal = torch.from_numpy(index == 2)
    rewards[equal] = 0.0
    rewards[equal, last[equal]] = 0.3
    squares = torch.rand(rows, length, generator=generator, dtype=torch.float64)
    return RandomBatch(logp, prox, behav, normal(rows, length), mask, rewards, normal(rows, length), squares, index)
