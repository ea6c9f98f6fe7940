"""The estimators that look at what comes after a token, against recursions in plain Python."""

import statistics

import pytest
import torch

from agentrl.algorithm import AdvantageConfig, Layout, compute_advantages

MASK = torch.tensor([[0, 1, 1, 0, 0, 1, 1], [1, 0, 0, 1, 0, 0, 0]])
"""Turns of 2 and 2 tokens; and of 1 and 1."""
REWARDS = torch.tensor([[9, 0.5, 0, 9, 9, 0, 2], [0.25, 9, 9, 1, 9, 9, 9]], dtype=torch.float64)
VALUES = torch.tensor([[7, 0.1, 0.2, 7, 7, 0.3, 0.4], [0.5, 7, 7, 0.6, 7, 7, 7]], dtype=torch.float64)


def plain_gae(rewards, values, gamma, lam) -> list[float]:
    result, running, following = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward + gamma * following - value + gamma * lam * running
        following = value
        result.append(running)
    return result[::-1]


def whitened(values) -> list[float]:
    return [(x - statistics.mean(values)) / statistics.stdev(values) for x in values]


def compute(estimator, mask=MASK, rewards=REWARDS, layout=None, **takes) -> tuple[torch.Tensor, torch.Tensor]:
    names = ("gamma", "lam", "gae_timestep")
    config = AdvantageConfig(**{name: takes.pop(name) for name in names if name in takes})
    layout = layout or Layout.rows(mask, group=[0] * len(mask))
    advantages, returns = compute_advantages(
        estimator, token_rewards=rewards, mask=mask, layout=layout, config=config, **takes
    )
    assert not advantages[mask == 0].any() and not returns[mask == 0].any()
    return advantages, returns


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.5, 0.0)])
def test_gae_skips_what_is_not_trained(gamma, lam):
    rewards = [REWARDS[row][MASK[row] == 1].tolist() for row in range(2)]
    values = [VALUES[row][MASK[row] == 1].tolist() for row in range(2)]
    plain = [x for r, v in zip(rewards, values, strict=True) for x in plain_gae(r, v, gamma, lam)]
    advantages, returns = compute("gae", values=VALUES, gamma=gamma, lam=lam)
    assert advantages[MASK == 1].tolist() == pytest.approx(whitened(plain), rel=1e-6)
    expected = [x + v for x, v in zip(plain, values[0] + values[1], strict=True)]
    assert returns[MASK == 1].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("explicit", [True, False])
def test_gae_over_turns_gives_all_tokens_of_a_turn_the_same(explicit):
    """A turn's reward is that of its tokens together, its value that at its first token."""
    first = plain_gae([0.5, 2.0], [0.1, 0.3], 0.9, 0.8)
    second = plain_gae([0.25, 1.0], [0.5, 0.6], 0.9, 0.8)
    turn = torch.tensor([[-1, 4, 4, -1, -1, 6, 6], [0, -1, -1, 2, -1, -1, -1]])
    rows = Layout.rows(MASK)
    layout = Layout(rows.sequence, rows.episode, rows.group, turn=turn if explicit else None)
    advantages, returns = compute("gae", layout=layout, values=VALUES, gamma=0.9, lam=0.8, gae_timestep="turn")
    plain = [first[0], first[0], first[1], first[1], *second]
    assert advantages[MASK == 1].tolist() == pytest.approx(whitened(plain), rel=1e-6)
    states = [0.1, 0.1, 0.3, 0.3, 0.5, 0.6]
    assert returns[MASK == 1].tolist() == pytest.approx([x + v for x, v in zip(plain, states, strict=True)])


def test_turns_side_by_side_are_told_apart_by_their_numbers():
    """Where only trained tokens are kept, nothing lies between two turns."""
    mask = torch.ones(1, 3)
    rewards = torch.tensor([[0.0, 1.0, 3.0]], dtype=torch.float64)
    rows = Layout.rows(mask)
    layout = Layout(rows.sequence, rows.episode, rows.group, turn=torch.tensor([[0, 0, 1]]))
    _, returns = compute(
        "gae", mask=mask, rewards=rewards, layout=layout, values=rewards * 0, gamma=0.5, gae_timestep="turn"
    )
    assert returns.tolist() == [[1 + 0.5 * 3, 1 + 0.5 * 3, 3]]


def test_a_reward_counts_for_what_came_before_it_in_its_branch_alone():
    """Two branches of an episode: what one earns is no return of the other's tokens."""
    mask = torch.ones(2, 3)
    rewards = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 5.0]], dtype=torch.float64)
    layout = Layout.rows(mask, episode=[0, 0])
    _, returns = compute("reinforce_plus_plus", mask=mask, rewards=rewards, layout=layout)
    assert returns.tolist() == [[1, 1, 0], [5, 5, 5]]


def test_remax_subtracts_the_greedy_reward():
    advantages, returns = compute("remax", baselines=torch.tensor([1.0, 0.25]))
    assert returns[MASK == 1].tolist() == [2.5, 2, 2, 2, 1.25, 1]
    assert advantages[MASK == 1].tolist() == [1.5, 1, 1, 1, 1, 0.75]


