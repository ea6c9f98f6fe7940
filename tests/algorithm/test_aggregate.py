"""Aggregation against plain Python, and the shares that must add up."""

import math
from itertools import chain

import pytest
import torch

from agentrl.algorithm import Layout, Totals, UnknownNameError, aggregate
from agentrl.algorithm.aggregate import AGGREGATIONS

MODES = AGGREGATIONS.names()
EPISODES = [0, 0, 1, 2, 3]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [0, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    values = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    return values, mask


def plain(values: torch.Tensor, mask: torch.Tensor, mode: str, scale: float) -> float:
    """The definition of each mode, over lists."""
    rows = [
        [value for value, trained in zip(row, kept, strict=True) if trained]
        for row, kept in zip(values.tolist(), mask.tolist(), strict=True)
    ]
    episodes = [list(chain(*(row for row, e in zip(rows, EPISODES, strict=True) if e == i))) for i in set(EPISODES)]

    def mean(items: list[float]) -> float:
        return sum(items) / len(items)

    sequences = [row for row in rows if row]
    everything = list(chain(*rows))
    return {
        "token-mean": lambda: mean(everything),
        "token-sum": lambda: sum(everything),
        "seq-mean-token-sum": lambda: mean([sum(row) for row in sequences]),
        "seq-mean-token-sum-norm": lambda: mean([sum(row) / scale for row in sequences]),
        "seq-mean-token-mean": lambda: mean([mean(row) for row in sequences]),
        "episode-mean": lambda: mean([mean(tokens) for tokens in episodes if tokens]),
    }[mode]()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [None, 7.0])
def test_each_mode_is_its_definition(mode, scale):
    values, mask = batch()
    result = aggregate(values, mask, mode, layout=Layout.rows(mask, episode=EPISODES), scale=scale)
    assert result.item() == pytest.approx(plain(values, mask, mode, scale or 4), rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_masked_values_change_neither_value_nor_gradient(mode):
    values, mask = batch()
    gradients, results = [], []
    for junk in (0.0, torch.nan, torch.inf, -200.0):
        leaf = torch.where(mask > 0, values, junk).requires_grad_()
        result = aggregate(leaf, mask, mode)
        result.backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
        results.append(result)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("totals", [None, Totals(0, 0, 0), Totals(12, 4, 3)])
def test_all_masked_is_zero_with_zero_gradient(mode, totals):
    values = torch.full((2, 3), torch.nan, requires_grad=True)
    result = aggregate(values, torch.zeros(2, 3), mode, totals=totals)
    result.backward()
    assert result.item() == 0
    assert values.grad is not None and not values.grad.any()


def test_micro_batches_are_not_a_mean_of_means():
    ones, zeros = torch.ones(1, 1), torch.zeros(1, 9)
    totals = Totals(tokens=10, sequences=2, episodes=2)
    shares = [aggregate(values, torch.ones_like(values), "token-mean", totals=totals) for values in (ones, zeros)]
    assert sum(share.item() for share in shares) == pytest.approx(0.1)


def test_branches_of_one_episode_may_lie_in_different_calls():
    values, mask = batch()
    whole = Layout.rows(mask, episode=EPISODES)
    totals = Totals.count(mask, whole)
    tokens = whole.episode_counts(mask)
    shares = 0.0
    for row in range(len(EPISODES)):
        part = slice(row, row + 1)
        rows = Layout.rows(mask[part])
        layout = Layout(rows.sequence, whole.episode[part], whole.group[part], episode_tokens=tokens[part])
        shares += aggregate(values[part], mask[part], "episode-mean", layout=layout, totals=totals).item()
    assert shares == pytest.approx(plain(values, mask, "episode-mean", 1), rel=1e-6)


def test_totals_count_what_is_trained():
    _, mask = batch()
    totals = Totals.count(mask, Layout.rows(mask, episode=EPISODES))
    assert [int(count) for count in (totals.tokens, totals.sequences, totals.episodes)] == [8, 4, 3]


def test_no_count_loses_precision_in_half():
    values = torch.ones(1, 1000, dtype=torch.bfloat16)
    result = aggregate(values, torch.ones(1, 1000, dtype=torch.bfloat16), "seq-mean-token-mean")
    assert math.isclose(result.item(), 1.0, rel_tol=1e-2)


def test_errors_name_what_is_wrong():
    values, mask = batch()
    with pytest.raises(UnknownNameError, match=r"loss_agg_mode 'mean'.*token-mean"):
        aggregate(values, mask, "mean")
    with pytest.raises(ValueError, match=r"mask has shape \[5, 3\]"):
        aggregate(values, mask[:, 1:], "token-mean")
    with pytest.raises(ValueError, match="scale is 0"):
        aggregate(values, mask, "seq-mean-token-sum-norm", scale=0)
