"""KL estimates: values, gradients, straight-through forms, masked infinities."""

import math

import pytest
import torch

from agentrl.algorithm import UnknownNameError, aggregate, kl_penalty

DIFFERENCE = 0.7  # logp - ref_logp

VALUES = {
    "k1": DIFFERENCE,
    "abs": DIFFERENCE,
    "k2": DIFFERENCE**2 / 2,
    "k3": math.exp(-DIFFERENCE) - 1 + DIFFERENCE,
}
GRADIENTS = {"k1": 1.0, "abs": 1.0, "k2": DIFFERENCE, "k3": 1 - math.exp(-DIFFERENCE)}
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def base_name(name: str) -> str:
    return ALIASES.get(name, name)


def evaluate(estimator: str) -> tuple[float, float]:
    logp = torch.tensor([[-0.3]], dtype=torch.float64, requires_grad=True)
    value = kl_penalty(logp, torch.tensor([[-1.0]], dtype=torch.float64), estimator)
    value.sum().backward()
    assert logp.grad is not None
    return value.item(), logp.grad.item()


@pytest.mark.parametrize("name", [*VALUES, *ALIASES])
def test_value_and_gradient(name):
    base = base_name(name)
    assert evaluate(name) == pytest.approx((VALUES[base], GRADIENTS[base]))


@pytest.mark.parametrize("name", [*VALUES, *ALIASES])
def test_straight_through_has_its_value_and_the_gradient_of_k2(name):
    assert evaluate(name + "+") == pytest.approx((VALUES[base_name(name)], GRADIENTS["k2"]))


def test_k3_is_bounded():
    far = torch.tensor([[-1000.0]]), torch.tensor([[0.0]])
    assert kl_penalty(*far, "k3").item() == 10


@pytest.mark.parametrize("name", [*VALUES, *(name + "+" for name in VALUES)])
@pytest.mark.parametrize("junk", [-200.0, -torch.inf, torch.nan])
def test_masked_infinities_leave_loss_and_gradient_alone(name, junk):
    logp = torch.tensor([[-1.0, 0.0]], requires_grad=True)
    loss = aggregate(kl_penalty(logp, torch.tensor([[-1.5, junk]]), name), torch.tensor([[1, 0]]), "token-mean")
    loss.backward()
    assert logp.grad is not None and logp.grad.isfinite().all() and logp.grad[0, 1] == 0
    alone = kl_penalty(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), name)
    assert loss.item() == alone.item()


def test_a_non_finite_trained_value_is_not_hidden():
    assert kl_penalty(torch.tensor([[-1.0]]), torch.tensor([[torch.nan]]), "k3").isnan().all()


def test_unknown_estimators_are_refused():
    with pytest.raises(UnknownNameError, match=r"KL estimator 'k4'.*low_var_kl"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "k4+")
