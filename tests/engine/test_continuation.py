"""An answer in parts is one answer: nothing lost, nothing sampled twice, no token beyond the budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest

from agentrl.engine.continuation import Part, continued
from agentrl.engine.stop_text import StopText
from agentrl.record import EngineError
from agentrl.record.protocols import GenerateRequest, GenerateResult
from tests.support.asynchrony import asynchronous

Reason = Literal["stop", "length", "interrupted"]


def part(ids: list[int], reason: Reason, version: int = 0) -> Part:
    return Part(np.array(ids, np.int32), -np.array(ids, np.float32) / 10, np.full(len(ids), version, np.int32), reason)


class Engine:
    """Gives the parts it was told to, and notes what it was asked."""

    def __init__(self, *parts: Part) -> None:
        self.parts = list(parts)
        self.asked: list[tuple[list[int], int, int]] = []
        self.waits = 0
        self.aborted = False

    async def sample(self, request: GenerateRequest) -> Part:
        self.asked.append((request.token_ids.tolist(), request.max_tokens, request.seed))
        return self.parts.pop(0)

    async def ready(self) -> None:
        self.waits += 1

    async def answer(self, request: GenerateRequest, **options: Any) -> GenerateResult:
        return await continued(request, self.sample, ready=self.ready, aborted=lambda: self.aborted, **options)


@asynchronous
async def test_a_whole_answer_is_one_part(request_of: Callable[..., GenerateRequest]) -> None:
    engine = Engine(part([5, 6, 7], "stop", 3))
    result = await engine.answer(request_of([1, 2], seed=9, max_tokens=8, stop=(7,)))
    assert (result.token_ids.tolist(), result.versions.tolist(), result.finish_reason) == ([5, 6, 7], [3] * 3, "stop")
    assert engine.waits == 0 and engine.asked == [([1, 2], 8, 9)]


@asynchronous
async def test_parts_keep_tokens_log_probs_versions_and_budget(request_of: Callable[..., GenerateRequest]) -> None:
    engine = Engine(part([5, 6], "interrupted", 1), part([], "interrupted"), part([7], "interrupted", 2))
    engine.parts.append(part([8, 9], "length", 4))
    result = await engine.answer(request_of([1, 2], seed=9, max_tokens=5))
    assert result.token_ids.tolist() == [5, 6, 7, 8, 9] and result.finish_reason == "length"
    np.testing.assert_allclose(result.logprobs, [-0.5, -0.6, -0.7, -0.8, -0.9], rtol=1e-6)
    assert result.versions.tolist() == [1, 1, 2, 4, 4]
    assert (result.token_ids.dtype, result.logprobs.dtype, result.versions.dtype) == (np.int32, np.float32, np.int32)
    assert engine.asked == [([1, 2], 5, 9), ([1, 2, 5, 6], 3, 9), ([1, 2, 5, 6], 3, 9), ([1, 2, 5, 6, 7], 2, 9)]
    assert engine.waits == 3


@asynchronous
async def test_an_interruption_after_the_last_token_is_no_interruption(
    request_of: Callable[..., GenerateRequest],
) -> None:
    engine = Engine(part([5, 6], "interrupted"))
    assert (await engine.answer(request_of([1], max_tokens=2))).finish_reason == "length"
    engine = Engine(part([5, 6], "interrupted"))
    assert (await engine.answer(request_of([1], max_tokens=9, stop=(6,)))).finish_reason == "stop"


@asynchronous
async def test_an_abort_of_ours_ends_the_request(request_of: Callable[..., GenerateRequest]) -> None:
    engine = Engine(part([5], "interrupted", 2))
    engine.aborted = True
    result = await engine.answer(request_of([1], max_tokens=4))
    assert (result.token_ids.tolist(), result.versions.tolist(), result.finish_reason) == ([5], [2], "abort")
    assert engine.waits == 0


@asynchronous
async def test_an_abort_while_it_waits_ends_the_request(request_of: Callable[..., GenerateRequest]) -> None:
    engine = Engine(part([5], "interrupted"))

    async def ready() -> None:
        engine.aborted = True

    engine.ready = ready  # type: ignore[method-assign]
    result = await engine.answer(request_of([1], max_tokens=4))
    assert (result.token_ids.tolist(), result.finish_reason) == ([5], "abort")


@asynchronous
async def test_nothing_is_asked_before_the_engine_is_ready(request_of: Callable[..., GenerateRequest]) -> None:
    engine = Engine(part([], "interrupted"), part([5], "length"))
    resumed = asyncio.Event()
    engine.ready = lambda: resumed.wait()  # type: ignore[assignment, method-assign, return-value]
    answer = asyncio.create_task(engine.answer(request_of([1], max_tokens=1)))
    await asyncio.sleep(0.05)
    assert len(engine.asked) == 1 and not answer.done()
    resumed.set()
    assert (await answer).token_ids.tolist() == [5]


@asynchronous
async def test_an_engine_that_only_interrupts_is_an_error(request_of: Callable[..., GenerateRequest]) -> None:
    engine = Engine(*[part([], "interrupted")] * 100)
    with pytest.raises(EngineError, match="r7 5 times before any token"):
        await engine.answer(request_of([1], seed=7, max_tokens=4))
    assert len(engine.asked) == 5


@asynchronous
async def test_an_engine_that_interrupts_after_every_token_gets_there(
    request_of: Callable[..., GenerateRequest],
) -> None:
    engine = Engine(*[part([token], "interrupted") for token in range(40)])
    result = await engine.answer(request_of([1], max_tokens=40))
    assert result.token_ids.tolist() == list(range(40)) and result.finish_reason == "length"


@asynchronous
async def test_a_stop_text_over_two_parts_is_found(request_of: Callable[..., GenerateRequest]) -> None:
    def decode(ids: list[int]) -> str:
        return "".join(chr(ord("a") + token) for token in ids)

    request = request_of([1], max_tokens=9, stop_texts=("cd",))
    engine = Engine(part([1, 2], "interrupted", 1), part([3, 4, 5], "interrupted", 2))
    result = await engine.answer(request, completes_stop=StopText(request.stop, decode).ends_with)
    assert (result.token_ids.tolist(), result.versions.tolist(), result.finish_reason) == ([1, 2, 3], [1, 1, 2], "stop")
    engine = Engine(part([1, 2], "interrupted"))
    with pytest.raises(EngineError, match="stop texts"):
        await engine.answer(request)
    engine = Engine(part([1, 2, 3], "stop"))  # in one part the engine has found it itself
    assert (await engine.answer(request)).finish_reason == "stop"


@asynchronous
async def test_a_guided_answer_begins_anew(request_of: Callable[..., GenerateRequest]) -> None:
    """The engine knows no more where in the schema it was: the tokens before the interruption are not of the answer."""
    request = request_of([1, 2], seed=9, max_tokens=5, stop=(8,), json_schema="{}")
    engine = Engine(part([5, 6], "interrupted", 1), part([], "interrupted"), part([7, 5, 8], "stop", 2))
    result = await engine.answer(request)
    assert (result.token_ids.tolist(), result.versions.tolist(), result.finish_reason) == ([7, 5, 8], [2] * 3, "stop")
    assert len(result.logprobs) == 3 and engine.asked == [([1, 2], 5, 9)] * 3
    engine = Engine(part([5, 6, 7, 5, 6], "interrupted"))
    assert (await engine.answer(request)).finish_reason == "length"
    engine = Engine(part([5, 8], "interrupted"))
    assert (await engine.answer(request)).finish_reason == "stop"
    engine = Engine(part([5], "interrupted"))
    engine.aborted = True
    result = await engine.answer(request)
    assert (result.token_ids.tolist(), result.finish_reason) == ([5], "abort")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (part([5, 6, 7], "length"), "3 tokens, 2 were asked for"),
        (part([5], "length"), "cut after 1 of 2 tokens"),
        (
            Part(np.zeros(2, np.int32), np.zeros(1, np.float32), np.zeros(2, np.int32), "length"),
            "2 tokens with 1 log-probs",
        ),
    ],
)
@asynchronous
async def test_what_cannot_be_part_of_the_answer_is_an_error(
    request_of: Callable[..., GenerateRequest], wrong: Part, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        await Engine(wrong).answer(request_of([1], max_tokens=2))
