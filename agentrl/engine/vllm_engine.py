"""vLLM as an engine: what is the same whether it runs in this process's children or as a server elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from agentrl.engine.busy_clock import BusyClock
from agentrl.engine.request_checks import check_request
from agentrl.engine.vllm_messages import abandon, all_sent, pack_bucket, pack_group
from agentrl.record import EngineDied, EngineError, GuideError, WeightTransferError
from agentrl.record.protocols import (
    Bucket,
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    WeightGroup,
)

T = TypeVar("T")
_HEALTH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class VllmAnswer:
    """What vLLM sampled for a request.

    Attributes:
        logprobs: of each token; fewer than tokens where it reports none.
        spans: `(first, end, version)`: which weights sampled which tokens.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[tuple[int, int, str]]
    finish_reason: str | None


@dataclass(slots=True)
class VllmCounters:
    """What vLLM's statistics say: counters since its start, and what it does now."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    running: int = 0
    waiting: int = 0


class VllmClient(Protocol):
    """A way to one vLLM. Every method raises EngineDied once it has failed for good, else EngineError."""

    async def generate(self, request: GenerateRequest) -> VllmAnswer: ...

    async def abort(self, request_ids: list[str]) -> None: ...

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self, level: int) -> None: ...

    async def wake_up(self) -> None: ...

    async def init_weight_transfer(self, info: dict[str, Any]) -> None: ...

    async def start_weight_update(self) -> None: ...

    async def update_weights(self, info: dict[str, Any]) -> None: ...

    async def finish_weight_update(self, version: str) -> None: ...

    async def set_version(self, version: str) -> None: ...

    async def reset_prefix_cache(self) -> None: ...

    async def weight_checksums(self) -> list[dict[str, str]]: ...

    async def check_health(self) -> None: ...

    async def counters(self) -> VllmCounters: ...

    async def close(self) -> None: ...


class VllmEngine:
    """Implements `record.protocols.Engine`.

    Pauses keep requests as they are; an update replaces the weights in place, and vLLM itself records which version
    each token was sampled under. The log-probs are those of the distribution sampled from (`processed_logprobs`).

    Args:
        keeps_cache: leave the keys and values of older weights in use after an update.
        workers: processes that hold the weights.
        vocabulary: tokens of the model.
    """

    def __init__(
        self, client: VllmClient, *, max_model_len: int, vocabulary: int, keeps_cache: bool, workers: int
    ) -> None:
        self._client = client
        self._max_model_len = max_model_len
        self._vocabulary = vocabulary
        self._keeps_cache = keeps_cache
        self._workers = workers
        self._version = 0
        self._clock = BusyClock()
        self._updating = False
        self._empty = False

    async def start(self) -> None:
        """Asks for one token. What vLLM compiles or imports with its first request is not the first episode's to wait
        for, and a vLLM that can't report what training needs is found before there is any.

        Raises:
            EngineError: it reports no versions, or log-probs from before temperature, top-p and top-k.
        """
        await self._client.set_version(str(self._version))
        request = GenerateRequest(
            "agentrl-first", np.zeros(1, np.int32), max_tokens=1, temperature=1.0, stop_token_ids=(), seed=0, top_k=1
        )
        result = await self.generate(request)
        if result.logprobs[0] != 0:  # of the only token left
            raise EngineError(
                "vLLM reports log-probs of another distribution than the one it samples from: start it with "
                "--logprobs-mode processed_logprobs"
            )

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        check_request(request, version=self._version, max_model_len=self._max_model_len, vocabulary=self._vocabulary)
        self._clock.count(1)
        try:
            return _result_of(request, await self._client.generate(request))
        finally:
            self._clock.count(-1)

    async def abort(self, request_ids: list[str]) -> None:
        await self._client.abort(request_ids)

    async def pause(self, mode: PauseMode = "keep") -> None:
        # The caches go with the pause: what is recomputed after it is computed under whatever weights there are then.
        await self._client.pause(mode, clear_cache=not self._keeps_cache)
        self._clock.pause()

    async def resume(self) -> None:
        if self._updating or self._empty:
            state = "there are no weights" if self._empty else "the weights are a mixture"
            raise EngineError(f"{state}: finish an update before the engine goes on")
        await self._client.resume()
        self._clock.resume()

    async def sleep(self) -> None:
        await self.pause("abort")
        self._empty = True
        await self._client.sleep(level=2)

    async def wake(self) -> None:
        await self._client.wake_up()
        await self.pause("abort")  # waking up lets requests go on, but there are no weights yet

    async def join_weight_group(self, group: WeightGroup) -> None:
        await _transfer(self._client.init_weight_transfer(pack_group(group)))

    async def start_weight_update(self) -> None:
        if not self._clock.paused:
            raise EngineError("pause the engine before a weight update")
        if self._updating:
            with contextlib.suppress(WeightTransferError):
                await _transfer(self._client.update_weights(abandon()))
        self._updating = True
        await _transfer(self._client.start_weight_update())

    async def update_weights(self, bucket: Bucket) -> None:
        self._check_updating()
        await _transfer(self._client.update_weights(pack_bucket(bucket)))

    async def finish_weight_update(self, version: int) -> None:
        self._check_updating()
        await _transfer(self._client.update_weights(all_sent()))
        await _transfer(self._client.finish_weight_update(str(version)))
        if not self._keeps_cache:
            await self._client.reset_prefix_cache()
        self._version = version
        self._updating = self._empty = False

    async def weight_checksums(self) -> list[dict[str, str]]:
        """Of each worker's parameters, by name."""
        return await self._client.weight_checksums()

    async def stats(self) -> EngineStats:
        counters = await self._client.counters()
        return EngineStats(
            self._version,
            counters.generated_tokens,
            max(0, counters.prompt_tokens - counters.cached_tokens),
            self._clock.busy_seconds,
            self._clock.paused_seconds,
            counters.running,
            counters.waiting,
            counters.cached_tokens,
            workers=self._workers,
        )

    async def watch(self) -> None:
        """Asks vLLM how it is until it has failed.

        Raises:
            EngineDied: it has.
        """
        while True:
            await asyncio.sleep(_HEALTH_SECONDS)
            await self._client.check_health()

    async def close(self) -> None:
        """Ends vLLM's processes, or the connection to them."""
        await self._client.close()

    def _check_updating(self) -> None:
        if not self._updating:
            raise EngineError("call start_weight_update before sending weights")


