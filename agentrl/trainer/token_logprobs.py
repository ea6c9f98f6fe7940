"""Log-probs and entropies of trained tokens without their logits in memory.

The logits of N tokens over a vocabulary of V, kept for the backward, are what a training step needs most memory for:
N = 8192 and V = 150,000 are 5 GB, and as much again for their gradient. Here the output layer is applied to some
tokens at a time, and in the backward applied again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from agentrl.trainer.packed_attention import PackedRows
from agentrl.trainer.packing import PackedInput

CHUNK_ELEMENTS = 2**25
"""Logits computed together: 128 MiB in float32. A micro-batch with fewer keeps them, and is not computed twice."""

logger = logging.getLogger(__name__)


class TokenStatistics(NamedTuple):
    """Of the distributions that trained tokens were drawn from, under the temperature of each, `[N]` in float32.

    Attributes:
        logp: log-probs of the tokens, nats.
        entropy: nats; with a gradient only where it was asked for.
        sum_pi_squared: sum of the squared probabilities of all tokens, without gradient.
    """

    logp: Tensor
    entropy: Tensor
    sum_pi_squared: Tensor


class TokenLogProbs:
    """The log-probs of a causal LM in packed rows.

    Args:
        model: its output layer is taken apart from the rest if that changes nothing. Some models bound or scale their
            logits; those are computed in one piece.
        chunk_elements: logits computed together, at least those of one token.
    """

    def __init__(self, model: Any, chunk_elements: int = CHUNK_ELEMENTS) -> None:
        self._model = model
        self._head: Any = model.get_output_embeddings()
        self._chunk_elements = chunk_elements
        self.chunked = isinstance(self._head, nn.Linear) and self._head_stands_alone()
        """Whether the output layer is applied to some tokens at a time."""
        if not self.chunked:
            logger.info("the logits of %s are computed in one piece", type(model).__name__)

    def __call__(self, packed: PackedInput, *, entropy_gradient: bool = False) -> TokenStatistics:
        """The statistics of the trained tokens.

        Args:
            entropy_gradient: whether entropies have one, which costs time and memory.
        """
        if not self.chunked:
            logits = self._forward(packed).float() / packed.temperatures[:, None]
            return _from_logits(logits, packed.targets, entropy_gradient)
        with _skipped(self._head):
            hidden = self._forward(packed)
        weight, bias = self._head.weight, self._head.bias
        rows = max(1, self._chunk_elements // len(weight))
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        with torch.autocast(device, enabled=False):
            return TokenStatistics(
                *_Head.apply(hidden, weight, bias, packed.targets, packed.temperatures, dtype, rows, entropy_gradient)
            )

    def _forward(self, packed: PackedInput) -> Tensor:
        """`[N, V]`, or what the output layer would read."""
        return self._model(
            input_ids=packed.token_ids,
            position_ids=packed.positions,
            logits_to_keep=packed.predicting,
            use_cache=False,
            packed_rows=PackedRows(packed.lengths),
        ).logits[0]

    @torch.no_grad()
    def _head_stands_alone(self) -> bool:
        """Whether the logits are what the output layer makes of the numbers that reach it: the same operations give the
        same bits, a bound on the logits gives others."""
        ids = torch.arange(min(8, len(self._head.weight)), device=self._head.weight.device)
        size = torch.tensor([len(ids)], device=ids.device)
        probe = PackedInput(ids[None], ids[None], size, ids, ids, torch.ones(len(ids), device=ids.device))
        logits = self._forward(probe)
        with _skipped(self._head):
            hidden = self._forward(probe)
        return hidden.shape[-1] == self._head.in_features and torch.equal(self._head(hidden[None])[0], logits)


@contextmanager
def _skipped(layer: Any) -> Iterator[None]:
    """Passes on what `layer` reads. The whole model is called all the same, as its hooks may expect."""
    layer.forward = lambda hidden: hidden
    try:
        yield
    finally:
        del layer.forward


class _Head(torch.autograd.Function):
    """Log-probs and entropies from hidden states, some rows at a time, in the forward and again in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        dtype: torch.dtype,
        rows: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of `hidden` `[N, H]`; products are computed in `dtype`, everything after them in float32."""
        logp, entropy, squares, normaliser = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(4))
        logits = hidden.new_empty(0)
        cast_weight, cast_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        for part in _parts(len(hidden), rows):
            logits = _logits(hidden[part].to(dtype), cast_weight, cast_bias, temperatures[part])
            normaliser[part] = logits.logsumexp(-1)
            logp[part] = logits.gather(-1, targets[part, None])[:, 0] - normaliser[part]
            entropy[part], squares[part] = _moments(logits, normaliser[part])
        kept = logits if len(hidden) <= rows else None
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, normaliser, kept, entropy)
        ctx.dtype, ctx.rows, ctx.entropy_gradient = dtype, rows, entropy_gradient
        ctx.mark_non_differentiable(*([squares] if entropy_gradient else [entropy, squares]))
        return logp, entropy, squares

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures, normaliser, kept, entropy = ctx.saved_tensors
        dtype = ctx.dtype
        cast_weight, cast_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_gradient = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        bias_gradient = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for part in _parts(len(hidden), ctx.rows):
            states = hidden[part].to(dtype)
            logits = _logits(states, cast_weight, cast_bias, temperatures[part]) if kept is None else kept
            # Of the log-prob: 1 at the target minus the probabilities, over the temperature.
            scale = gradients[0][part] / temperatures[part]
            logs = logits - normaliser[part, None]
            if ctx.entropy_gradient:
                # Of the entropy: -p (log p + entropy), over the temperature.
                spread = (gradients[1][part] / temperatures[part])[:, None]
                factor = (logs + entropy[part, None]).mul_(-spread).sub_(scale[:, None])
                towards = logs.exp_().mul_(factor)
            else:
                towards = logs.exp_().mul_(-scale[:, None])
            towards.scatter_add_(1, targets[part, None], scale[:, None])
            towards = towards.to(dtype)
            if hidden_gradient is not None:
                hidden_gradient[part] = (towards @ cast_weight).to(hidden.dtype)
            if weight_gradient is not None and weight_gradient.dtype == dtype:
                weight_gradient.addmm_(towards.T, states)
            elif weight_gradient is not None:
                weight_gradient += towards.T @ states
            if bias_gradient is not None:
                bias_gradient += towards.sum(0)
        return hidden_gradient, weight_gradient, bias_gradient, None, None, None, None, None


def _parts(length: int, rows: int) -> Iterator[slice]:
    return (slice(start, start + rows) for start in range(0, length, rows))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor) -> Tensor:
    """`[rows, V]` in float32, over the temperatures."""
    return nn.functional.linear(hidden, weight, bias).float().div_(temperatures[:, None])


def _moments(logits: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy and sum of squared probabilities of each row."""
    probabilities = (logits - normaliser[:, None]).exp_()
    entropy = normaliser - torch.linalg.vecdot(probabilities, logits)
    return entropy, torch.linalg.vecdot(probabilities, probabilities)


def _from_logits(logits: Tensor, targets: Tensor, entropy_gradient: bool, rows: int = 1024) -> TokenStatistics:
    """From all logits `[N, V]` at once."""
    logp = logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        moments = [_moments(part, part.logsumexp(-1)) for part in logits.split(rows)]
    entropy, squares = (torch.cat(parts) for parts in zip(*moments, strict=True))
    return TokenStatistics(logp, entropy, squares.detach())
