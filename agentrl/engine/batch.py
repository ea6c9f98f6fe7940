"""Continuous batching: which sequences a step computes, and the step itself."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from agentrl.engine.attention import StepLayout
from agentrl.engine.kv_cache import KVCache
from agentrl.engine.sampling import sample
from agentrl.engine.sequence import Sequence
from agentrl.record.protocols import FinishReason


class ContinuousBatch:
    """Sequences join and leave at every token.

    Each `step` computes one token for every running sequence and, in the same forward, the prompts of sequences that
    fit into free slots. After new weights, `preempt` sends the running ones back to the queue: their tokens stay,
    their keys and values are computed again.

    Args:
        model: a causal LM whose attention is `ENGINE_ATTENTION`.
        max_batch_size: slots.
        max_model_len: tokens of the longest sequence.
        max_prefill_tokens: most prompt tokens of a step, beyond the first prompt.

    Attributes:
        generated_tokens, prompt_tokens: sampled, and computed as part of a prompt, since the start.
    """

    def __init__(self, model: Any, *, max_batch_size: int, max_model_len: int, max_prefill_tokens: int = 4096) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.generated_tokens = 0
        self.prompt_tokens = 0
        self._model = model
        self._device = model.device
        self._slots = max_batch_size
        self._max_prefill_tokens = max_prefill_tokens
        self._max_model_len = max_model_len
        self._cache = KVCache(max_batch_size, max_model_len)

    def preempt(self) -> None:
        """Drops all keys and values; running sequences queue again, ahead of the others."""
        self.waiting.extendleft(reversed(self.running))
        self.running = []
        self._cache = KVCache(self._slots, self._max_model_len)

    @torch.inference_mode()
    def remove(self, request_ids: set[str]) -> list[Sequence]:
        """Takes sequences out, wherever they are."""
        removed = [s for s in (*self.waiting, *self.running) if s.request.request_id in request_ids]
        self.waiting = deque(s for s in self.waiting if s.request.request_id not in request_ids)
        for sequence in [s for s in self.running if s.request.request_id in request_ids]:
            self._free(self.running.index(sequence))
        return removed

    @torch.inference_mode()
    def step(self, version: int) -> None:
        """Samples one token for each running or newly admitted sequence; ended ones deliver their result.

        Args:
            version: the policy version of the weights, recorded with each token.
        """
        decoding = len(self.running)
        admitted = self._admit()
        if not self.running:
            return
        tokens, logprobs = self._forward(decoding, admitted)
        self.generated_tokens += len(self.running)
        self.prompt_tokens += sum(sequence.length for sequence in admitted)
        ended: list[tuple[int, FinishReason]] = [
            (slot, reason)
            for slot, sequence in enumerate(self.running)
            if (reason := sequence.append(tokens[slot], logprobs[slot], version)) is not None
        ]
        for slot, reason in reversed(ended):
            sequence = self.running[slot]
            self._free(slot)
            sequence.finish(reason)

    def _admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        tokens = 0
        while self.waiting and len(self.running) < self._slots:
            tokens += self.waiting[0].length
            if admitted and tokens > self._max_prefill_tokens:
                break
            admitted.append(self.waiting.popleft())
            self.running.append(admitted[-1])
        return admitted

    def _forward(self, decoding: int, admitted: list[Sequence]) -> tuple[list[int], list[float]]:
        """One forward over a flat row: `[last token of sequence 0, 1, ... | prompt A ... | prompt B ...]`. The first
        `decoding` sequences have their keys and values in the cache, the admitted ones bring all their tokens."""
        old = self.running[:decoding]
        ends = np.array([sequence.length for sequence in self.running])
        token_ids = [sequence.token_ids[-1] for sequence in old]
        for sequence in admitted:
            token_ids += sequence.token_ids
        lengths = ends[decoding:]
        positions = np.concatenate([ends[:decoding] - 1, *(np.arange(n) for n in lengths)])
        slots = np.concatenate([np.arange(decoding), np.repeat(np.arange(decoding, len(ends)), lengths)])
        last = np.concatenate([np.arange(decoding), decoding + np.cumsum(lengths) - 1])
        self._cache.reserve(int(ends.max()))
        layout = self._layout(slots, positions, decoding, lengths)
        logits = self._model(
            input_ids=torch.tensor([token_ids], device=self._device),
            position_ids=layout.positions[None],
            logits_to_keep=torch.from_numpy(last).to(self._device),
            use_cache=False,
            step_layout=layout,
        ).logits[0]
        temperatures = torch.tensor([s.request.temperature for s in self.running], device=self._device)
        uniforms = torch.tensor([s.next_uniform() for s in self.running], dtype=torch.float64, device=self._device)
        tokens, logprobs = sample(logits, temperatures, uniforms)
        return tokens.tolist(), logprobs.tolist()

    def _layout(self, slots: np.ndarray, positions: np.ndarray, decoding: int, lengths: np.ndarray) -> StepLayout:
        seen = positions[:decoding]
        context = np.arange(int(seen.max()) + 1 if decoding else 0)
        width = int(lengths.max()) if len(lengths) else 0
        starts = decoding + np.cumsum(lengths) - lengths
        column = np.arange(width)
        real = column < lengths[:, None]
        arrays = {
            "slots": slots,
            "positions": positions,
            "visible": (context <= seen[:, None])[:, None, None],
            "padded": np.where(real, starts[:, None] + column, 0),
            "flat": np.flatnonzero(real),
        }
        on_device = {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}
        return StepLayout(cache=self._cache, decoding=decoding, **on_device)

    def _free(self, slot: int) -> None:
        """Takes a sequence out of the batch; the last one moves into its slot."""
        last = self.running.pop()
        if slot < len(self.running):
            self.running[slot] = last
            self._cache.move(len(self.running), slot, last.length)
