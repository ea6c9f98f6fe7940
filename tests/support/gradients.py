"""What is trained, its gradients by the names of parameters, and what it means that two sets of them agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agentrl.record import Branch, Group


def branches_of(groups: Sequence[Group]) -> list[Branch]:
    return [b for group in groups for trajectory in group.trajectories for b in trajectory.branches]


def largest(gradients: dict[str, torch.Tensor]) -> float:
    return max(float(gradient.abs().max()) for gradient in gradients.values())


def assert_gradients_agree(
    mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], *, rtol: float = 1e-5, atol: float | None = None
) -> None:
    """`atol` (as `rtol`, where it is not given) is relative to the largest gradient, which is not 0: where terms
    cancel, the sum has no relative accuracy of its own."""
    assert mine.keys() == theirs.keys()
    scale = largest(theirs)
    assert scale > 0
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, rtol=rtol, atol=(rtol if atol is None else atol) * scale)


def weights_of(actor: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in actor.model.named_parameters()}


def moved(actor: Any, before: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(tensor, before[name]) for name, tensor in actor.model.named_parameters())
