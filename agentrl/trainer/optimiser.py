"""AdamW with warm-up, decay, gradient clipping and a guard against non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from agentrl.config.update_schema import OptimConfig


class Optimiser:
    """One `step` per mini-batch, after its gradients have been accumulated.

    Args:
        grad_clip: largest gradient norm; above it the gradient is scaled down.
        total_steps: optimiser steps of the run, the horizon of the decay.
    """

    def __init__(self, model: Any, config: OptimConfig, *, grad_clip: float, total_steps: int | None) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in self._parameters if p.ndim >= 2]
        vectors = [p for p in self._parameters if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._adamw, lr_factor(config, total_steps))
        self._grad_clip = grad_clip

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self._schedule.get_last_lr()[0])

    def step(self, *, valid: bool = True) -> float:
        """Clips, steps, clears the gradients; returns the gradient norm before clipping.

        The step is skipped, while the schedule goes on, if the norm that is returned is 0 (nothing was trained, and
        momentum alone must not move the weights) or NaN: the norm is not finite, or the caller says that the gradient
        is not `valid`.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._grad_clip))
        norm = norm if valid and math.isfinite(norm) else math.nan
        if norm > 0:
            self._adamw.step()
        else:
            # LambdaLR warns if it runs ahead of the optimiser; skipping is what is meant here.
            self._adamw._opt_called = True  # type: ignore[attr-defined]
        self._adamw.zero_grad(set_to_none=True)
        self._schedule.step()
        return norm


def lr_factor(config: OptimConfig, total_steps: int | None) -> Callable[[int], float]:
    """The learning rate at optimiser step k (from 0) as a share of `config.lr`: warm-up, then decay."""

    def factor(step: int) -> float:
        if step < config.lr_warmup_steps:
            return (step + 1) / (config.lr_warmup_steps + 1)
        if config.lr_scheduler_type == "constant" or total_steps is None:
            return 1.0
        progress = (step - config.lr_warmup_steps) / max(1, total_steps - config.lr_warmup_steps)
        progress = min(1.0, progress)
        shape = 1 - progress if config.lr_scheduler_type == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape

    return factor
