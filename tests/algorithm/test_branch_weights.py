"""How much the branches of an episode count."""

import pytest
import torch

from agentrl.algorithm import Layout, Totals, aggregate, branch_weights

MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
"""Episode 5 has branches of 4 and 1 tokens and one of none; episode 3 a single one of 2."""
EPISODE = [5, 5, 3, 5]
VALUES = torch.tensor([[1.0] * 4, [11.0] * 4, [100.0] * 4, [torch.nan] * 4], dtype=torch.float64)


def layout(weight: torch.Tensor | None = None) -> Layout:
    rows = Layout.rows(MASK, episode=EPISODE)
    return Layout(rows.sequence, rows.episode, rows.group, weight=weight)


@pytest.mark.parametrize(
    ("mode", "weights"), [("episode", [0.5, 0.5, 1, 0]), ("branch", [1, 1, 1, 0]), ("token", [0.8, 0.2, 1, 0])]
)
def test_the_weights(mode, weights):
    assert branch_weights(mode, MASK, layout()).tolist() == pytest.approx(weights)


def test_an_unknown_weighting_is_refused():
    with pytest.raises(ValueError, match="branch_weighting is 'turn'"):
        branch_weights("turn", MASK, layout())


@pytest.mark.parametrize(
    ("aggregation", "mode", "value"),
    [
        ("seq-mean-token-mean", "branch", (1 + 11 + 100) / 3),
        ("seq-mean-token-mean", "episode", (6 + 100) / 2),
        ("seq-mean-token-mean", "token", (3 + 100) / 2),
        ("seq-mean-token-sum", "episode", (0.5 * 4 + 0.5 * 11 + 200) / 2),
        ("token-sum", "episode", 0.5 * 4 + 0.5 * 11 + 200),
        ("token-mean", "branch", (4 + 11 + 200) / 7),
        ("token-mean", "episode", (0.5 * 4 + 0.5 * 11 + 200) / (2.5 + 2)),
        ("episode-mean", "episode", (3 + 100) / 2),
        ("episode-mean", "token", (3 + 100) / 2),
    ],
)
def test_aggregates_are_weighted(aggregation, mode, value):
    weighted = layout(branch_weights(mode, MASK, layout()))
    assert aggregate(VALUES, MASK, aggregation, layout=weighted).item() == pytest.approx(value)
    totals = Totals.count(MASK, weighted)
    assert aggregate(VALUES, MASK, aggregation, layout=weighted, totals=totals).item() == pytest.approx(value)


def test_a_linear_episode_weighs_one_in_every_mode():
    for mode in ("episode", "branch", "token"):
        assert branch_weights(mode, MASK, Layout.rows(MASK))[:3].tolist() == [1, 1, 1]
