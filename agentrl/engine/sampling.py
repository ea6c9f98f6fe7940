"""One token for each row of logits, with the log-probability of the distribution it was really drawn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from agentrl.record.protocols import GenerateRequest

_BLOCK = 128


def sample(
    logits: torch.Tensor, requests: Sequence[GenerateRequest], uniforms: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws by inverting the cumulative distribution, so that a row's token depends on its own number alone.

    Args:
        logits: `[N, V]`.
        requests: N, with the temperature (0 takes the most likely token; its log-prob is 0: it is certain), `top_k`
            and `top_p` of each row.
        uniforms: N numbers in [0, 1).

    Returns:
        token ids, long `[N]`, and log-probs, float32 `[N]`.
    """
    device = logits.device
    scaled = logits.float()
    temperatures = [request.temperature for request in requests]
    if any(temperature != 1 for temperature in temperatures):
        divisors = torch.tensor([temperature or 1.0 for temperature in temperatures], device=device)
        scaled = scaled / divisors[:, None]
    cut = [row for row, request in enumerate(requests) if request.top_k > 0 or request.top_p < 1]
    if cut:
        scaled = scaled.index_copy(
            0, torch.tensor(cut, device=device), truncated(scaled[cut], [requests[row] for row in cut])
        )
    tokens, logprobs = _draw(scaled, torch.tensor(uniforms, dtype=torch.float64, device=device))
    if 0 in temperatures:
        greedy = torch.tensor([temperature == 0 for temperature in temperatures], device=device)
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
        logprobs = logprobs.masked_fill(greedy, 0.0)
    return tokens, logprobs


def restricted(logits: torch.Tensor, allowed: Mapping[int, np.ndarray]) -> torch.Tensor:
    """Logits `[N, V]` with -inf for the tokens that a row may not go on with.

    Args:
        allowed: by row, a bit for each token that it may, as uint8 with the lowest bit first: `Guide.allowed`.
    """
    device = logits.device
    rows = torch.tensor(list(allowed), device=device)
    # Unpacked where the logits are: a bit a token is little to send to a device.
    packed = torch.from_numpy(np.stack(list(allowed.values()))).to(device)
    places = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
    flags = (packed[:, :, None] & places).flatten(1)[:, : logits.shape[-1]] != 0
    return logits.index_copy(0, rows, logits[rows].masked_fill(~flags, -torch.inf))


def truncated(logits: torch.Tensor, requests: Sequence[GenerateRequest]) -> torch.Tensor:
    """Logits `[N, V]` with -inf for all but each row's most likely tokens: its `top_k`, and of these the fewest that
    hold `top_p` of their probability. Of equal logits the lower token id is the more likely."""
    count = logits.shape[-1]
    top_k = torch.tensor([r.top_k if r.top_k > 0 else count for r in requests], device=logits.device)
    top_p = torch.tensor([r.top_p for r in requests], device=logits.device)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(torch.arange(count, device=logits.device) >= top_k[:, None], -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    beyond = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    beyond[:, 0] = False
    return logits.scatter(-1, order, ordered.masked_fill(beyond, -torch.inf))


def _draw(logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the block of tokens that a number falls into, then the token in it: cumulative sums in double precision
    over the whole vocabulary would be dearer than a layer of the model."""
    count = logits.shape[-1]
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    weights = pad(shifted.exp(), (0, -count % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    blocks = weights.sum(dim=-1).double().cumsum(dim=-1)
    total = blocks[:, -1:]
    threshold = uniforms[:, None] * total
    block = torch.searchsorted(blocks, threshold, right=True).clamp_(max=blocks.shape[-1] - 1)
    end = blocks.gather(-1, block)
    begin = pad(blocks, (1, 0)).gather(-1, block)
    within = weights.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(dim=-1)
    # The block's sum and its tokens' sums round differently. Only a number below the last sum finds a token that has
    # a probability.
    last = within[:, -1:]
    share = (threshold - begin) / (end - begin) * last
    token = torch.searchsorted(within, share.minimum(torch.nextafter(last, torch.zeros_like(last))), right=True)
    tokens = (block * _BLOCK + token).clamp_(max=count - 1)
    logprobs = shifted.gather(-1, tokens) - total.log().float()
    return tokens[:, 0], logprobs[:, 0]
