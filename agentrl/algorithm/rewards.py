"""What happens to rewards before they become advantages."""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, factor: float) -> Tensor:
    """What to add to the reward of a response that comes close to the limit: 0 up to `max_length - buffer` tokens, then
    a line down to -factor at `max_length`.

    Args:
        lengths: tokens of each response, any shape.
        max_length: the limit.
        buffer: tokens before it over which the penalty grows.
        factor: the penalty at the limit, positive.

    Raises:
        ValueError: a buffer outside [1, max_length], or a negative factor.

    Source: DAPO, arXiv:2503.14476.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer is {buffer}: pass 1 to {max_length} tokens, the last ones before the limit")
    if factor < 0:
        raise ValueError(f"factor is {factor}: pass the penalty at the limit as a positive number")
    exceeded = lengths.to(torch.float64) - (max_length - buffer)
    return -(exceeded / buffer * factor).clamp(min=0)


def scaled(rewards: Tensor, *, scale: float = 1.0, bias: float = 0.0, clip: float | None = None) -> Tensor:
    """(rewards + bias) * scale, then cut to [-clip, clip].

    Raises:
        ValueError: a clip that is not positive.
    """
    if clip is not None and clip <= 0:
        raise ValueError(f"clip is {clip}: pass a positive number, or none")
    result = (rewards + bias) * scale
    return result if clip is None else result.clamp(-clip, clip)
