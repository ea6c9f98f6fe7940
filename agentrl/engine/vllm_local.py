"""vLLM's AsyncLLM in this process, its core and workers in processes below it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from agentrl.ascend import ENGINE_ENVIRONMENT
from agentrl.config import RunConfig
from agentrl.device import Device, get_device
from agentrl.engine.kv_cache import affordable_tokens, token_bytes
from agentrl.engine.placement import engine_places
from agentrl.engine.stop_text import load_decode
from agentrl.engine.vllm_engine import VllmAnswer, VllmCounters, VllmEngine, sampling_parameters
from agentrl.engine.vllm_plugin import WEIGHT_TRANSFER, WORKER_EXTENSION
from agentrl.lora import adapter_shapes
from agentrl.record import EngineDied, EngineError, GuideError
from agentrl.record.protocols import GenerateRequest, PauseMode

T = TypeVar("T")

_WORKER_ERROR = re.compile(r"Worker failed with error '(.*)', please check the stack trace", re.DOTALL)
_OLDEST = (0, 23)
_TESTED = "is tested with 0.31.0 and 0.32.0"
_BATCH_TOKENS = 8192
_BLOCK_TOKENS = 128
"""Tokens of a block of vLLM's cache on CPU, the largest of its defaults: caches are rounded up to it."""


