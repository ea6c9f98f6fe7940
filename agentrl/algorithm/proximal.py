"""The proximal policy of decoupled PPO: the anchor around which the update is clipped.

Source: Hilton et al., "Batch size-invariance for policy optimization", arXiv:2110.00641; for asynchronous
RL: Fu et al., "AReaL", arXiv:2505.24298.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithm.masking import require_same_shape, widened
from agentrl.algorithm.registry import Registry


@dataclass(frozen=True, eq=False)
class ProximalInputs:
    """What a method may use; see `proximal_logp`."""

    logp: Tensor
    behav_logp: Tensor
    versions: Tensor
    version_prox: float
    version_now: float


PROXIMAL_METHODS: Registry[Callable[[ProximalInputs], Tensor]] = Registry("proximal method")


@torch.no_grad()
def proximal_logp(
    method: str,
    *,
    logp: Tensor,
    behav_logp: Tensor,
    versions: Tensor,
    version_prox: float,
    version_now: float,
) -> Tensor:
    """Log-probs (nats) of the proximal policy for the sampled tokens, without gradient.

    | method | value | extra forwards |
    |---|---|---|
    | `recompute` | `logp`, which the caller computed with the anchor's weights | 1 |
    | `loglinear` | `behav + a * (logp - behav)`, a = clamp((v_prox - v_b) / (v_now - v_b), 0, 1) | 0 |
    | `bypass` | `behav_logp` | 0 |

    Under `loglinear`, a is 0 for tokens that the current version sampled itself (v_b >= v_now): their
    behaviour policy is the anchor.

    Args:
        logp: [B, T]; of the anchor under `recompute`, of the current policy otherwise.
        behav_logp: [B, T] log-probs recorded when the tokens were sampled.
        versions: [B, T] policy version v_b that sampled each token; -1 at masked positions.
        version_prox: version of the anchor.
        version_now: version of the current policy, v + k/K after k of the K optimiser steps that lead from
            version v to the next publish.

    Returns:
        [B, T] in fp32 or wider; at masked positions whatever the inputs hold there.

    Raises:
        ValueError: unknown method or shapes that differ.
    """
    require_same_shape(logp=logp, behav_logp=behav_logp, versions=versions)
    inputs = ProximalInputs(widened(logp.detach()), widened(behav_logp.detach()), versions, version_prox, version_now)
    return PROXIMAL_METHODS.get(method)(inputs)


@PROXIMAL_METHODS.register("recompute")
def _recompute(inputs: ProximalInputs) -> Tensor:
    return inputs.logp


@PROXIMAL_METHODS.register("loglinear")
def _loglinear(inputs: ProximalInputs) -> Tensor:
    versions = inputs.versions.to(inputs.logp.dtype)
    age = inputs.version_now - versions
    share = (inputs.version_prox - versions) / torch.where(age > 0, age, torch.ones_like(age))
    share = torch.where(age > 0, share.clamp(0, 1), torch.zeros_like(share))
    return inputs.behav_logp + share * (inputs.logp - inputs.behav_logp)


@PROXIMAL_METHODS.register("bypass")
def _bypass(inputs: ProximalInputs) -> Tensor:
    return inputs.behav_logp
