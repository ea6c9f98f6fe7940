"""A run whose training steps change nothing says so, and does not end as a success."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agentrl.record import Group, NoProgress
from agentrl.trainer.idle_steps import MOST_IDLE, IdleSteps, why_skipped

Fixture = Callable[..., Any]

REJECTS_ALL = "algorithm.rollout_correction={rollout_rs: [token_k1], rollout_rs_threshold: [[0.999999999, 1]]}"
TAKEN = {"actor/loss": 0.1, "actor/skipped_steps": 0.0, "actor/nonfinite_steps": 0.0, "actor/grad_norm": 1.0}
SKIPPED = {**TAKEN, "actor/loss": 0.0, "actor/skipped_steps": 1.0, "actor/grad_norm": 0.0}
PARTLY = {**TAKEN, "actor/skipped_steps": 1.0}
CRITIC_ONLY = {**TAKEN, "actor/grad_norm": 0.0}


def poisoned(groups: list[Group]) -> list[Group]:
    for branch in (b for group in groups for trajectory in group.trajectories for b in trajectory.branches):
        branch.logprobs[np.flatnonzero(branch.loss_mask)[0]] = np.nan
    return groups


def without_variance(groups: list[Group]) -> list[Group]:
    for trajectory in (t for group in groups for t in group.trajectories):
        trajectory.reward = 0.5
    return groups


@pytest.mark.parametrize(
    ("keys", "spoil", "said"),
    [
        ((), poisoned, r"not finite \(actor/loss nan\)"),
        ((), without_variance, "the gradient is 0: no reward differs"),
        ((REJECTS_ALL,), list, r"rejected every token: widen rollout_rs_threshold, .*mismatch/kl"),
    ],
)
def test_a_run_in_vain_says_why_at_each_step_and_at_the_end(
    keys: tuple[str, ...], spoil: Callable[[list[Group]], list[Group]], said: str, new_loop: Fixture
) -> None:
    async def play() -> tuple[str, str]:
        loop, rollout, _ = new_loop("trainer.total_steps=2", *keys)
        spoil(rollout._groups)
        await loop.run()
        first = await loop.status(0)
        return first.warning, first.problem

    warning, problem = asyncio.run(play())
    assert re.search(said, warning)
    assert re.search(f"^all 2 training steps left the policy as it was: .*{said}", problem)


def test_a_run_that_goes_on_in_vain_is_ended_and_saved(new_loop: Fixture, tmp_path: Any) -> None:
    async def play() -> Any:
        loop, rollout, rows = new_loop("trainer.total_steps=50", REJECTS_ALL)
        await loop.run()
        assert len(rows.steps) == MOST_IDLE and rollout.calls[-1] == "stop"
        return await loop.status(0)

    status = asyncio.run(play())
    assert status.problem.startswith(f"the last {MOST_IDLE} training steps left the policy as it was")
    assert (tmp_path / "model").is_dir()


def test_a_healthy_run_has_neither_warning_nor_problem(new_loop: Fixture) -> None:
    async def play() -> Any:
        loop, _, _ = new_loop("trainer.total_steps=2")
        await loop.run()
        return await loop.status(0)

    status = asyncio.run(play())
    assert status.metrics and not status.warning and not status.problem


def test_idle_steps_count_in_a_row() -> None:
    idle = IdleSteps()
    for row in [*[SKIPPED] * (MOST_IDLE - 1), PARTLY, CRITIC_ONLY, *[SKIPPED] * (MOST_IDLE - 1)]:
        idle.note(row)
    assert idle.problem() == "", "one step was taken"
    with pytest.raises(NoProgress, match=f"the last {MOST_IDLE} training steps"):
        idle.note(SKIPPED)


def test_a_single_step_in_vain_is_a_problem_and_a_run_without_steps_is_none() -> None:
    idle = IdleSteps()
    assert idle.problem() == ""
    idle.note(CRITIC_ONLY)
    assert idle.problem() == ""
    idle.note(SKIPPED)
    assert idle.problem().startswith("the only training step left the policy as it was: the gradient is 0")


def test_a_step_that_was_partly_taken_is_only_worth_a_word_if_the_rest_was_not_finite() -> None:
    assert why_skipped(TAKEN) == why_skipped(PARTLY) == why_skipped(CRITIC_ONLY) == ""
    assert "not finite" in why_skipped({**PARTLY, "actor/nonfinite_steps": 1.0})
    assert "rollout_is_threshold" in why_skipped({**SKIPPED, "mismatch/weight": 0.0})
    assert "older than rollout.max_head_offpolicyness" in why_skipped({**SKIPPED, "tokens/packed": 0.0})