def test_remax_wants_a_baseline_for_each_sequence():
    with pytest.raises(ValueError, match=r"baselines has shape \[3\]"):
        compute("remax", baselines=torch.zeros(3))


@pytest.mark.parametrize(
    ("estimator", "places"), [("optimal_token_baseline", True), ("tir_optimal_token_baseline", False)]
)
def test_the_optimal_baseline_is_its_definition(estimator, places):
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    generator = torch.Generator().manual_seed(3)
    rewards, logp, squares = torch.rand(3, *mask.shape, generator=generator, dtype=torch.float64)
    logp = -logp - 0.1
    advantages, returns = compute(estimator, mask=mask, rewards=rewards, logp=logp, sum_pi_squared=squares)

    tokens = [[t for t in range(4) if mask[row, t]] for row in range(3)]
    at = [{(t if places else i): t for i, t in enumerate(row)} for row in tokens]
    lengths = sorted(len(row) for row in tokens)

    def gain(row, t):
        return sum(rewards[row, later].item() for later in tokens[row] if later >= t)

    def variation(row, t):
        return sum((1 - 2 * logp[row, s].exp() + squares[row, s]).item() for s in tokens[row] if s <= t)

    for row in range(3):
        for place, t in at[row].items():
            assert returns[row, t].item() == pytest.approx(gain(row, t))
            others = [(r, at[r][place]) for r in range(3) if place in at[r]]
            weights = [variation(*other) for other in others]
            baseline = sum(w * gain(*other) for w, other in zip(weights, others, strict=True)) / (sum(weights) + 1e-8)
            assert lengths[-1] == lengths[-2], "no row is the only longest one"
            assert advantages[row, t].item() == pytest.approx(gain(row, t) - baseline)


def test_the_tail_that_only_the_longest_has_is_without_a_baseline():
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    rewards = torch.ones_like(mask).double()
    ones = torch.zeros_like(rewards)
    advantages, returns = compute(
        "optimal_token_baseline", mask=mask, rewards=rewards, logp=ones - 1, sum_pi_squared=ones
    )
    assert torch.equal(advantages[0, 2:], returns[0, 2:]) and advantages[0, 0] != returns[0, 0]


@pytest.mark.parametrize("estimator", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_the_optimal_baselines_count_an_episode_once(estimator):
    mask = torch.ones(4, 1)
    rewards = torch.tensor([[1.0], [1.0], [1.0], [0.0]], dtype=torch.float64)
    logp, squares = rewards * 0 - 1, rewards * 0 + 0.5
    layout = Layout.rows(mask, group=[0] * 4, episode=[0, 0, 0, 1])
    advantages, _ = compute(estimator, mask=mask, rewards=rewards, layout=layout, logp=logp, sum_pi_squared=squares)
    assert advantages[:, 0].tolist() == pytest.approx([0.5, 0.5, 0.5, -0.5])


@pytest.mark.parametrize("estimator", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_an_episode_is_no_baseline_of_its_own_tail(estimator):
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 0]])
    rewards = torch.zeros(3, 3, dtype=torch.float64)
    rewards[:2, 2] = 1
    layout = Layout.rows(mask, group=[0] * 3, episode=[0, 0, 1])
    advantages, returns = compute(
        estimator, mask=mask, rewards=rewards, layout=layout, logp=rewards * 0 - 1, sum_pi_squared=rewards * 0
    )
    assert torch.equal(advantages[:2, 1:], returns[:2, 1:])


def test_importance_weights_count_in_the_optimal_baseline():
    mask = torch.ones(2, 1)
    rewards = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    weights = torch.tensor([[2.0], [1.0]], dtype=torch.float64)
    inputs = {"logp": rewards * 0 - 1, "sum_pi_squared": rewards * 0, "importance_weights": weights}
    advantages, _ = compute("tir_optimal_token_baseline", mask=mask, rewards=rewards, **inputs)
    assert advantages[:, 0].tolist() == pytest.approx([1 - 4 / 5, -4 / 5])


def test_places_are_the_same_padded_and_packed():
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
    rewards = torch.tensor([[0, 1.0, 2.0], [3.0, 1.0, 0]], dtype=torch.float64)
    arguments = {"logp": rewards * 0 - 1, "sum_pi_squared": rewards * 0}
    padded, _ = compute("optimal_token_baseline", mask=mask, rewards=rewards, **arguments)
    sequence = torch.tensor([[0, 0, 0, 1, 1, 1]])
    packed, _ = compute(
        "optimal_token_baseline",
        mask=mask.view(1, 6),
        rewards=rewards.view(1, 6),
        layout=Layout(sequence, torch.tensor([0, 1]), torch.tensor([0, 0])),
        **{name: value.view(1, 6) for name, value in arguments.items()},
    )
    assert torch.equal(packed.view(2, 3), padded)
