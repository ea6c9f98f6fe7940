"""Packed sequences compute what padded ones do, and every number stays with its token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.record import Branch, Group, Trajectory, Turn
from agentrl.trainer.packing import TrainingData, pack

Fixture = Callable[..., Any]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_packed_forward_equals_the_padded_one(
    family: str,
    temperature: float,
    new_model: Fixture,
    new_actor: Fixture,
    new_groups: Fixture,
    padded_logprobs: Fixture,
) -> None:
    groups = new_groups(3, 3, temperature=temperature)
    branches = [b for group in groups for trajectory in group.trajectories for b in trajectory.branches]
    assert len({len(branch.token_ids) for branch in branches}) > 5
    logp, entropy, _ = new_actor(family=family).log_probs(branches)
    expected = torch.cat(padded_logprobs(new_model(family), branches))
    torch.testing.assert_close(logp[0], expected, atol=1e-5, rtol=0)
    assert entropy.shape == logp.shape and not entropy.requires_grad


def test_temperatures_are_those_of_each_turn(
    new_model: Fixture, new_actor: Fixture, new_branch: Fixture, padded_logprobs: Fixture
) -> None:
    branch = new_branch(np.random.default_rng(0), turns=3)
    branch.turns[0].temperature, branch.turns[2].temperature = 0.6, 1.7
    logp = new_actor().log_probs([branch]).logp
    torch.testing.assert_close(logp[0], padded_logprobs(new_model(), [branch])[0], atol=1e-5, rtol=0)


def test_a_sequence_is_blind_to_its_neighbours_in_the_row(new_actor: Fixture, new_branch: Fixture) -> None:
    rng = np.random.default_rng(3)
    branches = [new_branch(rng, turns) for turns in (1, 3, 2, 1)]
    actor = new_actor()
    alone = [actor.log_probs([branch]).logp for branch in branches]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [1, 1, 0, 0]):
        together = actor.log_probs([branches[i] for i in order]).logp
        torch.testing.assert_close(together, torch.cat([alone[i] for i in order], 1), atol=1e-5, rtol=0)


def test_each_trained_token_is_predicted_by_the_token_before_it() -> None:
    mask = np.array([0, 1, 1, 0, 0, 1], np.uint8)
    first = Branch(np.arange(10, 16), mask, np.zeros(6, np.float32), mask - 1, [])
    one_token = Branch(np.array([7, 8]), np.array([0, 1], np.uint8), np.zeros(2, np.float32), np.array([-1, 0]), [])
    packed = pack([first, one_token], torch.device("cpu"))
    assert packed.token_ids.tolist() == [[10, 11, 12, 13, 14, 15, 7, 8]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]]
    assert packed.lengths.tolist() == [6, 2]
    assert packed.predicting.tolist() == [0, 1, 4, 6]
    assert packed.targets.tolist() == [11, 12, 15, 8]


def test_turns_and_places_are_numbered_along_a_branch() -> None:
    mask = np.array([0, 1, 1, 0, 0, 1, 1, 1], np.uint8)
    turns = [Turn(1, 3, 1.0, "stop", reward=0.5), Turn(5, 8, 1.0, "stop", reward=-0.25)]
    branch = Branch(np.arange(8), mask, np.zeros(8, np.float32), np.where(mask, 0, -1), turns)
    one_token = Branch(np.array([7, 8]), np.array([0, 1], np.uint8), np.zeros(2, np.float32), np.array([-1, 0]), [])
    episodes = [Trajectory("e", "g", "t", 0, 0, [b], 2.0) for b in (branch, one_token)]
    data = TrainingData.from_groups([Group("g", episodes, 0)], 1)
    assert data["turn_rewards"].tolist() == [[0, 0.5, 0, 0, -0.25, 0]]
    assert data["turn"].tolist() == [[0, 0, 1, 1, 1, 0]]
    assert data["place"].tolist() == [[0, 1, 4, 5, 6, 0]]
    assert data.last_tokens.tolist() == [4, 5]


def test_the_reward_of_a_turn_that_is_not_trained_goes_to_the_one_before_it() -> None:
    mask = np.array([0, 1, 1, 0, 0, 0, 0, 1], np.uint8)
    turns = [
        Turn(1, 3, 1.0, "stop", reward=0.5),
        Turn(4, 6, 1.0, "stop", reward=2.0),
        Turn(7, 8, 1.0, "stop", reward=-0.25),
    ]
    branch = Branch(np.arange(8), mask, np.zeros(8, np.float32), np.where(mask, 0, -1), turns)
    data = TrainingData.from_groups([Group("g", [Trajectory("e", "g", "t", 0, 0, [branch], 2.0)], 0)], 1)
    assert data["turn_rewards"].tolist() == [[0, 2.5, -0.25]]


@pytest.mark.parametrize(("mode", "weights"), [("episode", [0.5, 0.5, 1]), ("branch", [1, 1, 1])])
def test_branches_are_weighted_within_their_episode(
    mode: str, weights: list[float], new_branch: Fixture, new_trajectory: Fixture
) -> None:
    rng = np.random.default_rng(0)
    episodes = [new_trajectory([new_branch(rng), new_branch(rng)]), new_trajectory([new_branch(rng)])]
    data = TrainingData.from_groups([Group("g", episodes, 0)], 1).with_branch_weights(mode)
    assert [sequence.weight for sequence in data.sequences] == weights
    assert (data.layout.weight is None) is (mode == "branch")
    single = TrainingData.from_groups([Group("g", episodes[1:], 0)], 1)
    assert single.with_branch_weights(mode) is single


def test_a_branch_with_nothing_to_train_is_left_out(new_branch: Fixture, new_trajectory: Fixture) -> None:
    rng = np.random.default_rng(0)
    trained, shared = new_branch(rng), Branch.context(rng.integers(61, size=9), [])
    episodes = [new_trajectory([shared, trained]), new_trajectory([trained, trained])]
    data = TrainingData.from_groups([Group("g", episodes, 0)], 1)
    assert len(data.sequences) == 3
    layout = data.layout
    assert layout.episode.tolist() == [0, 1, 1]
    assert layout.group.tolist() == [0, 0, 0]
    assert layout.episode_tokens is not None
    assert layout.episode_tokens.tolist() == [trained.trained_tokens, *[2 * trained.trained_tokens] * 2]


def test_columns_follow_their_sequences(new_groups: Fixture) -> None:
    data = TrainingData.from_groups(new_groups(3, 2), 1)
    data = data.with_columns(number=torch.arange(data.mask.numel())[None], nothing=None)
    assert "nothing" not in data.columns
    counts = [sequence.branch.trained_tokens for sequence in data.sequences]
    pieces = torch.split(data["number"][0], counts)
    order = np.random.default_rng(0).permutation(len(counts)).tolist()
    chosen = data.select(order)
    assert chosen["number"][0].tolist() == torch.cat([pieces[i] for i in order]).tolist()
    for name, field in (("behav_logp", "logprobs"), ("versions", "versions")):
        recorded = [getattr(s.branch, field)[s.branch.loss_mask == 1] for s in chosen.sequences]
        assert np.array_equal(chosen[name][0].numpy(), np.concatenate(recorded))
    assert chosen.layout.episode.tolist() == [data.sequences[i].episode for i in order]


def test_a_mini_batch_is_whole_groups_in_order(new_groups: Fixture) -> None:
    data = TrainingData.from_groups(new_groups(5, 2), groups_per_mini_batch=2)
    parts = [sorted({sequence.group for sequence in part.sequences}) for part in data.mini_batches()]
    assert parts == [[0, 1], [2, 3], [4]]
    assert sum(part.mask.numel() for part in data.mini_batches()) == data.mask.numel()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=30), st.integers(1, 120))
def test_micro_batches_hold_every_sequence_once_within_the_limit(lengths: list[int], limit: int) -> None:
    branches = [
        Branch(np.zeros(n, np.int32), np.eye(n, dtype=np.uint8)[-1], np.zeros(n, np.float32), np.eye(n)[-1] - 1, [])
        for n in lengths
    ]
    episodes = [Trajectory("e", "g", "t", 0, 0, [branch], 0.0) for branch in branches]
    data = TrainingData.from_groups([Group("g", episodes, 0)], 1)
    pieces = list(data.micro_batches(limit))
    assert sorted(i for piece in pieces for i in piece) == list(range(len(lengths)))
    for piece in pieces:
        assert piece
        assert len(piece) == 1 or sum(lengths[i] for i in piece) <= limit


def test_tokens_older_than_the_bound_are_masked_and_counts_follow(new_trajectory: Fixture) -> None:
    mask = np.array([0, 1, 1, 1], np.uint8)

    def branch(*versions: int) -> Branch:
        return Branch(np.arange(4), mask, np.zeros(4, np.float32), np.array([-1, *versions]), [Turn(1, 4, 1.0, "stop")])

    episodes = [new_trajectory([branch(0, 1, 2), branch(0, 0, 0)]), new_trajectory([branch(2, 2, 2)])]
    data = TrainingData.from_groups([Group("g", episodes, 0)], 1)
    assert data.trained_from(None) is data
    assert data.trained_from(0).mask.tolist() == data.mask.tolist()
    recent = data.trained_from(1)
    assert recent.mask.tolist() == [[0, 1, 1, 0, 0, 0, 1, 1, 1]]
    assert recent.layout.episode_tokens is not None and recent.layout.episode_tokens.tolist() == [2, 2, 3]
    assert [sequence.trained for sequence in recent.sequences] == [True, False, True]
    assert len(recent.trained_sequences) == 2
    assert list(recent.micro_batches(100)) == [[0, 2]]
    assert recent.select([2, 0]).mask.tolist() == [[1, 1, 1, 0, 1, 1]]
    assert list(data.trained_from(9).micro_batches(100)) == []
