"""vLLM's AsyncLLM before 0.32, which does not say which weights sampled a token."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np

from agentrl.engine.continuation import Part, continued, either
from agentrl.engine.stop_text import Decode, StopText
from agentrl.engine.vllm_engine import VllmAnswer, VllmCounters
from agentrl.engine.vllm_local import LocalVllm
from agentrl.record import EngineError
from agentrl.record.protocols import GenerateRequest, PauseMode

_PAUSE_AGAIN_SECONDS = 0.2


class UnversionedVllm(LocalVllm):
    """The version changes only while nothing is sampled: every part of an answer is begun, sampled and read under one.

    A pause ends the parts that are on their way, and waits for each to come back with its tokens; until it is over none
    begins. Then the requests go on with another part, whose prompt ends with what was sampled before. So caches are
    never kept over an update, and which random numbers an answer gets also depends on where it was interrupted.

    Weights go to agentrl's own methods of the workers: those of vLLM differ from release to release.

    Args:
        decode: the text of token ids, for stop texts that begin in one part and end in another.
    """

    def __init__(self, llm: Any, counters: VllmCounters, decode: Decode | None) -> None:
        super().__init__(llm, counters)
        self._decode = decode
        self._version = 0
        self._running = asyncio.Event()
        self._running.set()
        self._parts: set[asyncio.Future[None]] = set()
        self._aborted: dict[str, asyncio.Event] = {}

    async def generate(self, request: GenerateRequest) -> VllmAnswer:
        if request.request_id in self._aborted:
            raise EngineError(f"a request {request.request_id} is running already")
        aborted = self._aborted[request.request_id] = asyncio.Event()
        stops = StopText(request.stop, self._decode).ends_with if request.stop and self._decode else None
        try:
            result = await continued(
                request,
                lambda rest: self._part(rest, request.max_tokens - rest.max_tokens, aborted),
                ready=lambda: either(self._running, aborted),
                aborted=aborted.is_set,
                completes_stop=stops,
            )
        finally:
            del self._aborted[request.request_id]
        spans = [(place, place + 1, str(version)) for place, version in enumerate(result.versions)]
        return VllmAnswer(result.token_ids.tolist(), result.logprobs.tolist(), spans, result.finish_reason)

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if request_id in self._aborted:
                self._aborted[request_id].set()
        await super().abort(request_ids)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        self._running.clear()
        if mode == "wait":
            await super().pause("wait", clear_cache)
        if mode == "abort":
            for aborted in self._aborted.values():
                aborted.set()
        await super().pause("abort", clear_cache)
        while self._parts:
            _, missed = await asyncio.wait(self._parts, timeout=_PAUSE_AGAIN_SECONDS)
            if missed:  # vLLM had not heard of them yet
                await super().pause("abort", clear_cache)

    async def resume(self) -> None:
        await super().resume()
        self._running.set()

    async def init_weight_transfer(self, info: dict[str, Any]) -> None:
        await self._call_workers("agentrl_join", info["group"])

    async def start_weight_update(self) -> None:
        await self._call_workers("agentrl_start")

    async def update_weights(self, info: dict[str, Any]) -> None:
        await self._call_workers("agentrl_receive", info["bucket"])

    async def finish_weight_update(self, version: str) -> None:
        await self._call_workers("agentrl_finish")
        await self.set_version(version)

    async def set_version(self, version: str) -> None:
        if self._parts:
            raise EngineError("the weights have another version now, and requests were running: pause before")
        self._version = int(version)

    async def weight_checksums(self) -> list[dict[str, str]]:
        return await self._call_workers("agentrl_checksums")

    async def _call_workers(self, method: str, *arguments: str) -> Any:
        return await self._ask(self._llm.collective_rpc(method, args=arguments))

    async def _part(self, rest: GenerateRequest, sampled: int, aborted: asyncio.Event) -> Part:
        """What vLLM samples until the request ends or a pause interrupts it.

        Args:
            sampled: tokens of earlier parts.
        """
        while True:
            await either(self._running, aborted)
            if aborted.is_set():
                return Part.empty()
            part = await self._sample(replace(rest, seed=_seed(rest.seed, sampled)))
            if len(part.token_ids) or self._running.is_set():
                return part
            # A pause came before its first token, as it may any number of times while it waits for its turn in vLLM.

    async def _sample(self, request: GenerateRequest) -> Part:
        version = self._version
        back = asyncio.get_running_loop().create_future()
        self._parts.add(back)
        try:
            answer = await super().generate(request)
        finally:
            self._parts.discard(back)
            back.set_result(None)
        tokens, logprobs = np.asarray(answer.token_ids, np.int32), np.asarray(answer.logprobs, np.float32)
        versions = np.full(len(tokens), version, np.int32)
        match answer.finish_reason:
            case "stop" | "length" as reason:
                return Part(tokens, logprobs, versions, reason)
            case "abort":
                return Part(tokens, logprobs, versions, "interrupted")
        raise EngineError(f"vLLM ended request {request.request_id} with {answer.finish_reason!r}")


def _seed(seed: int, sampled: int) -> int:
    """The seed of a part: each draws from a generator of its own, which must not repeat what an earlier one drew."""
    if not sampled:
        return seed
    (mixed,) = np.random.SeedSequence((seed, sampled)).generate_state(1, np.uint64)
    return int(mixed >> np.uint64(1))  # vLLM's seeds have a sign
