"""From per-token losses to one number whose shares add up over micro-batches and ranks.

Every mode is a sum over trained tokens of `value * weight / denominator`, the weights and denominators being
counts, never results of the call alone: that makes loss and gradient independent of how the optimiser step is
cut into calls. Denominators come from `Totals`; without them the call is taken for the whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithm.layout import Layout
from agentrl.algorithm.masking import is_trained, masked, require_same_shape, widened
from agentrl.algorithm.registry import Registry


@dataclass(frozen=True, eq=False)
class Totals:
    """The counts of a whole optimiser step, over all micro-batches and ranks.

    Count with the mask before rejection: a rejected token leaves the numerator, not the denominator.

    Attributes:
        tokens: trained tokens, each with the weight of its sequence (`layout.weight`), if sequences have weights.
        sequences: sequences with at least one trained token, each with its weight.
        episodes: episodes with at least one trained token.
    """

    tokens: Tensor | float
    sequences: Tensor | float
    episodes: Tensor | float

    @classmethod
    def count(cls, mask: Tensor, layout: Layout | None = None) -> Totals:
        """The counts of `mask` [B, T], as scalars on its device; padded rows where `layout` is None."""
        layout = layout or Layout.rows(mask)
        return cls(_tokens(mask, layout), _sequences(mask, layout), layout.episode_count(mask))


@dataclass(frozen=True, eq=False)
class AggregateInputs:
    """What an aggregation mode works on. `values` are 0 outside `trained`, both [B, T]."""

    values: Tensor
    trained: Tensor
    layout: Layout
    totals: Totals | None
    scale: float | None

    def tokens(self) -> Tensor | float:
        return _tokens(self.trained, self.layout) if self.totals is None else self.totals.tokens

    def sequences(self) -> Tensor | float:
        return _sequences(self.trained, self.layout) if self.totals is None else self.totals.sequences

    def episodes(self) -> Tensor | float:
        return self.layout.episode_count(self.trained) if self.totals is None else self.totals.episodes

    def weighted(self) -> Tensor:
        """[B, T] the values times the weights of their sequences."""
        if self.layout.weight is None:
            return self.values
        return self.values * self.layout.spread(self.layout.weight.to(self.values.dtype), self.trained)


def _tokens(mask: Tensor, layout: Layout) -> Tensor:
    weights = layout.weights(mask)
    return is_trained(mask).sum() if weights is None else (weights * layout.counts(mask)).sum()


def _sequences(mask: Tensor, layout: Layout) -> Tensor:
    weights = layout.weights(mask)
    return (layout.counts(mask) > 0).sum() if weights is None else weights.sum()


BRANCH_WEIGHTINGS = ("episode", "branch", "token")
"""Modes of `branch_weights`."""


def branch_weights(mode: str, mask: Tensor, layout: Layout) -> Tensor:
    """[S] how much each sequence counts in the loss, fp32; 1 for the only branch of an episode in every mode.

    | mode | weight of a branch |
    |---|---|
    | `episode` | 1 / the episode's branches: however it branched, an episode counts once |
    | `branch` | 1: an episode counts as often as it has branches |
    | `token` | the branch's share of the episode's trained tokens: an episode counts once, its longer branches more |

    Args:
        mask: [B, T], 1 on trained tokens. Branches without any weigh 0 and are not counted.
        layout: the episode of each sequence, all sequences of an episode within it.

    Raises:
        ValueError: unknown mode.
    """
    if mode not in BRANCH_WEIGHTINGS:
        raise ValueError(f"branch_weighting is {mode!r}: use one of {', '.join(BRANCH_WEIGHTINGS)}")
    counts = layout.counts(mask)
    present = (counts > 0).float()
    if mode == "branch":
        return present
    _, episode = layout.episode.unique(return_inverse=True)
    parts = present if mode == "episode" else counts
    total = parts.new_zeros(layout.sequences).index_add(0, episode, parts)[episode]
    return parts / total.clamp(min=1)


AGGREGATIONS: Registry[Callable[[AggregateInputs], Tensor]] = Registry("loss_agg_mode")


def aggregate(
    values: Tensor,
    mask: Tensor,
    mode: str,
    *,
    layout: Layout | None = None,
    totals: Totals | None = None,
    scale: float | None = None,
) -> Tensor:
    """This call's share of the aggregate of `values` over the trained tokens of an optimiser step.

    Add the shares (and their gradients) of all micro-batches and ranks; do not average them.

    | mode | value |
    |---|---|
    | `token-mean` | sum / trained tokens (DAPO, arXiv:2503.14476) |
    | `token-sum` | sum |
    | `seq-mean-token-sum` | sum / sequences |
    | `seq-mean-token-sum-norm` | sum / sequences / scale (Dr.GRPO, arXiv:2503.20783) |
    | `seq-mean-token-mean` | mean over sequences of the mean over a sequence's tokens (GRPO, arXiv:2402.03300) |
    | `episode-mean` | mean over episodes of the mean over all tokens of an episode's sequences |

    Where `layout.weight` gives sequences weights, sums and means over tokens and over sequences are weighted with
    them. `episode-mean` is not: in it all tokens of an episode count the same.

    Args:
        values: [B, T]; masked positions may hold anything, NaN and inf included.
        mask: [B, T], 1 on trained tokens.
        layout: the sequences of packed rows; None means that row i is sequence i.
        totals: counts of the whole optimiser step; None uses those of this call.
        scale: tokens, read by `seq-mean-token-sum-norm` only; None uses the row width T, which depends on
            padding and packing, so training passes a constant.

    Returns:
        A scalar in fp32 or wider; exactly 0, with gradient 0, where nothing is trained.

    Raises:
        ValueError: unknown mode, shapes that differ, or a scale that is not positive.
    """
    require_same_shape(values=values, mask=mask, sequence=layout.sequence if layout else None)
    if scale is not None and scale <= 0:
        raise ValueError(f"scale is {scale}: pass a positive number of tokens, e.g. the longest response")
    trained = is_trained(mask)
    inputs = AggregateInputs(widened(masked(values, trained)), trained, layout or Layout.rows(mask), totals, scale)
    return AGGREGATIONS.get(mode)(inputs)


@AGGREGATIONS.register("token-mean")
def _token_mean(inputs: AggregateInputs) -> Tensor:
    return inputs.weighted().sum() / _at_least_one(inputs.tokens())


@AGGREGATIONS.register("token-sum")
def _token_sum(inputs: AggregateInputs) -> Tensor:
    return inputs.weighted().sum()


@AGGREGATIONS.register("seq-mean-token-sum")
def _seq_mean_token_sum(inputs: AggregateInputs) -> Tensor:
    return inputs.weighted().sum() / _at_least_one(inputs.sequences())


@AGGREGATIONS.register("seq-mean-token-sum-norm")
def _seq_mean_token_sum_norm(inputs: AggregateInputs) -> Tensor:
    scale = inputs.values.shape[-1] if inputs.scale is None else inputs.scale
    return _seq_mean_token_sum(inputs) / _at_least_one(scale)


@AGGREGATIONS.register("seq-mean-token-mean")
def _seq_mean_token_mean(inputs: AggregateInputs) -> Tensor:
    per_sequence = inputs.layout.counts(inputs.trained)
    return _mean_of_means(inputs, inputs.weighted(), per_sequence) / _at_least_one(inputs.sequences())


@AGGREGATIONS.register("episode-mean")
def _episode_mean(inputs: AggregateInputs) -> Tensor:
    per_sequence = inputs.layout.episode_counts(inputs.trained)
    return _mean_of_means(inputs, inputs.values, per_sequence) / _at_least_one(inputs.episodes())


def _mean_of_means(inputs: AggregateInputs, values: Tensor, counts: Tensor) -> Tensor:
    """Sum over trained tokens of value / count, `counts` [S] being the size of the mean a token belongs to."""
    shares = counts.to(values.dtype).clamp(min=1).reciprocal()
    return (values * inputs.layout.spread(shares, inputs.trained)).sum()


def _at_least_one(count: Tensor | float) -> Tensor | float:
    """`count`, or 1 in place of 0: a sum over nothing is 0 and stays 0."""
    if isinstance(count, Tensor):
        return torch.where(count > 0, count, torch.ones_like(count))
    return count if count > 0 else 1
