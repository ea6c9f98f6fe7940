"""From what episodes earned to the advantages of their tokens."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.record import Branch, Group, Trajectory, Turn
from agentrl.trainer.credit import Credit, CreditAssigner
from agentrl.trainer.packing import TrainingData

Fixture = Callable[..., Any]


def branch(*turns: tuple[int, float | None]) -> Branch:
    """Turns of so many tokens with such a reward, a token of context before each."""
    mask: list[int] = []
    places: list[Turn] = []
    for tokens, reward in turns:
        places.append(Turn(len(mask) + 1, len(mask) + 1 + tokens, 1.0, "stop", reward=reward))
        mask += [0] + [1] * tokens
    trained = np.array(mask, np.uint8)
    return Branch(np.arange(len(mask)), trained, -trained.astype(np.float32), np.where(trained, 0, -1), places)


def episode(reward: float, *branches: Branch, parts: dict[str, float] | None = None) -> Trajectory:
    return Trajectory("e", "g", "t", 0, 0, list(branches), reward, reward_parts=parts or {})


def credit(new_config: Fixture, groups: list[list[Trajectory]], *keys: str, **columns: torch.Tensor) -> Credit:
    data = TrainingData.from_groups([Group(str(i), members, 0) for i, members in enumerate(groups)], 1)
    return CreditAssigner(new_config(*keys)).assign(data.with_columns(**columns))


def test_a_group_estimator_compares_all_that_episodes_earned_whichever_branch_earned_it(new_config: Fixture) -> None:
    members = [episode(1.0, branch((2, 0.5)), branch((1, 0.25))), episode(0.25, branch((1, None)))]
    result = credit(new_config, [members], "algorithm.adv_estimator=rloo")
    assert result.advantages.tolist() == [[1.5, 1.5, 1.5, -1.5]]


def test_a_placed_reward_goes_back_along_its_own_branch_only(new_config: Fixture) -> None:
    members = [episode(1.0, branch((2, 0.5), (1, None)), branch((1, 8.0)))]
    result = credit(new_config, [members], "algorithm.adv_estimator=reinforce_plus_plus")
    assert result.returns.tolist() == [[1.5, 1.5, 1.0, 9.0]]


def test_gae_over_turns_takes_turns_from_the_record(new_config: Fixture) -> None:
    members = [episode(1.0, branch((2, 0.5), (3, None)))]
    keys = ("algorithm.adv_estimator=gae", "algorithm.gae_timestep=turn", "algorithm.gamma=0.5")
    result = credit(new_config, [members], *keys, values=torch.zeros(1, 5))
    assert result.returns.tolist() == [[1.0, 1.0, 1.0, 1.0, 1.0]]
    assert credit(new_config, [members], *keys[::2], values=torch.zeros(1, 5)).returns.tolist() == [
        pytest.approx([0.5**4 + 0.25, 0.5**3 + 0.5, 0.25, 0.5, 1.0])
    ]


def test_rewards_are_shifted_scaled_cut_and_lose_for_length(new_config: Fixture) -> None:
    members = [
        episode(1.0, branch((4, None))),
        episode(1.0, branch((2, None), (1, None))),
        episode(9.0, branch((1, 1.0))),
    ]
    keys = (
        "algorithm.adv_estimator=reinforce_plus_plus",
        "data.max_response_length=4",
        "algorithm.overlong_buffer_len=2",
        "algorithm.overlong_penalty_factor=0.5",
        "algorithm.reward_bias=1",
        "algorithm.reward_scaling=2",
        "algorithm.reward_clip=5",
    )
    result = credit(new_config, [members], *keys)
    assert result.returns.tolist() == [[3.0] * 4 + [4.0] * 3 + [7.0]], "the reward of a turn is scaled, not cut"
    assert result.metrics["reward/overlong_penalty"] == pytest.approx(-0.5 / 3)


def test_normalised_rewards_count_an_episode_once(new_config: Fixture) -> None:
    members = [episode(1.0, branch((1, None)), branch((1, None))), episode(0.0, branch((1, None)))]
    keys = ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.reward_norm={mean_level: group, std_level: null}")
    assert credit(new_config, [members], *keys).returns.tolist() == [[0.5, 0.5, -0.5]]


def test_normalised_advantages(new_config: Fixture) -> None:
    members = [episode(1.0, branch((3, None))), episode(0.0, branch((1, None)))]
    keys = ("algorithm.adv_estimator=rloo", "algorithm.adv_norm={mean_level: batch}")
    values = [1.0, 1.0, 1.0, -1.0]
    expected = [(x - statistics.mean(values)) / (statistics.stdev(values) + 1e-5) for x in values]
    assert credit(new_config, [members], *keys).advantages.tolist() == [pytest.approx(expected)]


def test_the_kl_penalty_is_taken_off_every_token(new_config: Fixture) -> None:
    data = [[episode(1.0, branch((2, None)))]]
    keys = ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.use_kl_in_reward=true")
    columns = {"anchor_logp": torch.tensor([[-1.0, -1.0]]), "ref_logp": torch.tensor([[-1.5, -1.25]])}
    result = credit(new_config, data, *keys, "algorithm.kl_ctrl.kl_coef=0.1", **columns)
    assert result.returns.tolist() == [pytest.approx([1 - 0.1 * 0.75, 1 - 0.1 * 0.25])]
    assert result.metrics == pytest.approx({"reward/kl": 0.375, "reward/kl_coef": 0.1})


def test_the_coefficient_of_the_penalty_follows_its_target(new_config: Fixture) -> None:
    keys = ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.use_kl_in_reward=true")
    control = "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.1, target_kl: 0.01, horizon: 10}"
    assigner = CreditAssigner(new_config(*keys, control))
    data = TrainingData.from_groups([Group("g", [episode(1.0, branch((1, None)))], 0)], 1)
    data = data.with_columns(anchor_logp=torch.tensor([[-1.0]]), ref_logp=torch.tensor([[-2.0]]))
    used = [assigner.assign(data).metrics["reward/kl_coef"] for _ in range(3)]
    assert used == pytest.approx([0.1, 0.1 * 1.02, 0.1 * 1.02**2])


def test_gdpo_gets_the_parts_of_the_reward(new_config: Fixture) -> None:
    members = [
        episode(0.0, branch((1, None)), parts={"format": 1.0}),
        episode(0.0, branch((1, None)), parts={"answer": 3.0}),
    ]
    keys = (
        "algorithm.adv_estimator=gdpo",
        "algorithm.gdpo_reward_keys=[answer, format]",
        "algorithm.gdpo_reward_weights=[2, 1]",
    )
    first, second = credit(new_config, [members], *keys).advantages[0].tolist()
    assert first == pytest.approx(-second) and second > 0


def test_a_part_that_nobody_ever_had_is_no_part(new_config: Fixture) -> None:
    keys = ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[format]")
    with_part = [episode(0.0, branch((1, None)), parts={"format": part}) for part in (0.0, 1.0)]
    without = [episode(0.0, branch((1, None)), parts={"answer": 1.0}) for _ in range(2)]
    with pytest.raises(ValueError, match=r"no episode has a reward part format; they have answer"):
        credit(new_config, [without], *keys)
    assigner = CreditAssigner(new_config(*keys))
    first, second = (TrainingData.from_groups([Group("g", group, 0)], 1) for group in (with_part, without))
    assert assigner.assign(first).advantages.any()
    assert not assigner.assign(second).advantages.any(), "a batch may come without it"


class TestRemax:
    def advantages(self, new_config: Fixture, member: Trajectory, greedy: Trajectory, *keys: str) -> list[float]:
        data = TrainingData.from_groups([Group("g", [member], 0, greedy=greedy)], 1)
        assigner = CreditAssigner(new_config("algorithm.adv_estimator=remax", *keys))
        return assigner.assign(data).advantages[0].tolist()

    def test_the_greedy_reward_is_subtracted(self, new_config: Fixture) -> None:
        member, greedy = episode(1.0, branch((2, None))), episode(0.25, branch((3, None)))
        assert self.advantages(new_config, member, greedy, "algorithm.reward_scaling=2") == [1.5, 1.5]

    @pytest.mark.parametrize(
        "keys",
        [
            (),
            ("algorithm.reward_clip=1", "algorithm.reward_bias=1"),
            ("data.max_response_length=4", "algorithm.overlong_buffer_len=3"),
            ("algorithm.reward_scaling=3",),
        ],
        ids=["plain", "cut", "long", "scaled"],
    )
    def test_one_that_did_the_same_leaves_nothing(self, keys: tuple[str, ...], new_config: Fixture) -> None:
        member = episode(0.5, branch((3, 2.0)))
        assert self.advantages(new_config, member, episode(0.5, branch((3, 2.0))), *keys) == [0, 0, 0]

    def test_branches_are_compared_with_branches(self, new_config: Fixture) -> None:
        member, greedy = (episode(0.0, branch((1, 1.0)), branch((1, 1.0))) for _ in range(2))
        assert self.advantages(new_config, member, greedy) == [0, 0]


def test_the_penalty_for_length_is_reported_as_a_mean_over_episodes(new_config: Fixture) -> None:
    members = [episode(1.0, *(branch((1, None)) for _ in range(3))), episode(1.0, branch((4, None)))]
    keys = ("data.max_response_length=4", "algorithm.overlong_buffer_len=2")
    assert credit(new_config, [members], *keys).metrics["reward/overlong_penalty"] == -0.5
