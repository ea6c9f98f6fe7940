"""The message graph: readable ids, one drift a test, then random conversations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.record import Branch, MessageGraph, Node


def sample(graph: MessageGraph, prompt: Sequence[int], *tokens: int, version: int = 0) -> Node:
    """One model call; a token's log-prob is its negative, so that it can be recognised."""
    return graph.add_turn(
        list(prompt),
        np.array(tokens),
        -np.array(tokens, float),
        np.full(len(tokens), version),
        temperature=1.0,
        finish_reason="stop",
    )


def rows(branch: Branch) -> list[tuple[int, int, float, int]]:
    """Token, mask, log-prob, version."""
    arrays = (branch.token_ids, branch.loss_mask, branch.logprobs, branch.versions)
    return list(zip(*(array.tolist() for array in arrays), strict=True))


def ids(branches: list[Branch]) -> list[list[int]]:
    return [branch.token_ids.tolist() for branch in branches]


def trained(branches: list[Branch]) -> list[list[int]]:
    return [branch.token_ids[branch.loss_mask == 1].tolist() for branch in branches]


def test_one_turn_is_one_branch_with_context_unmasked() -> None:
    graph = MessageGraph()
    sample(graph, [1, 2], 30, 31, version=4)
    (branch,) = graph.branches()
    assert rows(branch) == [(1, 0, 0.0, -1), (2, 0, 0.0, -1), (30, 1, -30.0, 4), (31, 1, -31.0, 4)]


def test_arrays_have_the_types_of_the_record() -> None:
    graph = MessageGraph()
    sample(graph, [1], 30)
    (branch,) = graph.branches()
    arrays = (branch.token_ids, branch.loss_mask, branch.logprobs, branch.versions)
    assert [array.dtype for array in arrays] == [np.int32, np.uint8, np.float32, np.int32]


def test_a_prompt_that_extends_the_last_turn_stays_in_its_branch() -> None:
    graph = MessageGraph()
    sample(graph, [1, 2], 30, 31)
    sample(graph, [1, 2, 30, 31, 5, 6], 70, version=1)
    (branch,) = graph.branches()
    assert branch.token_ids.tolist() == [1, 2, 30, 31, 5, 6, 70]
    assert branch.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert branch.versions.tolist() == [-1, -1, 0, 0, -1, -1, 1]
    assert [(turn.start, turn.end) for turn in branch.turns] == [(2, 4), (6, 7)]


def test_a_prompt_that_differs_within_a_sampled_turn_forks_and_the_turn_is_trained_where_it_was_sampled() -> None:
    graph = MessageGraph()
    sample(graph, [1, 2], 30, 31, 32)
    sample(graph, [1, 2, 30, 99], 70)
    first, second = graph.branches()
    assert ids([first, second]) == [[1, 2, 30, 31, 32], [1, 2, 30, 99, 70]]
    assert second.loss_mask.tolist() == [0, 0, 0, 0, 1]


def test_a_shared_turn_is_trained_in_the_first_branch_and_is_context_in_the_others() -> None:
    graph = MessageGraph()
    sample(graph, [1], 30, 31)
    sample(graph, [1, 30, 31, 5], 50)
    sample(graph, [1, 30, 31, 6], 60)
    sample(graph, [1, 30, 31, 7], 70)
    branches = graph.branches()
    assert ids(branches) == [[1, 30, 31, 5, 50], [1, 30, 31, 6, 60], [1, 30, 31, 7, 70]]
    assert trained(branches) == [[30, 31, 50], [60], [70]]
    for branch in branches[1:]:
        assert rows(branch)[1:3] == [(30, 0, 0.0, -1), (31, 0, 0.0, -1)]
        assert [(turn.start, turn.end) for turn in branch.turns] == [(4, 5)]


def test_branches_come_in_the_order_in_which_they_came_into_being() -> None:
    graph = MessageGraph()
    sample(graph, [1], 10)
    sample(graph, [2], 20)
    sample(graph, [1, 10, 3], 30)
    sample(graph, [1, 10, 4], 40)
    assert ids(graph.branches()) == [[1, 10, 3, 30], [2, 20], [1, 10, 4, 40]]


def test_turns_of_parallel_conversations_do_not_mix() -> None:
    graph = MessageGraph()
    sample(graph, [1, 1], 10)
    sample(graph, [2, 2], 20)
    sample(graph, [1, 1, 10, 3], 11)
    sample(graph, [2, 2, 20, 3], 21)
    branches = graph.branches()
    assert ids(branches) == [[1, 1, 10, 3, 11], [2, 2, 20, 3, 21]]
    assert trained(branches) == [[10, 11], [20, 21]]