class LocalVllm:
    """Implements `vllm_engine.VllmClient` on a running `AsyncLLM`."""

    def __init__(self, llm: Any, counters: VllmCounters) -> None:
        self._llm = llm
        self._counters = counters

    async def start(self) -> None:
        """What has to be done before the first request."""
        return

    async def generate(self, request: GenerateRequest) -> VllmAnswer:
        try:
            return await self._ask(self._generate(request))
        except EngineError as error:
            if request.json_schema and _found_fault(error.__cause__):
                raise GuideError(f"vLLM does not support the JSON schema: {error.__cause__}") from error
            raise

    async def _generate(self, request: GenerateRequest) -> VllmAnswer:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        own = sampling_parameters(request)
        if request.json_schema:
            own["structured_outputs"] = StructuredOutputsParams(**own["structured_outputs"])
        parameters = SamplingParams(**own, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY)
        prompt = {"prompt_token_ids": request.token_ids.tolist()}
        output: Any = None
        lora = self._lora_request()
        async for last in self._llm.generate(prompt, parameters, request.request_id, lora_request=lora):
            output = last
        if output is None:
            raise EngineError(f"vLLM ended request {request.request_id} without an answer")
        (sampled,) = output.outputs
        logprobs: Any = ()
        if sampled.token_ids and sampled.logprobs is not None:
            # The sampled token comes first at every position.
            logprobs = np.asarray(sampled.logprobs.logprobs)[np.asarray(sampled.logprobs.start_indices)]
        reported = getattr(sampled, "weight_versions", None) or ()  # releases before 0.32 have none
        spans = [(span.start, span.end, span.version) for span in reported]
        return VllmAnswer(sampled.token_ids, logprobs, spans, sampled.finish_reason)

    def _lora_request(self) -> Any:
        """The adapter that requests go through, if any."""
        return None

    async def abort(self, request_ids: list[str]) -> None:
        await self._ask(self._llm.abort(request_ids))

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        await self._ask(self._llm.pause_generation(mode=mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        await self._ask(self._llm.resume_generation())

    async def sleep(self, level: int) -> None:
        await self._ask(self._llm.sleep(level=level))

    async def wake_up(self) -> None:
        await self._ask(self._llm.wake_up())

    async def init_weight_transfer(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._ask(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(info)))

    async def start_weight_update(self) -> None:
        await self._ask(self._llm.start_weight_update())

    async def update_weights(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._ask(self._llm.update_weights(WeightTransferUpdateRequest(info)))

    async def finish_weight_update(self, version: str) -> None:
        await self._ask(self._llm.finish_weight_update(version))

    async def set_version(self, version: str) -> None:
        await self._ask(self._llm.update_weight_version(version))

    async def reset_prefix_cache(self) -> None:
        await self._ask(self._llm.reset_prefix_cache(reset_running_requests=True))

    async def weight_checksums(self) -> list[dict[str, str]]:
        return await self._ask(self._llm.compute_weight_checksums())

    async def check_health(self) -> None:
        await self._ask(self._llm.check_health())

    async def counters(self) -> VllmCounters:
        if self._llm.errored:
            raise EngineDied(f"vLLM has failed: {self._llm.dead_error}")
        return self._counters

    async def close(self) -> None:
        await asyncio.to_thread(self._llm.shutdown)

    async def _ask(self, call: Awaitable[T]) -> T:
        """What an error of vLLM's means for the run."""
        try:
            return await call
        except EngineError:
            raise
        except Exception as error:
            from vllm.v1.engine.exceptions import EngineDeadError

            if isinstance(error, EngineDeadError) or self._llm.errored:
                raise EngineDied(f"vLLM has failed: {error}") from error
            worker = _WORKER_ERROR.search(str(error))
            raise EngineError(f"vLLM: {worker[1] if worker else f'{type(error).__name__}: {error}'}") from error


async def start_vllm_engine(config: RunConfig, model_path: str, index: int, scratch: Path) -> VllmEngine:
    """Starts vLLM for one engine of a run, on its own devices.

    Args:
        scratch: a folder for files while it runs, which its owner removes.

    Raises:
        EngineError: vLLM is not installed, too old, or does not know an argument of `rollout.engine_args`.
    """
    device = get_device(config.trainer.device)
    os.environ.update(_environment(device, config.rollout.tensor_parallel_size, index))
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise EngineError(
            f"rollout.engine = vllm, but vLLM can't be imported ({error}): docs/engines.md says how to install it"
        ) from error
    _check_release(config)
    counters = VllmCounters()
    own = await asyncio.to_thread(_arguments, config, model_path, device)
    if reports_versions():
        own["weight_transfer_config"] = {"backend": WEIGHT_TRANSFER}
    else:
        own["worker_extension_cls"] = WORKER_EXTENSION
    try:
        arguments = AsyncEngineArgs(**{**own, **config.rollout.engine_args})
    except TypeError as error:
        raise EngineError(f"rollout.engine_args: {error}") from error
    llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[_stat_logger(counters)])
    client = LocalVllm(llm, counters)
    workers = config.rollout.tensor_parallel_size
    if config.publishes_adapters:
        from agentrl.engine.vllm_adapters import AdapterVllm

        place = (device if config.weight_transport == "collective" else get_device("cpu")).torch_device()
        shapes = await asyncio.to_thread(adapter_shapes, config.model, model_path)
        folder = scratch / f"adapter-{index}"
        client, workers = AdapterVllm(llm, counters, config.model, shapes, folder, place), 1
    elif not reports_versions():
        from agentrl.engine.vllm_unversioned import UnversionedVllm

        client = UnversionedVllm(llm, counters, await asyncio.to_thread(load_decode, model_path))
    engine = VllmEngine(
        client,
        max_model_len=config.rollout.max_model_len,
        vocabulary=int(llm.model_config.get_vocab_size()),
        keeps_cache=config.rollout.kv_on_update == "keep",
        workers=workers,
    )
    try:
        await client.start()
        await engine.start()
    except BaseException:
        with contextlib.suppress(EngineError):
            await engine.close()
        raise
    return engine


def _found_fault(cause: BaseException | None) -> bool:
    """Whether vLLM refused a request for what it asks. All but its schema was checked before."""
    from vllm.exceptions import VLLMValidationError

    return isinstance(cause, VLLMValidationError | ValueError)


def reports_versions() -> bool:
    """Whether the installed vLLM says which weights sampled a token, as releases from 0.32 on do."""
    from vllm.outputs import CompletionOutput

    return "weight_versions" in CompletionOutput.__dataclass_fields__


def _check_release(config: RunConfig) -> None:
    """Raises EngineError if the installed vLLM is too old for agentrl, or for what the config asks of it."""
    import vllm

    if vllm.__version_tuple__[:2] < _OLDEST:
        raise EngineError(f"vLLM {vllm.__version__} is too old: agentrl needs 0.23, and {_TESTED}")
    if reports_versions():
        return
    if config.publishes_adapters:
        raise EngineError(f"model.lora_merge is false, which needs vLLM 0.32 or newer: there is {vllm.__version__}")
    if config.rollout.kv_on_update == "keep":
        raise EngineError(
            f"rollout.kv_on_update is keep, but vLLM {vllm.__version__} does not report which weights sampled a token, "
            "so an answer has to be interrupted for an update: set it to recompute, or install vLLM 0.32 or newer"
        )


def _arguments(config: RunConfig, model_path: str, device: Device) -> dict[str, Any]:
    """What agentrl itself asks of vLLM; `names.ENGINE_ARGUMENTS` keeps the user from asking for it too."""
    rollout = config.rollout
    own: dict[str, Any] = {
        "model": model_path,
        "dtype": config.model.dtype,
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.max_batch_size,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "logprobs_mode": "processed_logprobs",
        # Not the model's own generation_config: what is sampled from is what the run's config says.
        "generation_config": "vllm",
        # xgrammar alone lets a guided answer end with the stop tokens of its request. Whitespace could go on until the
        # budget is used up.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "seed": config.data.seed,
        "disable_log_stats": False,
    }
    if device.type == "cpu":
        own["enforce_eager"] = True
        # In a step that computes part of a prompt, vLLM takes back a request's random number, which the generators of a
        # CPU can't: it would fail. So prompts are computed whole.
        own["enable_chunked_prefill"] = False
        own["max_num_batched_tokens"] = max(rollout.max_model_len, _BATCH_TOKENS)
    if config.publishes_adapters:
        from agentrl.engine.vllm_adapters import adapter_arguments

        own |= adapter_arguments(config.model)
    if rollout.kv_cache_tokens is not None or device.type == "cpu":
        own["kv_cache_memory_bytes"] = _kv_cache_bytes(config, model_path)
    return own


def _kv_cache_bytes(config: RunConfig, model_path: str) -> int:
    """Memory for the keys and values of `rollout.kv_cache_tokens` on each device of an engine."""
    import torch
    from transformers import AutoConfig

    rollout = config.rollout
    model, dtype = AutoConfig.from_pretrained(model_path), getattr(torch, config.model.dtype)
    affordable = affordable_tokens(model, dtype, get_device("cpu").free_memory())
    wanted = rollout.kv_cache_tokens or min(2 * rollout.max_batch_size * rollout.max_model_len, affordable)
    # A sequence's last block is not full, and vLLM keeps one block to itself.
    tokens = wanted + (rollout.max_batch_size + 1) * _BLOCK_TOKENS
    return tokens * token_bytes(model, dtype) // rollout.tensor_parallel_size


def _environment(device: Device, devices: int, index: int) -> Mapping[str, str]:
    """Variables that vLLM reads when it is imported.

    Args:
        devices: of each engine.
    """
    if device.type == "cpu":
        # Threads are limited in number, not bound to cores: several engines and the trainer share them.
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    places = engine_places(device, devices, index)
    return {**device.environment(places), **(ENGINE_ENVIRONMENT if device.type == "npu" else {})}


def _stat_logger(counters: VllmCounters) -> Any:
    """A class that vLLM makes one of and tells after each step what it did."""
    from vllm.v1.metrics.loggers import StatLoggerBase

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

    return Counting
