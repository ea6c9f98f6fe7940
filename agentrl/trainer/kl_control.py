"""How strong the KL penalty in the reward is, from step to step."""

from __future__ import annotations


class KLController:
    """The coefficient of a KL penalty in the reward: fixed, or steered towards a target.

    Args:
        kl_coef: at the beginning.
        target_kl: nats; None keeps the coefficient as it is.
        horizon: episodes over which it adapts.

    Source of the adaptive form: Ziegler et al., arXiv:1909.08593.
    """

    def __init__(self, kl_coef: float, *, target_kl: float | None = None, horizon: int = 10_000) -> None:
        self.value = kl_coef
        self._target = target_kl
        self._horizon = horizon

    def update(self, current_kl: float, episodes: int) -> None:
        """Takes note of the mean KL of a batch of so many episodes."""
        if self._target is not None:
            error = min(0.2, max(-0.2, current_kl / self._target - 1))
            self.value *= 1 + error * episodes / self._horizon
