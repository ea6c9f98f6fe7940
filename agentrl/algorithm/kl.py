"""Per-token estimates of KL(policy || reference) from the log-probs of sampled tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from agentrl.algorithm.masking import require_same_shape, widened
from agentrl.algorithm.registry import Registry

KL_ESTIMATORS: Registry[Callable[[Tensor], Tensor]] = Registry("KL estimator")
"""Functions of d = logp - ref_logp, [B, T] to [B, T]. A trailing `+` on a name is handled by `kl_penalty`."""


def kl_penalty(logp: Tensor, ref_logp: Tensor, estimator: str) -> Tensor:
    """The KL estimate of each token, in nats, with d = logp - ref_logp.

    | estimator | value |
    |---|---|
    | `k1`, `kl` | d |
    | `abs` | abs(d) |
    | `k2`, `mse` | d^2 / 2 |
    | `k3`, `low_var_kl` | e^-d - 1 + d, with d clamped to +-20 and the result to 10 |

    With a trailing `+` (`k1+`, `k3+`, ...) the value is that estimator's and the gradient that of k2, whose
    expectation, unlike theirs, is the gradient of the KL divergence.

    Args:
        logp: [B, T] log-probs of the current policy.
        ref_logp: [B, T] log-probs of the reference policy.

    Returns:
        [B, T] in fp32 or wider. Where d is NaN or infinite the value is too (masked positions are dropped by
        `aggregate`), and the gradient is 0.

    Raises:
        ValueError: unknown estimator or shapes that differ.

    Source: Schulman, "Approximating KL Divergence", 2020.
    """
    require_same_shape(logp=logp, ref_logp=ref_logp)
    name = estimator.removesuffix("+")
    function = KL_ESTIMATORS.get(name)
    difference = widened(logp) - widened(ref_logp)
    # A masked position may hold anything: with the plain difference, the backward of square, abs and exp
    # would turn its zero gradient into 0 * inf = NaN.
    difference = torch.where(difference.isfinite(), difference, difference.detach())
    value = function(difference)
    if name == estimator:
        return value
    surrogate = _k2(difference)
    return value.detach() + (surrogate - surrogate.detach())


@KL_ESTIMATORS.register("k1", "kl")
def _k1(difference: Tensor) -> Tensor:
    return difference


@KL_ESTIMATORS.register("abs")
def _abs(difference: Tensor) -> Tensor:
    return difference.abs()


@KL_ESTIMATORS.register("k2", "mse")
def _k2(difference: Tensor) -> Tensor:
    return difference.square() / 2


@KL_ESTIMATORS.register("k3", "low_var_kl")
def _k3(difference: Tensor) -> Tensor:
    clamped = difference.clamp(-20, 20)
    return (torch.expm1(-clamped) + clamped).clamp(max=10)
