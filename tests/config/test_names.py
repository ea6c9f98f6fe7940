"""The names a configuration accepts are those that have a function."""

from __future__ import annotations

from typing import Any

from agentrl.algorithm import Registry
from agentrl.algorithm.advantage import ESTIMATORS
from agentrl.algorithm.aggregate import AGGREGATIONS
from agentrl.algorithm.loss import LOSSES
from agentrl.config import names


def own(registry: Registry[Any]) -> set[str]:
    """Names of the library's own functions; other tests may have registered theirs."""
    return {name for name in registry.names() if registry.get(name).__module__.startswith("agentrl.")}


def test_every_name_has_a_function_and_every_function_a_name() -> None:
    assert set(names.ADV_ESTIMATORS) == own(ESTIMATORS)
    assert set(names.LOSS_MODES) == own(LOSSES)
    assert set(names.LOSS_AGG_MODES) == own(AGGREGATIONS)
    assert set(names.ADV_ESTIMATORS) >= names.GROUP_BASELINES
