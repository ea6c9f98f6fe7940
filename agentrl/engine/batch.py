"""Continuous batching: which sequences a step computes, and the step itself."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from agentrl.engine.attention import Prompt, StepLayout
from agentrl.engine.kv_cache import KVCache
from agentrl.engine.prefix_cache import PrefixCache
from agentrl.engine.sampling import restricted, sample
from agentrl.engine.sequence import Sequence
from agentrl.record.protocols import FinishReason

_ALIGNMENT = 8


class ContinuousBatch:
    """Sequences join and leave at every token.

    Each `step` computes one token for every running sequence and, in the same forward, the prompts of sequences that
    find room. Of a prompt only what no earlier prompt or turn began with is computed; one whose beginning another
    prompt computes in this step waits for the next. After new weights, `preempt` sends the running ones back to the
    queue: their tokens stay, their keys and values are computed again.

    Args:
        model: a causal LM whose attention is `ENGINE_ATTENTION`.
        max_batch_size: most sequences at once.
        max_model_len: tokens of the longest sequence.
        kv_cache_tokens: bound on keys and values held, of running sequences and for reuse together; at least
            `max_model_len`. Where running sequences grow beyond it, the last ones go back to the queue.
        max_prefill_tokens: most prompt tokens of a step, beyond the first prompt.

    Attributes:
        generated_tokens, prompt_tokens, cached_tokens: sampled, computed as part of a prompt, and reused as part of
            one, since the start.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_batch_size: int,
        max_model_len: int,
        kv_cache_tokens: int,
        max_prefill_tokens: int = 4096,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.generated_tokens = self.prompt_tokens = self.cached_tokens = 0
        self._model = model
        self._device, self._dtype = model.device, model.dtype
        self._max_prefill_tokens = max_prefill_tokens
        self._kv_cache_tokens = kv_cache_tokens
        self._cache_size = (max_batch_size, max_model_len, kv_cache_tokens)
        self._prefixes = PrefixCache()
        self._start_cache()

    @property
    def kv_tokens(self) -> int:
        """Tokens that the memory of keys and values has room for now."""
        return self._cache.tokens + self._prefixes.tokens

    def preempt(self) -> None:
        """Drops all keys and values; running sequences queue again, ahead of the others."""
        self.waiting.extendleft(reversed(self.running))
        self.running = []
        self._prefixes.clear()
        self._start_cache()

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
        self._make_room()
        decoding = len(self.running)
        known = self._admit()
        if not self.running:
            return
        tokens, logprobs = self._forward(decoding, known)
        for row, sequence in enumerate(self.running[decoding:], decoding):
            self._prefixes.store(sequence.token_ids[:-1], self._cache, row)
        ended: list[tuple[int, FinishReason]] = [
            (row, reason)
            for row, sequence in enumerate(self.running)
            if (reason := sequence.append(tokens[row], logprobs[row], version)) is not None
        ]
        self.generated_tokens += len(self.running)
        for row, reason in reversed(ended):
            sequence = self.running[row]
            self._free(row)
            sequence.finish(reason)

    def _start_cache(self) -> None:
        self._cache = KVCache(*self._cache_size)
        self._prefixes.limit(self._kv_cache_tokens - self._cache.tokens)

    def _reserve(self, count: int, length: int) -> None:
        rows, longest = self._cache.sides(count, length)
        self._prefixes.limit(self._kv_cache_tokens - rows * longest)  # first, to grow into what they held
        self._cache.reserve(count, length)

    def _make_room(self) -> None:
        """For the next token of each running sequence; the last ones step back if there is not enough."""
        longest = max((sequence.length for sequence in self.running), default=0)
        while not self._cache.fits(len(self.running), longest):
            sequence = self.running[-1]
            self._free(len(self.running) - 1)
            self.waiting.appendleft(sequence)
        if self.running:
            self._reserve(len(self.running), longest)
        elif self._cache.rows < self._cache_size[0]:
            self._start_cache()  # as many rows as there were before the long sequences

    def _admit(self) -> list[int]:
        """Gives waiting sequences a row while there is room; for each, how many tokens that row already holds."""
        known: list[int] = []
        passed: list[Sequence] = []
        being_computed = set()
        tokens = 0
        longest = max((sequence.length for sequence in self.running), default=0)
        while self.waiting:
            sequence = self.waiting[0]
            longest = max(longest, sequence.length)
            if not self._cache.fits(len(self.running) + 1, longest):
                break
            match = self._prefixes.match(sequence.token_ids[:-1])
            if match.missing is not None and match.missing in being_computed:
                passed.append(self.waiting.popleft())
                continue
            tokens += sequence.length - match.tokens
            if known and tokens > self._max_prefill_tokens:
                break
            self._reserve(len(self.running) + 1, longest)
            if match.blocks:
                keys, values = (
                    torch.cat([getattr(block, kind) for block in match.blocks], dim=2) for kind in ("keys", "values")
                )
                self._cache.load(len(self.running), keys, values)
            if sequence.length <= self._prefixes.capacity:
                being_computed.add(match.missing)
            known.append(match.tokens)
            self.running.append(self.waiting.popleft())
        self.waiting.extendleft(reversed(passed))
        self.prompt_tokens += sum(s.length for s in self.running[len(self.running) - len(known) :]) - sum(known)
        self.cached_tokens += sum(known)
        return known

    def _forward(self, decoding: int, known: list[int]) -> tuple[list[int], list[float]]:
        """One forward over a flat row: `[last token of sequence 0, 1, ... | prompt A ... | prompt B ...]`. The first
        `decoding` sequences have all but that token in the cache, the admitted ones as many as `known` says."""
        begins = [*(sequence.length - 1 for sequence in self.running[:decoding]), *known]
        token_ids: list[int] = []
        last: list[int] = []
        for sequence, begin in zip(self.running, begins, strict=True):
            token_ids += sequence.token_ids[begin:] if begin < sequence.length - 1 else sequence.token_ids[-1:]
            last.append(len(token_ids) - 1)
        layout = self._layout(decoding, np.array(begins), np.array([s.length for s in self.running]))
        logits = self._model(
            input_ids=torch.tensor([token_ids], device=self._device),
            position_ids=layout.positions[None],
            logits_to_keep=torch.tensor(last, device=self._device) if known else 0,
            use_cache=False,
            step_layout=layout,
        ).logits[0]
        allowed = {row: s.guide.allowed for row, s in enumerate(self.running) if s.guide is not None}
        if allowed:
            logits = restricted(logits, allowed)
        tokens, logprobs = sample(logits, [s.request for s in self.running], [s.next_uniform() for s in self.running])
        return tokens.tolist(), logprobs.tolist()

    def _layout(self, decoding: int, begins: np.ndarray, ends: np.ndarray) -> StepLayout:
        """Where the tokens from `begins` to `ends` of each running sequence belong."""
        counts = ends - begins
        starts = np.cumsum(counts) - counts
        positions = np.arange(counts.sum()) + np.repeat(begins - starts, counts)
        prompts = [
            Prompt(start, start + count, decoding + index, end, self._visible(count, end))
            for index, (start, count, end) in enumerate(
                zip(starts[decoding:].tolist(), counts[decoding:].tolist(), ends[decoding:].tolist(), strict=True)
            )
        ]
        return StepLayout(
            cache=self._cache,
            rows=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(self._device),
            positions=torch.from_numpy(positions).to(self._device),
            decoding=decoding,
            bias=self._bias(ends[:decoding]),
            prompts=prompts,
        )

    def _bias(self, lengths: np.ndarray) -> torch.Tensor:
        width = min(-(-int(lengths.max(initial=0)) // _ALIGNMENT) * _ALIGNMENT, self._cache.length)
        bias = np.where(np.arange(width) < lengths[:, None], np.float32(0), np.float32(-np.inf))
        return torch.from_numpy(bias[:, None, None]).to(self._device, self._dtype)

    def _visible(self, count: int, length: int) -> torch.Tensor | None:
        if count in (1, length):
            return None
        return torch.ones((count, length), dtype=torch.bool, device=self._device).tril(length - count)

    def _free(self, row: int) -> None:
        """Takes a sequence out of the batch, remembering its keys and values; the last one moves into its row."""
        self._prefixes.store(self.running[row].token_ids[:-1], self._cache, row)
        last = self.running.pop()
        if row < len(self.running):
            self.running[row] = last
            self._cache.move(len(self.running), row, last.length)
