"""The names a configuration accepts are those that have a function."""

from __future__ import annotations

from agentrl.algorithm.advantage import ESTIMATORS
from agentrl.algorithm.aggregate import AGGREGATIONS
from agentrl.algorithm.loss import LOSSES
from agentrl.config import names


def test_every_name_has_a_function_and_every_function_a_name() -> None:
    assert set(names.ADV_ESTIMATORS) == set(ESTIMATORS.names())
    assert set(names.LOSS_MODES) == set(LOSSES.names())
    assert set(names.LOSS_AGG_MODES) == set(AGGREGATIONS.names())
    assert set(names.ADV_ESTIMATORS) >= names.GROUP_BASELINES
