"""A user's own loss or estimator: what it may return, and what it is told when it returns something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithm import (
    AdvantageConfig,
    Layout,
    LossConfig,
    compute_advantages,
    mean_pair,
    policy_loss,
    summarise,
)
from agentrl.algorithm.advantage import ESTIMATORS, AdvantageInputs
from agentrl.algorithm.loss import LOSSES, LossInputs

MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


@pytest.fixture
def loss(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[LossInputs], Any]], dict[str, float]]:
    """Evaluates a function registered as `mine`, backward included; returns its metrics."""

    def evaluate(function: Callable[[LossInputs], Any]) -> dict[str, float]:
        monkeypatch.setitem(LOSSES._functions, "mine", function)
        logp = torch.zeros(2, 3, requires_grad=True)
        other = torch.zeros(2, 3)
        value, metrics = policy_loss(
            "mine",
            logp=logp,
            prox_logp=other,
            behav_logp=other,
            advantages=other + 1,
            mask=MASK,
            config=LossConfig(),
        )
        value.backward()
        return summarise(metrics)

    return evaluate


def test_an_own_loss_is_averaged_and_its_metrics_are_reported(loss):
    def mine(inputs: LossInputs) -> tuple[Tensor, dict[str, Any]]:
        return -inputs.advantages * inputs.logp, {"mine/advantage": mean_pair(inputs.advantages, inputs.kept)}

    assert loss(mine)["mine/advantage"] == 1


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda x: x.logp, r"a tensor \[2, 3\]: return \(losses, metrics\)"),
        (lambda x: (x.logp.sum(), {}), r"\(a tensor \[\], a dict\).* for each token, \[2, 3\]"),
        (lambda x: (x.logp[:, :1], {}), r"\(a tensor \[2, 1\], a dict\)"),
        (lambda x: (x.logp, None), r"\(a tensor \[2, 3\], a NoneType\)"),
        (lambda x: None, r"a NoneType: return"),
        (lambda x: (x.logp.detach(), {}), r"without a gradient: compute them from inputs\.logp"),
        (lambda x: (x.logp, {"mine": 0.5}), r"a float as metric 'mine': return a pair of scalar tensors"),
        (lambda x: (x.logp, {"mine": (x.logp, x.logp)}), r"\(a tensor \[2, 3\], a tensor \[2, 3\]\) as metric"),
    ],
)
def test_a_loss_that_returns_something_else_is_told_what_to_return(loss, returned, said):
    with pytest.raises(ValueError, match=rf"actor\.loss_mode mine returned .*{said}"):
        loss(returned)


@pytest.fixture
def advantages(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[AdvantageInputs], Any]], tuple[Tensor, Tensor]]:
    """Evaluates an estimator registered as `mine`."""

    def evaluate(function: Callable[[AdvantageInputs], Any]) -> tuple[Tensor, Tensor]:
        monkeypatch.setitem(ESTIMATORS._functions, "mine", function)
        layout = Layout.rows(MASK)
        return compute_advantages(
            "mine", token_rewards=torch.ones(2, 3), mask=MASK, layout=layout, config=AdvantageConfig()
        )

    return evaluate


def test_an_own_estimator_may_leave_anything_at_masked_positions(advantages):
    values = torch.where(MASK != 0, 2.0, torch.nan)
    for result in advantages(lambda x: (values.double(), values.double())):
        assert torch.equal(result, 2.0 * MASK) and result.dtype == torch.float32


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda x: x.token_rewards, r"a tensor \[2, 3\]"),
        (lambda x: (x.token_rewards.sum(1), x.token_rewards), r"\(a tensor \[2\], a tensor \[2, 3\]\)"),
        (lambda x: (x.token_rewards, None), r"\(a tensor \[2, 3\], a NoneType\)"),
        (lambda x: [1.0] * 6, r"a list"),
    ],
)
def test_an_estimator_that_returns_something_else_is_told_what_to_return(advantages, returned, said):
    with pytest.raises(ValueError, match=rf"algorithm\.adv_estimator mine returned {said}: return .* \[2, 3\]"):
        advantages(returned)


def test_a_sequence_that_the_layout_does_not_know_is_refused():
    sequence = torch.tensor([[0, 0, 9], [2, 2, 2]])
    layout = Layout(sequence, torch.tensor([0, 1]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"layout\.sequence holds 2 .* 0 to 1"):
        compute_advantages("grpo", token_rewards=torch.ones(2, 3), mask=MASK, layout=layout, config=AdvantageConfig())
