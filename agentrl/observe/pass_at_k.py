"""pass@k and what is known of it: estimates with confidence intervals from several samples a task."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_Z = 1.959964
"""Two-sided 95%."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over so many tasks with its 95% confidence interval."""

    value: float
    low: float
    high: float
    tasks: int


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """The unbiased estimate of the chance that at least one of `k` samples solves a task, if `solved` of `samples` did
    (Chen et al., 2021): 1 - C(samples - solved, k) / C(samples, k).

    Raises:
        ValueError: k is not between 1 and `samples`, or `solved` not between 0 and `samples`.
    """
    if not 1 <= k <= samples or not 0 <= solved <= samples:
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} samples a task; there are {samples}, {solved} solved")
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def share(values: Sequence[float]) -> Estimate:
    """The mean of one number in [0, 1] a task. The interval is Wilson's, for as many observations as the spread between
    tasks is worth: tasks are what is sampled, so that more samples of the same tasks never narrow it to nothing.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("there is no judged task to estimate from")
    mean, count = statistics.fmean(values), len(values)
    variance = statistics.variance(values) / count if count > 1 else 0.0
    observations = mean * (1 - mean) / variance if variance > 0 else float(count)
    scale = 1 + _Z**2 / observations
    centre = (mean + _Z**2 / (2 * observations)) / scale
    half = _Z * math.sqrt(mean * (1 - mean) / observations + _Z**2 / (4 * observations**2)) / scale
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half), count)


def mean(values: Sequence[float]) -> Estimate:
    """The mean of one number a task, of any range, with a normal interval; unbounded for a single task.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("there is no judged task to estimate from")
    centre = statistics.fmean(values)
    half = _Z * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Estimate(centre, centre - half, centre + half, len(values))
