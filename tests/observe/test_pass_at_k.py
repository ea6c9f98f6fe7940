"""pass@k and its intervals against what they are defined by."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.observe.pass_at_k import mean, pass_at_k, share


@given(st.integers(1, 8), st.data())
def test_it_is_the_share_of_draws_that_hold_a_solved_sample(samples: int, data: st.DataObject) -> None:
    solved, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    outcomes = [True] * solved + [False] * (samples - solved)
    draws = list(itertools.combinations(outcomes, k))
    assert pass_at_k(samples, solved, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("samples", "solved", "k"), [(4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0), (0, 0, 1)])
def test_what_can_not_be_estimated_is_refused(samples: int, solved: int, k: int) -> None:
    with pytest.raises(ValueError, match="needs at least"):
        pass_at_k(samples, solved, k)


def test_one_sample_a_task_gives_wilsons_interval() -> None:
    # 7 of 10: the textbook's 0.3968 to 0.8922; the variance of the tasks has Bessel's correction, so nearly.
    estimate = share([1.0] * 7 + [0.0] * 3)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.7, 0.3968, 0.8922), abs=0.02)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_perfect_result_of_few_tasks_is_not_certain(value: float) -> None:
    estimate = share([value] * 10)
    assert estimate.value == value
    assert estimate.high - estimate.low == pytest.approx(0.2775, abs=0.001)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_an_interval_holds_its_value_and_stays_within_its_bounds(values: list[float]) -> None:
    estimate = share(values)
    assert 0 <= estimate.low <= estimate.value + 1e-9 and estimate.value - 1e-9 <= estimate.high <= 1


@pytest.mark.parametrize("samples", [1, 4])
def test_nineteen_in_twenty_intervals_hold_the_truth(samples: int) -> None:
    random_source = random.Random(0)
    held = []
    for _ in range(1000):
        # Half of the tasks are easy, half are hard: samples of a task are not independent.
        chances = [random_source.choice((0.9, 0.1)) for _ in range(40)]
        values = [statistics.fmean(random_source.random() < chance for _ in range(samples)) for chance in chances]
        estimate = share(values)
        held.append(estimate.low <= 0.5 <= estimate.high)
    assert 0.93 <= statistics.fmean(held) <= 0.98


def test_rewards_of_any_range_have_a_normal_interval() -> None:
    estimate = mean([-1.0, 3.0, 1.0, 1.0])
    half = 1.959964 * statistics.stdev([-1.0, 3.0, 1.0, 1.0]) / 2
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((1.0, 1 - half, 1 + half))
    assert mean([2.0]).high == math.inf


@pytest.mark.parametrize("estimate", [mean, share])
def test_nothing_judged_is_no_zero(estimate: object) -> None:
    assert callable(estimate)
    with pytest.raises(ValueError, match="no judged task"):
        estimate([])
