"""Learning rate, clipping, and steps that are not taken."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from agentrl.config.update_schema import OptimConfig
from agentrl.trainer.optimiser import Optimiser, lr_factor


def optimiser_of(config: OptimConfig, *, grad_clip: float = 1.0, total_steps: int | None = None):
    model = torch.nn.Linear(2, 1)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    return model, Optimiser(model, config, grad_clip=grad_clip, total_steps=total_steps)


def set_gradient(model: torch.nn.Linear, value: float) -> None:
    model.weight.grad = torch.full_like(model.weight, value)
    model.bias.grad = torch.full_like(model.bias, value)


@pytest.mark.parametrize(
    ("values", "total", "expected"),
    [
        ({}, 4, [1, 1, 1, 1, 1]),
        ({"lr_warmup_steps": 3}, None, [0.25, 0.5, 0.75, 1, 1]),
        ({"lr_scheduler_type": "linear"}, 4, [1, 0.75, 0.5, 0.25, 0, 0]),
        ({"lr_scheduler_type": "linear", "min_lr_ratio": 0.2}, 4, [1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ({"lr_scheduler_type": "linear", "lr_warmup_steps": 1}, 5, [0.5, 1, 0.75, 0.5, 0.25, 0]),
        ({"lr_scheduler_type": "cosine"}, 4, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]),
        ({"lr_scheduler_type": "linear", "lr_warmup_steps": 4}, 4, [0.2, 0.4, 0.6, 0.8, 1, 0]),
    ],
)
def test_the_schedule(values: dict, total: int | None, expected: list[float]) -> None:
    factor = lr_factor(OptimConfig(**values), total)
    assert [factor(step) for step in range(len(expected))] == pytest.approx(expected)


def test_each_step_uses_the_rate_of_the_schedule() -> None:
    config = OptimConfig(lr=0.1, lr_warmup_steps=1, lr_scheduler_type="linear", betas=(0.0, 0.0))
    model, optimiser = optimiser_of(config, total_steps=3)
    for expected in (0.05, 0.1, 0.05):
        before = model.weight.detach().clone()
        assert optimiser.lr == pytest.approx(expected)
        set_gradient(model, 0.1)
        optimiser.step()  # AdamW without memory: the step is the rate, whatever the gradient
        torch.testing.assert_close(before - model.weight.detach(), torch.full((1, 2), expected), rtol=1e-3, atol=0)


def test_a_large_gradient_is_scaled_down_and_the_norm_reported_as_it_was() -> None:
    model, optimiser = optimiser_of(OptimConfig(), grad_clip=0.5)
    set_gradient(model, 4.0)
    seen: list[float] = []
    optimiser._adamw.register_step_pre_hook(
        lambda *_: seen.append(
            math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
        )
    )
    assert optimiser.step() == pytest.approx(4 * math.sqrt(3))
    assert seen == pytest.approx([0.5], rel=1e-4)
    set_gradient(model, 0.01)
    optimiser.step()
    assert seen[1] == pytest.approx(0.01 * math.sqrt(3), rel=1e-4)


@pytest.mark.parametrize(("value", "valid"), [(math.nan, True), (math.inf, True), (0.0, True), (1.0, False)])
def test_a_step_that_must_not_be_taken_leaves_weights_and_memory(value: float, valid: bool) -> None:
    model, optimiser = optimiser_of(OptimConfig(lr=0.1, weight_decay=0.5))
    set_gradient(model, 1.0)
    optimiser.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    memory = {key: {k: v.clone() for k, v in state.items()} for key, state in optimiser._adamw.state.items()}
    set_gradient(model, value)
    norm = optimiser.step(valid=valid)
    assert norm == 0 if value == 0 else math.isnan(norm)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    for key, state in optimiser._adamw.state.items():
        assert all(torch.equal(v, memory[key][k]) for k, v in state.items())


def test_the_schedule_goes_on_over_a_skipped_first_step_without_a_warning() -> None:
    model, optimiser = optimiser_of(OptimConfig(lr=1.0, lr_scheduler_type="linear"), total_steps=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_gradient(model, math.nan)
        optimiser.step()
    assert optimiser.lr == pytest.approx(0.75)


def test_weight_decay_is_for_matrices_alone() -> None:
    model, optimiser = optimiser_of(OptimConfig(lr=0.1, weight_decay=0.5))
    set_gradient(model, 1e-20)  # not zero, and too small to move anything by itself
    optimiser.step()
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), 0.95))
    torch.testing.assert_close(model.bias.detach(), torch.ones(1))


def test_frozen_parameters_stay() -> None:
    model = torch.nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    before = model.bias.detach().clone()
    optimiser = Optimiser(model, OptimConfig(lr=0.1), grad_clip=1.0, total_steps=None)
    model.weight.grad = torch.ones_like(model.weight)
    assert optimiser.step() > 0
    assert torch.equal(model.bias, before)
