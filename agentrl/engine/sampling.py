"""One token for each row of logits, with the log-probability of the distribution it was really drawn from."""

from __future__ import annotations

import torch


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws by inverting the cumulative distribution, so that a row's token depends on its own number alone.

    Args:
        logits: `[N, V]`.
        temperatures: float `[N]`; 0 takes the most likely token (log-prob 0: it is certain).
        uniforms: float `[N]`, in [0, 1).

    Returns:
        token ids, long `[N]`, and log-probs, float32 `[N]`.
    """
    greedy = temperatures == 0
    logprobs = torch.log_softmax(logits.float() / temperatures.masked_fill(greedy, 1.0)[:, None], dim=-1)
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    thresholds = uniforms.double()[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, thresholds, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, logits.argmax(dim=-1), drawn)
    chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
    return tokens, chosen.masked_fill(greedy, 0.0)
