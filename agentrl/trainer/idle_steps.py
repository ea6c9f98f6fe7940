"""Training steps that leave the policy as it was: each for a reason that can be read off its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping

from agentrl.record import NoProgress

MOST_IDLE = 20
"""Training steps in a row without an optimiser step after which a run ends."""


class IdleSteps:
    """Counts them, and says when there is nothing left to hope for."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._steps = 0
        self._last = ""

    def note(self, row: Mapping[str, float]) -> None:
        """Takes the metrics of a training step.

        Raises:
            NoProgress: this and all steps shortly before it left the policy as it was.
        """
        if not row["actor/skipped_steps"] and not row["actor/grad_norm"]:
            return  # only the critic learns
        self._steps += 1
        self._in_a_row = 0 if row["actor/grad_norm"] else self._in_a_row + 1
        self._last = why_skipped(row)
        if self._in_a_row >= MOST_IDLE:
            raise NoProgress(self._problem(f"the last {self._in_a_row} training steps"))

    def problem(self) -> str:
        """What is wrong with a run that ends now; empty if at least one of its training steps was taken."""
        if not self._steps or self._in_a_row < self._steps:
            return ""
        return self._problem("the only training step" if self._steps == 1 else f"all {self._steps} training steps")

    def _problem(self, which: str) -> str:
        return f"{which} left the policy as it was: {self._last}"


def why_skipped(row: Mapping[str, float]) -> str:
    """Why a training step left the policy as it was, or an optimiser step of it was not finite; empty if neither."""
    if not row["actor/skipped_steps"] or (row["actor/grad_norm"] and not row["actor/nonfinite_steps"]):
        return ""
    if row["actor/nonfinite_steps"]:
        return (
            f"the loss or its gradient is not finite (actor/loss {row['actor/loss']:g}): look at the rewards, the "
            "advantages and the log-probs of these episodes"
        )
    if row.get("tokens/packed") == 0:
        return "all its tokens were older than rollout.max_head_offpolicyness (async_training.on_stale: mask)"
    if row.get("mismatch/rejected_fraction") == 1:
        return (
            "algorithm.rollout_correction rejected every token: widen rollout_rs_threshold, or bring the policies "
            f"closer (mismatch/kl {row.get('mismatch/kl', math.nan):.2g})"
        )
    if row.get("mismatch/weight") == 0:
        return "all its weights are 0: none lies within algorithm.rollout_correction.rollout_is_threshold"
    return "the gradient is 0: no reward differs from those it is compared with, or the loss is 0 whatever the rewards"
