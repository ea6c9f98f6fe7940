"""The queue of finished groups and what it hands out."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import pytest

from agentrl.record import Group
from agentrl.rollout import Buffer, StalenessGate


def filled(
    *groups: tuple[str, int], version: int, on_stale: Literal["wait", "drop", "train"] = "wait", max_lag: int = 1
) -> tuple[Buffer, StalenessGate]:
    """A buffer that holds the groups (id, oldest version), two to a batch."""
    gate = StalenessGate(
        batch_groups=2, sync_steps=1, eta=Fraction(5), max_lag=max_lag, group_size=1, max_concurrent=99
    )
    buffer = Buffer(gate, batch_groups=2, on_stale=on_stale)
    for group_id, _ in groups:
        gate.admit(group_id)
        gate.episode_ended(group_id)
    if version:
        gate.published(version)
    for group_id, oldest in groups:
        buffer.put(Group(group_id, [], oldest))
    return buffer, gate


def ids(groups: list[Group] | None) -> list[str] | None:
    return None if groups is None else [group.id for group in groups]


def test_a_batch_is_the_oldest_groups_in_the_order_in_which_they_finished() -> None:
    buffer, gate = filled(("a", 3), ("b", 2), ("c", 3), ("d", 2), version=3)
    assert ids(buffer.take()) == ["b", "d"]
    assert (len(buffer), gate.queued_groups, gate.taken_groups) == (2, 2, 2)


def test_a_batch_is_whole_unless_it_is_the_last() -> None:
    buffer, _ = filled(("a", 0), version=0)
    assert buffer.take() is None
    assert ids(buffer.take(last=True)) == ["a"]
    assert buffer.take(last=True) is None


@pytest.mark.parametrize(("version", "stale"), [(8, []), (9, ["a"])])
def test_dropping_gives_up_what_would_pass_the_bound_and_frees_its_place(version: int, stale: list[str]) -> None:
    """Case 18: lag exactly 8 trains, 9 is stale."""
    buffer, gate = filled(("a", 0), ("b", 5), version=version, on_stale="drop", max_lag=8)
    before = gate.capacity()
    assert ids(buffer.drop_stale()) == stale
    assert gate.capacity() == before + len(stale)
    assert ids(buffer.take(last=True)) == [group for group in ("a", "b") if group not in stale]


def test_waiting_takes_exactly_what_falls_due() -> None:
    buffer, _ = filled(("a", 0), ("b", 1), ("c", 0), version=1)
    assert buffer.drop_stale() == []
    assert ids(buffer.take()) == ["a", "c"]


def test_waiting_forms_no_batch_that_would_leave_a_group_behind_for_good() -> None:
    buffer, gate = filled(version=0)
    gate.admit("straggler")
    gate.published(1)
    for group_id in "ab":
        gate.admit(group_id)
        buffer.put(Group(group_id, [], 1))
    assert buffer.take() is None
    gate.removed("straggler")
    assert ids(buffer.take()) == ["a", "b"]


def test_training_all_the_same_ignores_the_bound() -> None:
    buffer, _ = filled(("a", 0), ("b", 5), version=99, on_stale="train")
    assert buffer.drop_stale() == []
    assert ids(buffer.take()) == ["a", "b"]


def test_clearing_takes_everything_out_of_the_gate() -> None:
    buffer, gate = filled(("a", 0), ("b", 0), version=0)
    assert ids(buffer.clear()) == ["a", "b"]
    assert (len(buffer), gate.queued_groups, gate.capacity()) == (0, 0, 12)
