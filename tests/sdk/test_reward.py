"""What counts as a reward."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from agentrl.sdk import Reward, as_reward


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (False, 0.0),
        (np.float32(0.25), 0.25),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (torch.tensor(0.5), 0.5),
    ],
    ids=repr,
)
def test_any_real_number_is_a_reward(value: Any, number: float) -> None:
    reward = as_reward(value)
    assert reward == Reward(number)
    assert type(reward.value) is float


@pytest.mark.parametrize("value", [None, "1", [1.0], {"value": 1}, object(), 1j, np.array([1.0, 2.0])], ids=repr)
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        as_reward(value)


def test_a_forgotten_return_is_explained() -> None:
    with pytest.raises(TypeError, match=r"is None: return it from AgentLoop\.run or Env\.score"):
        as_reward(None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), Reward(float("-inf")), np.float32("nan")], ids=repr)
def test_a_reward_is_finite(value: Any) -> None:
    with pytest.raises(ValueError, match="the reward must be finite"):
        as_reward(value)


def test_parts_are_finite_numbers_too() -> None:
    reward = as_reward(Reward(1, parts={"style": np.float32(0.5), "accuracy": True}))  # type: ignore[dict-item]
    assert reward.parts == {"style": 0.5, "accuracy": 1.0}
    with pytest.raises(ValueError, match="style must be finite"):
        as_reward(Reward(1.0, parts={"style": float("nan")}))


def test_info_under_keys_that_are_no_text_is_refused_where_the_agent_gives_it() -> None:
    with pytest.raises(TypeError, match="text keys"):
        as_reward(Reward(1.0, info=cast(Any, {1: "a"})))


def test_info_holds_what_a_file_can_hold() -> None:
    info = {"text": "a", "numbers": [1, 2.5, None], "array": np.arange(3)}
    assert as_reward(Reward(1.0, info=info)).info is info
    with pytest.raises(TypeError, match=r"Reward\.info must hold JSON values"):
        as_reward(Reward(1.0, info={"thing": object()}))


@pytest.mark.parametrize(
    ("reward", "solved"),
    [
        (Reward(1.0), True),
        (Reward(0.99), False),
        (Reward(0.2, parts={"accuracy": 1.0}), True),
        (Reward(1.5, parts={"accuracy": 0.0}), False),
        (Reward(1.0, parts={"style": 0.0}), True),
    ],
)
def test_accuracy_decides_what_is_solved_where_there_is_one(reward: Reward, solved: bool) -> None:
    assert reward.solved is solved
