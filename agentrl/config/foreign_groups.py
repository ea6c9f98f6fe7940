"""Foreign keys that only say something together: those of each system, and the sizes of batches, which both have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.config.areal_groups import AREAL_GROUPS
from agentrl.config.key_groups import Contradiction, Group, View, check_count, is_count
from agentrl.config.verl_groups import MINI, REQUIRED, VERL_GROUPS

BATCH = ("data.train_batch_size", "train_dataset.batch_size", "rollout.consumer_batch_size")
MINI_BATCHES = "actor.ppo_n_minibatches"


def _batch(view: View) -> Mapping[str, Any]:
    """A training step's groups, as so many mini-batches of so many groups."""
    name, groups = _groups_of_a_step(view)
    count, mini = view.foreign(MINI_BATCHES), view.given(MINI)
    for key, number in ((name, groups), (MINI_BATCHES, count)):
        check_count(key, number)
    if (not is_count(mini) and mini is not None) or not is_count(view.value(REQUIRED)):
        return {}  # which is refused under its own name
    if groups is None:
        return {} if count is None else {REQUIRED: count}
    if mini is None:
        count = count or view.given(REQUIRED) or 1
        if groups % count:
            parts = f"{MINI_BATCHES if view.foreign(MINI_BATCHES) else view.written(REQUIRED)} = {count}"
            raise Contradiction(
                (name, parts.partition(" ")[0]),
                f"is {groups} groups a training step, which {parts} does not divide",
                f"set {name} to {_nearest_multiple(groups, count)}, or the number of mini-batches to one of "
                f"{_divisors(groups)}",
            )
        return {MINI: groups // count, REQUIRED: count}
    written = view.written(MINI)
    if mini > groups or groups % mini:
        reason = "the mini-batch is larger than the batch" if mini > groups else "that is not a whole number of them"
        raise Contradiction(
            (written, name),
            f"is {mini} groups, but {name} is {groups}: {reason}",
            f"set {written} to one of {_divisors(groups)}, or {name} to {_nearest_multiple(groups, mini)}",
        )
    return {REQUIRED: groups // mini} | ({} if count is None else {MINI: groups // count, REQUIRED: count})


def _groups_of_a_step(view: View) -> tuple[str, Any]:
    """The key that says it, and the number; 0 is verl's for "not used"."""
    given = {name: view.foreign(name) for name in BATCH if view.foreign(name) not in (None, 0)}
    if len(set(map(repr, given.values()))) > 1:
        (one, first), (two, second), *_ = given.items()
        raise Contradiction(
            (one, two),
            f"is {first}, but {two} is {second}: both are the groups of a training step",
            f"keep one of them, or write {MINI} and {REQUIRED}",
        )
    return next(iter(given.items()), (BATCH[0], None))


def _divisors(number: int) -> str:
    return ", ".join(str(part) for part in range(1, number + 1) if number % part == 0)


def _nearest_multiple(number: int, of: int) -> int:
    return max(1, round(number / of)) * of


GROUPS: tuple[Group, ...] = (
    Group(
        "verl and AReaL",
        names=(*BATCH, MINI_BATCHES),
        gives=(MINI, REQUIRED),
        needs=(MINI,),
        read=_batch,
        meaning=f"{MINI} x {REQUIRED}",
    ),
    *VERL_GROUPS,
    *AREAL_GROUPS,
)
"""In the order they are read: the later ones may need what the earlier ones give."""