def sampling_parameters(request: GenerateRequest) -> dict[str, Any]:
    """The request in vLLM's words."""
    return {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
        "stop": list(request.stop),
        "stop_token_ids": list(request.stop_token_ids),
        # What ends a turn is the request's to say: the model's own end of sequence is among its stop tokens. vLLM lets
        # a guided answer end with it in any case, and would go on without the schema.
        "ignore_eos": not request.json_schema,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "detokenize": bool(request.stop),
        "logprobs": 0,
        **({"structured_outputs": {"json": request.json_schema}} if request.json_schema else {}),
    }


def _result_of(request: GenerateRequest, answer: VllmAnswer) -> GenerateResult:
    """What vLLM sampled, checked to be complete.

    Raises:
        EngineError: a token lacks its log-prob or its version.
        GuideError: vLLM could not follow the request's schema.
    """
    if answer.finish_reason == "error" and request.json_schema:
        raise GuideError(f"vLLM could not guide request {request.request_id} by its JSON schema: its log says why")
    tokens = np.asarray(answer.token_ids, np.int32)
    if len(answer.logprobs) != len(tokens):
        raise EngineError(f"vLLM reports no log-probs for request {request.request_id}")
    versions = np.full(len(tokens), -1, np.int32)
    for first, end, version in answer.spans:
        versions[first:end] = int(version) if version.isdecimal() else -1
    if (versions < 0).any():
        raise EngineError(f"vLLM does not say which weights sampled the tokens of request {request.request_id}")
    reasons: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    if answer.finish_reason not in reasons:
        raise EngineError(f"vLLM ended request {request.request_id} with {answer.finish_reason!r}")
    logprobs = np.asarray(answer.logprobs, np.float32)
    return GenerateResult(request.request_id, tokens, logprobs, versions, reasons[answer.finish_reason])


async def _transfer(call: Awaitable[T]) -> T:
    """A step of an update; what a worker says of it is a typed error."""
    try:
        return await call
    except EngineDied:
        raise
    except EngineError as error:
        raise WeightTransferError(str(error)) from error
