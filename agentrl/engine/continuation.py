"""Answers that an engine gives in parts: what interrupted one is not seen by whoever asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from agentrl.record import EngineError
from agentrl.record.protocols import FinishReason, GenerateRequest, GenerateResult

_MOST_EMPTY = 5


@dataclass(frozen=True, slots=True)
class Part:
    """What an engine sampled before it ended a request, or was interrupted.

    Attributes:
        token_ids, versions: int32 `[T]`.
        logprobs: float32 `[T]`.
        finish_reason: `interrupted` if it was neither the request's own end nor its budget.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: Literal["stop", "length", "interrupted"]

    @classmethod
    def empty(cls) -> Part:
        """Interrupted before the first token."""
        return cls(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "interrupted")


async def continued(
    request: GenerateRequest,
    sample: Callable[[GenerateRequest], Awaitable[Part]],
    *,
    ready: Callable[[], Awaitable[None]],
    aborted: Callable[[], bool],
    completes_stop: Callable[[int], bool] | None = None,
) -> GenerateResult:
    """Samples a whole answer: after an interruption from where it was left, with what remains of its budget; from its
    beginning, if a JSON schema guides it.

    Args:
        sample: asks the engine. The prompts of later parts end with what was sampled so far; they keep the seed.
        ready: returns when another part may be asked for, or when the request was aborted.
        aborted: whether this request was ended on purpose: it is not continued.
        completes_stop: takes each token in turn, True for the one that completes a stop text. Needed for requests
            with such texts, since an engine does not see those that began in an earlier part.

    Raises:
        EngineError: the engine answered something that can't be part of this answer, or keeps interrupting without a
            token.
    """
    parts: list[Part] = []
    left, empty, seen = request.max_tokens, 0, 0
    while True:
        part = await sample(_rest(request, parts, left))
        _check(request, part, left)
        parts.append(part)
        left -= len(part.token_ids)
        reason = _end(request, part, left, aborted())
        if request.stop and (len(parts) > 1 or reason is None):
            cut = _stop_text_end(request, parts[seen:], completes_stop)
            seen = len(parts)
            if cut is not None:
                # Tokens of earlier parts were looked at before: the text ends in the last one.
                parts[-1] = _head(part, cut)
                reason = "stop"
        if reason is not None:
            return _joined(request, parts, reason)
        empty = 0 if len(part.token_ids) else empty + 1
        if empty >= _MOST_EMPTY:
            raise EngineError(f"the engine interrupted request {request.request_id} {empty} times before any token")
        await ready()
        if aborted():
            return _joined(request, parts, "abort")
        if request.json_schema:
            # The engine's place in the schema went with the part: it would begin another value after half of this one.
            parts, left = [], request.max_tokens


async def either(event: asyncio.Event, other: asyncio.Event) -> None:
    """Returns when one of two events is set."""
    while not event.is_set() and not other.is_set():
        waits = [asyncio.create_task(event.wait()), asyncio.create_task(other.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def _rest(request: GenerateRequest, parts: list[Part], left: int) -> GenerateRequest:
    if not parts:
        return request
    token_ids = np.concatenate([request.token_ids, *(part.token_ids for part in parts)]).astype(np.int32)
    return replace(request, token_ids=token_ids, max_tokens=left)


def _check(request: GenerateRequest, part: Part, left: int) -> None:
    count = len(part.token_ids)
    if not count == len(part.logprobs) == len(part.versions):
        raise EngineError(
            f"request {request.request_id}: {count} tokens with {len(part.logprobs)} log-probs and "
            f"{len(part.versions)} versions"
        )
    if count > left:
        raise EngineError(f"request {request.request_id}: {count} tokens, {left} were asked for")
    if part.finish_reason == "length" and count < left:
        raise EngineError(
            f"request {request.request_id} was cut after {count} of {left} tokens: the engine's context is shorter "
            "than rollout.max_model_len"
        )


def _end(request: GenerateRequest, part: Part, left: int, aborted: bool) -> FinishReason | None:
    """Why the answer ends with this part, None if it goes on."""
    if part.finish_reason != "interrupted":
        return part.finish_reason
    if len(part.token_ids) and int(part.token_ids[-1]) in request.stop_token_ids:
        return "stop"
    if left == 0:
        return "length"
    return "abort" if aborted else None


def _stop_text_end(
    request: GenerateRequest, parts: list[Part], completes_stop: Callable[[int], bool] | None
) -> int | None:
    """Tokens of the last part up to the end of a stop text."""
    if completes_stop is None:
        raise EngineError(f"request {request.request_id} was interrupted, and nobody can find its stop texts")
    for part in parts:
        for position, token_id in enumerate(part.token_ids.tolist()):
            if completes_stop(token_id):
                return position + 1
    return None


def _head(part: Part, count: int) -> Part:
    return Part(part.token_ids[:count], part.logprobs[:count], part.versions[:count], "stop")


def _joined(request: GenerateRequest, parts: list[Part], reason: FinishReason) -> GenerateResult:
    return GenerateResult(
        request.request_id,
        np.concatenate([part.token_ids for part in parts]).astype(np.int32),
        np.concatenate([part.logprobs for part in parts]).astype(np.float32),
        np.concatenate([part.versions for part in parts]).astype(np.int32),
        reason,
    )