def test_two_samples_of_one_prompt_are_two_branches_even_if_they_are_equal() -> None:
    graph = MessageGraph()
    sample(graph, [1], 10)
    sample(graph, [1], 10)
    assert trained(graph.branches()) == [[10], [10]]


def test_a_prompt_joins_the_turn_it_extends_not_a_shorter_one_that_also_fits() -> None:
    graph = MessageGraph()
    sample(graph, [1], 10)
    sample(graph, [1], 10, 11)
    sample(graph, [1, 10, 11, 2], 20)
    assert trained(graph.branches()) == [[10], [10, 11, 20]]


def test_each_turn_keeps_its_temperature_reward_and_finish_reason() -> None:
    graph = MessageGraph()
    arrays = (np.array([10, 11]), np.zeros(2), np.zeros(2))
    node = graph.add_turn([1], *arrays, temperature=0.6, finish_reason="length")
    node.reward = 0.5
    (branch,) = graph.branches()
    (turn,) = branch.turns
    assert (turn.temperature, turn.finish_reason, turn.reward) == (0.6, "length", 0.5)
    np.testing.assert_allclose(branch.temperatures(), [1, 0.6, 0.6])


def test_a_prompt_without_context_of_its_own_is_recorded() -> None:
    graph = MessageGraph()
    sample(graph, [1], 10)
    sample(graph, [1, 10], 20)
    (branch,) = graph.branches()
    assert branch.loss_mask.tolist() == [0, 1, 1]


@pytest.mark.parametrize(("tokens", "logprobs", "versions"), [(0, 0, 0), (2, 1, 2), (2, 2, 1), (1, 2, 2)])
def test_a_turn_needs_a_logprob_and_a_version_for_each_token(tokens: int, logprobs: int, versions: int) -> None:
    arrays = (np.zeros(tokens), np.zeros(logprobs), np.zeros(versions))
    with pytest.raises(ValueError, match=f"{tokens} ids, {logprobs} log-probs, {versions} versions"):
        MessageGraph().add_turn([1], *arrays, temperature=1.0, finish_reason="stop")


def test_the_oldest_version_is_that_of_trained_tokens_only() -> None:
    graph = MessageGraph()
    sample(graph, [1], 10, version=2)
    sample(graph, [1, 10, 5], 50, version=4)
    sample(graph, [1, 10, 6], 60, version=5)
    assert [branch.oldest_version for branch in graph.branches()] == [2, 5]


Conversation = list[tuple[int, int, list[int], list[int]]]
FEW_TOKENS = st.lists(st.integers(1, 3), max_size=4)
TURNS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 12), FEW_TOKENS, st.lists(st.integers(1, 3), min_size=1, max_size=4)),
    min_size=1,
    max_size=9,
)


@settings(max_examples=300, deadline=None)
@given(TURNS)
def test_every_sampled_token_is_trained_once_after_exactly_what_the_engine_saw(conversation: Conversation) -> None:
    """Each turn extends, cuts or edits the history of an earlier one; few tokens make for many coincidences."""
    graph = MessageGraph()
    histories: list[list[int]] = [[]]
    seen: list[tuple[list[int], int, float, int]] = []
    for number, (which, cut, added, tokens) in enumerate(conversation):
        history = histories[which % len(histories)]
        prompt = [*history[: max(0, len(history) - cut if cut < 6 else len(history))], *added] or [1]
        logprobs = [-float(number) - position / 8 for position in range(len(tokens))]
        graph.add_turn(
            prompt, np.array(tokens), np.array(logprobs), np.full(len(tokens), number), temperature=1, finish_reason=""
        )
        histories.append([*prompt, *tokens])
        seen += [(prompt + tokens[:i], tokens[i], logprobs[i], number) for i in range(len(tokens))]
    branches = graph.branches()
    found = []
    for branch in branches:
        tokens_of = branch.token_ids.tolist()
        for position in np.flatnonzero(branch.loss_mask).tolist():
            logprob, version = float(branch.logprobs[position]), int(branch.versions[position])
            found.append((tokens_of[:position], tokens_of[position], logprob, version))
        context = branch.loss_mask == 0
        assert (branch.logprobs[context] == 0).all()
        assert (branch.versions[context] == -1).all()
        spans = [position for turn in branch.turns for position in range(turn.start, turn.end)]
        assert spans == np.flatnonzero(branch.loss_mask).tolist()
    assert sorted(found) == sorted(seen)
    assert sum(len(branch.turns) for branch in branches) == len(graph.turns) == len(conversation)
    assert [node.prefix_ids() for node in graph.turns] == histories[1:]
