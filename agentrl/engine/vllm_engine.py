"""vLLM as an engine: its AsyncLLM in this process, its core and workers in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from agentrl.config import RunConfig
from agentrl.device import get_device
from agentrl.engine.kv_cache import affordable_tokens, token_bytes
from agentrl.engine.request_checks import check_request
from agentrl.engine.vllm_messages import abandon, all_sent, pack_bucket, pack_group
from agentrl.engine.vllm_plugin import WEIGHT_TRANSFER
from agentrl.record import EngineDied, EngineError, WeightTransferError
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
log = logging.getLogger(__name__)

_WORKER_ERROR = re.compile(r"Worker failed with error '(.*)', please check the stack trace", re.DOTALL)
_HEALTH_SECONDS = 1.0
_BATCH_TOKENS = 8192
_BLOCK_TOKENS = 128
"""Tokens of a block of vLLM's cache on CPU, the largest of its defaults: caches are rounded up to it."""


@dataclass(slots=True)
class _Counters:
    """What vLLM's statistics say so far."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    running: int = 0
    waiting: int = 0


class VllmEngine:
    """Implements `record.protocols.Engine` on a running `AsyncLLM`.

    Pauses keep requests as they are; an update replaces the weights in place, and vLLM itself records which version
    each token was sampled under. The log-probs are those of the distribution sampled from (`processed_logprobs`).

    Args:
        llm: started by `start_vllm_engine`.
        keeps_cache: leave the keys and values of older weights in use after an update.
        workers: processes that hold the weights.
    """

    def __init__(self, llm: Any, counters: _Counters, *, max_model_len: int, keeps_cache: bool, workers: int) -> None:
        self._llm = llm
        self._counters = counters
        self._max_model_len = max_model_len
        self._keeps_cache = keeps_cache
        self._workers = workers
        self._vocabulary = int(llm.model_config.get_vocab_size())
        self._version = 0
        self._paused_since: float | None = None
        self._paused_seconds = self._busy = 0.0
        self._busy_since: float | None = None
        self._in_flight = 0
        self._asleep = self._updating = False

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        check_request(request, version=self._version, max_model_len=self._max_model_len, vocabulary=self._vocabulary)
        parameters = sampling_parameters(request)
        output: Any = None
        self._count(1)
        try:
            prompt = {"prompt_token_ids": request.token_ids.tolist()}
            async for last in self._llm.generate(prompt, parameters, request.request_id):
                output = last
        except ValueError as error:
            raise EngineError(f"vLLM refuses request {request.request_id}: {error}") from error
        except Exception as error:
            raise await self._typed(error) from error
        finally:
            self._count(-1)
        if output is None:
            raise EngineError(f"vLLM ended request {request.request_id} without an answer")
        return result_of(request, output.outputs[0])

    async def abort(self, request_ids: list[str]) -> None:
        await self._ask(self._llm.abort(request_ids))

    async def pause(self, mode: PauseMode = "keep") -> None:
        # The caches go with the pause: what is recomputed after it is computed under whatever weights there are then.
        await self._ask(self._llm.pause_generation(mode=mode, clear_cache=not self._keeps_cache))
        if self._paused_since is None:
            self._paused_since = time.perf_counter()
            self._count(0)

    async def resume(self) -> None:
        if self._updating:
            raise EngineError("the weights are a mixture: finish an update before the engine goes on")
        await self._ask(self._llm.resume_generation())
        if self._paused_since is not None:
            self._paused_seconds += time.perf_counter() - self._paused_since
            self._paused_since = None
            self._count(0)

    async def sleep(self) -> None:
        await self.pause("abort")
        await self._ask(self._llm.sleep(level=2))
        self._asleep = True

    async def wake(self) -> None:
        await self._ask(self._llm.wake_up())
        self._asleep = False
        await self.pause("abort")  # waking up resumes the scheduler, but there are no weights yet

    async def join_weight_group(self, group: WeightGroup) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._transfer(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(pack_group(group))))

    async def start_weight_update(self) -> None:
        if self._paused_since is None:
            raise EngineError("pause the engine before a weight update")
        if self._updating:
            with contextlib.suppress(WeightTransferError):
                await self._transfer(self._update(abandon()))
        self._updating = True
        await self._transfer(self._llm.start_weight_update())

    async def update_weights(self, bucket: Bucket) -> None:
        if not self._updating:
            raise EngineError("call start_weight_update before sending weights")
        await self._transfer(self._update(pack_bucket(bucket)))

    async def finish_weight_update(self, version: int) -> None:
        if not self._updating:
            raise EngineError("call start_weight_update before sending weights")
        await self._transfer(self._update(all_sent()))
        await self._transfer(self._llm.finish_weight_update(str(version)))
        if not self._keeps_cache:
            await self._ask(self._llm.reset_prefix_cache(reset_running_requests=True))
        self._version = version
        self._updating = False

    async def weight_checksums(self) -> list[dict[str, str]]:
        """Of each worker's parameters, by name."""
        return await self._ask(self._llm.compute_weight_checksums())

    async def stats(self) -> EngineStats:
        if self._llm.errored:
            raise EngineDied(f"vLLM has failed: {self._llm.dead_error}")
        counters, busy = self._counters, self._busy
        if self._busy_since is not None:
            busy += time.perf_counter() - self._busy_since
        return EngineStats(
            self._version,
            counters.generated_tokens,
            counters.prompt_tokens,
            busy,
            self._paused_seconds,
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
            await self._ask(self._llm.check_health())

    async def close(self) -> None:
        """Ends vLLM's processes."""
        await asyncio.to_thread(self._llm.shutdown)

    def _count(self, change: int) -> None:
        """Notes how many requests are in flight: the engine is busy while there are any and it is not paused."""
        self._in_flight += change
        now, busy = time.perf_counter(), self._in_flight > 0 and self._paused_since is None
        if self._busy_since is not None:
            self._busy += now - self._busy_since
        self._busy_since = now if busy else None

    async def _update(self, step: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.update_weights(WeightTransferUpdateRequest(step))

    async def _transfer(self, call: Awaitable[T]) -> T:
        """A step of an update; what a worker says of it is a typed error."""
        try:
            return await self._ask(call)
        except EngineDied:
            raise
        except EngineError as error:
            raise WeightTransferError(str(error)) from error

    async def _ask(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except Exception as error:
            raise await self._typed(error) from error

    async def _typed(self, error: Exception) -> Exception:
        """What an error of vLLM's means for the run."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, EngineError):
            return error
        if isinstance(error, EngineDeadError) or self._llm.errored:
            return EngineDied(f"vLLM has failed: {error}")
        worker = _WORKER_ERROR.search(str(error))
        return EngineError(f"vLLM: {worker[1] if worker else f'{type(error).__name__}: {error}'}")


def sampling_parameters(request: GenerateRequest) -> Any:
    """The request in vLLM's words.

    Raises:
        EngineError: vLLM refuses them.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    try:
        return SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
            stop=list(request.stop) or None,
            stop_token_ids=list(request.stop_token_ids),
            # What ends a turn is the request's to say: the model's own end of sequence is among its stop tokens.
            ignore_eos=True,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            detokenize=bool(request.stop),
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except ValueError as error:
        raise EngineError(f"vLLM refuses request {request.request_id}: {error}") from error


def result_of(request: GenerateRequest, output: Any) -> GenerateResult:
    """What vLLM sampled, checked to be complete.

    Raises:
        EngineError: a token lacks its log-prob or its version.
    """
    tokens = np.asarray(output.token_ids, np.int32)
    logprobs = np.zeros(len(tokens), np.float32)
    if len(tokens):
        flat = output.logprobs
        if flat is None or len(flat.start_indices) != len(tokens):
            raise EngineError(f"vLLM reports no log-probs for request {request.request_id}")
        # The sampled token comes first at every position.
        logprobs = np.asarray(flat.logprobs, np.float32)[np.asarray(flat.start_indices)]
    versions = np.full(len(tokens), -1, np.int32)
    for span in output.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if (versions < 0).any():
        raise EngineError(f"vLLM does not say which weights sampled the tokens of request {request.request_id}")
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    if output.finish_reason not in reasons:
        raise EngineError(f"vLLM ended request {request.request_id} with {output.finish_reason!r}")
    return GenerateResult(request.request_id, tokens, logprobs, versions, reasons[output.finish_reason])


async def start_vllm_engine(config: RunConfig, model_path: str, index: int) -> VllmEngine:
    """Starts vLLM for one engine of a run, on its own devices.

    Raises:
        EngineError: vLLM is not installed, or does not know an argument of `rollout.engine_args`.
    """
    rollout = config.rollout
    device = get_device(config.trainer.device)
    os.environ.update(_environment(config, index))
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics.loggers import StatLoggerBase
    except ImportError as error:
        raise EngineError(
            f"rollout.engine = vllm, but vLLM can't be imported ({error}): see docs/engines.md"
        ) from error

    counters = _Counters()

    class Counting(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                counters.running = scheduler_stats.num_running_reqs
                counters.waiting = scheduler_stats.num_waiting_reqs
                cached = scheduler_stats.prefix_cache_stats
                counters.cached_tokens += cached.hits if cached is not None else 0
            if iteration_stats is not None:
                counters.generated_tokens += iteration_stats.num_generation_tokens
                counters.prompt_tokens += iteration_stats.num_prompt_tokens

        def log_engine_initialized(self) -> None: ...

    own: dict[str, Any] = {
        "model": model_path,
        "dtype": config.model.dtype,
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.max_batch_size,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "weight_transfer_config": {"backend": WEIGHT_TRANSFER},
        "logprobs_mode": "processed_logprobs",
        # Not the model's own generation_config: what is sampled from is what the run's config says.
        "generation_config": "vllm",
        "seed": config.data.seed,
        "disable_log_stats": False,
    }
    if device.type == "cpu":
        own["enforce_eager"] = True
        # In a step that computes part of a prompt, vLLM takes back a request's random number, which the generators of a
        # CPU can't: it would fail. So prompts are computed whole.
        own["enable_chunked_prefill"] = False
        own["max_num_batched_tokens"] = max(rollout.max_model_len, _BATCH_TOKENS)
    if rollout.kv_cache_tokens is not None or device.type == "cpu":
        own["kv_cache_memory_bytes"] = await asyncio.to_thread(_kv_cache_bytes, config, model_path)
    try:
        arguments = AsyncEngineArgs(**{**own, **rollout.engine_args})
    except TypeError as error:
        raise EngineError(f"rollout.engine_args: {error}") from error
    llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[Counting])
    engine = VllmEngine(
        llm,
        counters,
        max_model_len=rollout.max_model_len,
        keeps_cache=rollout.kv_on_update == "keep",
        workers=rollout.tensor_parallel_size,
    )
    try:
        await llm.update_weight_version("0")
        await _warm_up(engine)
    except BaseException:
        with contextlib.suppress(Exception):
            await engine.close()
        raise
    return engine


async def _warm_up(engine: VllmEngine) -> None:
    """One token: what vLLM compiles or imports with its first request is not the first episode's to wait for."""
    await engine.generate(
        GenerateRequest("warm-up", np.zeros(1, np.int32), max_tokens=2, temperature=1.0, stop_token_ids=(), seed=0)
    )


def _kv_cache_bytes(config: RunConfig, model_path: str) -> int:
    """Memory for the keys and values of `rollout.kv_cache_tokens` on each device of an engine."""
    import torch
    from transformers import AutoConfig

    rollout = config.rollout
    model = AutoConfig.from_pretrained(model_path)
    free = get_device("cpu").free_memory()
    affordable = affordable_tokens(model, getattr(torch, config.model.dtype), free)
    wanted = rollout.kv_cache_tokens or min(2 * rollout.max_batch_size * rollout.max_model_len, affordable)
    # A sequence's last block is not full, and vLLM keeps one block to itself.
    tokens = wanted + (rollout.max_batch_size + 1) * _BLOCK_TOKENS
    return tokens * token_bytes(model, getattr(torch, config.model.dtype)) // rollout.tensor_parallel_size


def _environment(config: RunConfig, index: int) -> dict[str, str]:
    """Variables that vLLM reads when it is imported."""
    rollout = config.rollout
    device = get_device(config.trainer.device)
    if device.type == "cpu":
        # Threads are limited in number, not bound to cores: several engines and the trainer share them.
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    first = 1 + index * rollout.tensor_parallel_size
    places = [(first + i) % device.count() for i in range(rollout.tensor_parallel_size)]
    return {device.visible_devices: ",".join(str(place) for place in places)}
