"""The one fake: an engine that samples what a test's script says, token by token."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.record import Branch, EngineError, PeerLost
from agentrl.record.protocols import (
    Bucket,
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    WeightGroup,
)
from agentrl.session import ChatFormat


@dataclass(frozen=True)
class Sampled:
    """What the engine samples for one request; a `Sampled` longer than `max_tokens` is cut there."""

    token_ids: Sequence[int]
    finish_reason: FinishReason = "stop"


Answer = Sampled | Exception
Script = Callable[[GenerateRequest], Answer | Awaitable[Answer]]


class ScriptedEngine:
    """Implements `record.protocols.Engine`.

    Attributes:
        requests: all that came, in order.
        calls: names of the update methods called, in order.
        failures: what a method raises instead of doing its work.
        workers: as many processes hold its weights.
        paused: how it was paused last.
        group: the process group it joined last.
        before_token: awaited before each token, with the request and the token's position.

    Args:
        decode: makes text of token ids; with it, the stop texts of a request end a turn.
    """

    def __init__(self, script: Script, *, version: int = 0, decode: Callable[[list[int]], str] | None = None) -> None:
        self.version = version
        self._decode = decode
        self.requests: list[GenerateRequest] = []
        self.calls: list[str] = []
        self.failures: dict[str, BaseException] = {}
        self.before_token: Callable[[GenerateRequest, int], Awaitable[None]] | None = None
        self.generated = 0
        self.running = 0
        self.workers = 1
        self.paused: PauseMode | None = None
        self.group: WeightGroup | None = None
        self._script = script
        self._going = asyncio.Event()
        self._going.set()
        self._aborted: set[str] = set()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._fail("generate")
        if request.min_version > self.version:
            raise EngineError(f"asked for version {request.min_version}, at {self.version}")
        self.requests.append(request)
        self.running += 1
        try:
            return await self._sample(request)
        finally:
            self.running -= 1

    async def _sample(self, request: GenerateRequest) -> GenerateResult:
        answer = self._script(request)
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        token_ids: list[int] = []
        versions: list[int] = []
        finish_reason = answer.finish_reason
        for token in answer.token_ids:
            if len(token_ids) == request.max_tokens:
                finish_reason = "length"
                break
            if self.before_token is not None:
                await self.before_token(request, len(token_ids))
            await self._going.wait()
            if request.request_id in self._aborted:
                finish_reason = "abort"
                break
            token_ids.append(token)
            versions.append(self.version)
            self.generated += 1
            if self._decode is not None and any(text in self._decode(token_ids) for text in request.stop):
                finish_reason = "stop"
                break
        logprobs = [logprob(token) for token in token_ids]
        return GenerateResult(
            request.request_id,
            np.asarray(token_ids, np.int32),
            np.asarray(logprobs, np.float32),
            np.asarray(versions, np.int32),
            finish_reason,
        )

    async def abort(self, request_ids: list[str]) -> None:
        self._aborted.update(request_ids)

    async def pause(self, mode: PauseMode = "keep") -> None:
        self._called("pause")
        self.paused = mode
        self._going.clear()

    async def resume(self) -> None:
        self._called("resume")
        self._going.set()

    async def sleep(self) -> None:
        self._called("sleep")

    async def wake(self) -> None:
        self._called("wake")

    async def join_weight_group(self, group: WeightGroup) -> None:
        self._called("join_weight_group")
        self.group = group

    async def start_weight_update(self) -> None:
        self._called("start_weight_update")

    async def update_weights(self, bucket: Bucket) -> None:
        self._called("update_weights")

    async def finish_weight_update(self, version: int) -> None:
        self._called("finish_weight_update")
        self.version = version

    async def stats(self) -> EngineStats:
        self._fail("stats")
        return EngineStats(self.version, self.generated, 0, 0.0, 0.0, self.running, 0, workers=self.workers)

    def lose(self) -> None:
        """From now on nobody answers, as if the process were gone."""
        for name in ("generate", "pause", "resume", "start_weight_update", "update_weights", "stats"):
            self.failures[name] = PeerLost("the engine is gone")

    def _called(self, name: str) -> None:
        self._fail(name)
        self.calls.append(name)

    def _fail(self, name: str) -> None:
        if name in self.failures:
            raise self.failures[name]


def logprob(token: int) -> float:
    """The log-prob that the scripted engine reports for a token."""
    return -float(token % 64) / 64 - 0.125


def turn_number(request: GenerateRequest) -> int:
    """Which of its episode's requests it is, from 0."""
    return int(request.request_id.rpartition(":")[2])


def member_number(request: GenerateRequest) -> int:
    """Which member of its group the episode is, from 0."""
    return int(request.request_id.rpartition(":")[0].partition("~")[0].rpartition(".")[2])


def assert_trained_as_sampled(
    branches: Sequence[Branch], engine: ScriptedEngine, sampled: Sequence[Sequence[int]]
) -> None:
    """Every turn is trained once, its own ids after its own prompt, with the engine's log-probs."""
    found = []
    for branch in branches:
        assert sum(turn.end - turn.start for turn in branch.turns) == branch.trained_tokens
        for turn in branch.turns:
            tokens = branch.token_ids[turn.start : turn.end].tolist()
            found.append((branch.token_ids[: turn.start].tolist(), tokens))
            assert branch.loss_mask[turn.start : turn.end].all()
            np.testing.assert_allclose(branch.logprobs[turn.start : turn.end], [logprob(token) for token in tokens])
    expected = [(request.token_ids.tolist(), list(ids)) for request, ids in zip(engine.requests, sampled, strict=True)]
    assert sorted(found) == sorted(expected)


def encode(chat_format: ChatFormat, text: str) -> list[int]:
    """Token ids of a text; special tokens in it are themselves."""
    return chat_format.tokenizer.encode(text, add_special_tokens=False)


def says(chat_format: ChatFormat, text: str) -> Sampled:
    """A whole turn: the text and the stop token."""
    return Sampled([*encode(chat_format, text), chat_format.stop_token_ids[0]])


def turns(chat_format: ChatFormat, *texts: str) -> Script:
    """Each episode's turns say these, one after the other; the last one again and again."""
    answers = [says(chat_format, text) for text in texts]
    return lambda request: answers[min(turn_number(request), len(answers) - 1)]
