"""The policy as a function: log-probs of recorded tokens, under its own weights and under the untrained ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from agentrl.record import Branch
from agentrl.trainer.lora import has_lora, without_lora
from agentrl.trainer.packed_attention import PACKED_ATTENTION
from agentrl.trainer.packing import pack
from agentrl.trainer.token_logprobs import TokenLogProbs, TokenStatistics


class PolicyModel:
    """Computes on one rank.

    Args:
        model: a causal LM on its device, with or without adapters; its attention implementation is replaced.
        dtype: of all products: `float32` or `bfloat16`.
        reference: the untrained model; only needed if `reference_logp` is asked and `model` has no adapters that
            could be left out.
    """

    def __init__(self, model: Any, dtype: str, reference: Any = None) -> None:
        self.model = model
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._statistics = _statistics(model)
        self._reference = None if reference is None else _statistics(reference)
        self._has_lora = has_lora(model)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def statistics(self, branches: Sequence[Branch], *, entropy_gradient: bool = False) -> TokenStatistics:
        """Of the branches' trained tokens, each `[1, N]`, under the temperature each was sampled at."""
        return self._compute(self._statistics, branches, entropy_gradient)

    @torch.no_grad()
    def reference_logp(self, branches: Sequence[Branch]) -> torch.Tensor:
        """Log-probs `[1, N]` under the untrained policy, in nats.

        Raises:
            ValueError: there is neither a reference model nor an adapter to leave out.
        """
        if self._reference is None and not self._has_lora:
            raise ValueError("there is no untrained policy to compare with: pass the reference model")
        untrained = self._reference or self._statistics
        with without_lora(self.model) if self._has_lora else nullcontext():
            return self._compute(untrained, branches, False).logp

    def _compute(self, compute: TokenLogProbs, branches: Sequence[Branch], entropy_gradient: bool) -> TokenStatistics:
        packed = pack(branches, self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16):
            return TokenStatistics(*(part[None] for part in compute(packed, entropy_gradient=entropy_gradient)))


def _statistics(model: Any) -> TokenLogProbs:
    model.set_attn_implementation(PACKED_ATTENTION)
    # Rollout and training must be the same function of the weights: no dropout.
    model.eval()
    return TokenLogProbs(model)
