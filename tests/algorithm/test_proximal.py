"""The anchor of decoupled PPO."""

import pytest
import torch

from agentrl.algorithm import UnknownNameError, proximal_logp

LOGP = torch.tensor([[-1.0, -1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
BEHAV = torch.tensor([[-2.0, -2.0, -2.0, -2.0]], dtype=torch.float64)


def proximal(method: str, versions: list[int], version_prox: float, version_now: float) -> torch.Tensor:
    result = proximal_logp(
        method,
        logp=LOGP,
        behav_logp=BEHAV,
        versions=torch.tensor([versions]),
        version_prox=version_prox,
        version_now=version_now,
    )
    assert not result.requires_grad
    return result


def test_recompute_is_the_anchor_the_caller_computed():
    assert torch.equal(proximal("recompute", [0, 1, 2, 3], 3, 3.5), LOGP.detach())


def test_bypass_is_the_behaviour_policy():
    assert torch.equal(proximal("bypass", [0, 1, 2, 3], 3, 3.5), BEHAV)


def test_loglinear_interpolates_by_the_age_of_each_token():
    result = proximal("loglinear", [0, 2, 3, 4], 3, 4)
    assert result.tolist()[0] == pytest.approx([-2 + 3 / 4, -2 + 1 / 2, -2.0, -2.0])


def test_loglinear_counts_optimiser_steps_within_a_version():
    """After 1 of 4 optimiser steps the current policy is version 3.25: a quarter step past the anchor."""
    assert proximal("loglinear", [3, 3, 2, 1], 3, 3.25)[0].tolist() == pytest.approx(
        [-2.0, -2.0, -2 + 1 / 1.25, -2 + 2 / 2.25]
    )


def test_loglinear_does_not_divide_by_zero_for_tokens_of_the_current_version():
    assert proximal("loglinear", [5, 5, 6, -1], 5, 5)[0].tolist() == pytest.approx([-2.0, -2.0, -2.0, -1.0])


def test_unknown_methods_are_refused():
    with pytest.raises(UnknownNameError, match=r"proximal method 'linear'.*bypass, loglinear, recompute"):
        proximal("linear", [0, 0, 0, 0], 0, 1)
