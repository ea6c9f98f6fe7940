"""A request on its way through an engine."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from agentrl.engine.guide import Guide
from agentrl.engine.stop_text import StopText
from agentrl.record import GuideError
from agentrl.record.protocols import FinishReason, GenerateRequest, GenerateResult


class Sequence:
    """The state of one request: its tokens so far, and under which policy version each was sampled.

    Args:
        deliver: called once with the result, or with why there is none.
        stop_text: what looks for the request's stop texts, if it has any.
        guide: says which tokens may come, if the request has a JSON schema.
    """

    def __init__(
        self,
        request: GenerateRequest,
        deliver: Callable[[GenerateResult | GuideError], None],
        stop_text: StopText | None = None,
        guide: Guide | None = None,
    ) -> None:
        self.request = request
        self.guide = guide
        self.token_ids: list[int] = request.token_ids.tolist()
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.stop_token_ids = frozenset(request.stop_token_ids)
        self._stop_text = stop_text
        self._prompt_length = len(self.token_ids)
        self._random = random.Random(request.seed)
        self._deliver = deliver
        self._failure: GuideError | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.token_ids)

    def next_uniform(self) -> float:
        """The random number in [0, 1) that decides the next token."""
        return self._random.random()

    def append(self, token_id: int, logprob: float, version: int) -> FinishReason | None:
        """Adds a sampled token; says whether that ends the turn."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token_id in self.stop_token_ids:
            return "stop"
        if self._stop_text is not None and self._stop_text.ends_with(token_id):
            return "stop"
        if len(self.versions) >= self.request.max_tokens:
            return "length"
        if self.guide is not None:
            try:
                self.guide.accept(token_id)
            except GuideError as error:
                self._failure = error
                return "abort"
        return None

    def finish(self, reason: FinishReason) -> None:
        """Delivers what was sampled."""
        if self._failure is not None:
            self._deliver(self._failure)
            return
        self._deliver(
            GenerateResult(
                self.request.request_id,
                np.asarray(self.token_ids[self._prompt_length :], np.int32),
                np.asarray(self.logprobs, np.float32),
                np.asarray(self.versions, np.int32),
                reason,
            )
        )
