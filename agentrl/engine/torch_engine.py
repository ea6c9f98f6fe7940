"""The torch engine: continuous batching over any Hugging Face causal LM, on cpu, cuda or npu."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

from agentrl.engine.attention import ENGINE_ATTENTION
from agentrl.engine.batch import ContinuousBatch
from agentrl.engine.fast_modules import FastModules
from agentrl.engine.guide import Guides
from agentrl.engine.kv_cache import default_tokens
from agentrl.engine.request_checks import check_request
from agentrl.engine.sequence import Sequence
from agentrl.engine.stop_text import Decode, StopText, decode_with, load_tokenizer
from agentrl.record import EngineDied, EngineError, GuideError
from agentrl.record.protocols import Bucket, EngineStats, GenerateRequest, GenerateResult, PauseMode, WeightGroup
from agentrl.weights.receiver import ParameterReceiver
from agentrl.weights.sources import BucketSource

T = TypeVar("T")
KvOnUpdate = Literal["recompute", "keep"]
log = logging.getLogger(__name__)


class TorchEngine:
    """Implements `record.protocols.Engine`.

    All computing happens in one thread of its own; the event loop only hands work over, so it always answers.
    At a weight update running requests stop after their current token, and go on under the new weights with their
    keys and values computed again: no token is ever computed from the cache of older weights, unless `kv_on_update`
    is `keep`.

    Args:
        model: a causal LM; its attention implementation is replaced.
        kv_cache_tokens: bound on the tokens whose keys and values are held, of running sequences and for reuse
            together; by default twice what `max_batch_size` sequences of `max_model_len` need, or what fits into part
            of the free memory, if that is less.
        kv_on_update: `keep` leaves the keys and values of older weights in use after an update.
        decode: text of token ids, special tokens included; without it requests with stop texts are refused.
        tokenizer: transformers' tokenizer, whose texts JSON schemas are about; without it requests with a schema are
            refused.
        version: policy version of the weights it has now.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_batch_size: int,
        max_model_len: int,
        kv_cache_tokens: int | None = None,
        kv_on_update: KvOnUpdate = "recompute",
        decode: Decode | None = None,
        tokenizer: Any = None,
        version: int = 0,
    ) -> None:
        _check_attention(model.config, max_model_len)
        if kv_cache_tokens is not None and kv_cache_tokens < max_model_len:
            raise EngineError(
                f"kv_cache_tokens is {kv_cache_tokens}: a sequence of rollout.max_model_len {max_model_len} "
                "does not fit"
            )
        if kv_cache_tokens is None:
            kv_cache_tokens = default_tokens(model, max_batch_size, max_model_len)
        model.set_attn_implementation(ENGINE_ATTENTION)
        model.eval().requires_grad_(False)
        self.max_model_len = max_model_len
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._decode = decode
        self._guides = None if tokenizer is None else Guides(tokenizer, self._vocabulary)
        self._batch = ContinuousBatch(
            model,
            max_batch_size=max_batch_size,
            max_model_len=max_model_len,
            kv_cache_tokens=kv_cache_tokens,
        )
        self._model = model
        self._device = model.device
        self._kv_on_update = kv_on_update
        self._fast_modules = FastModules(model)
        self._receiver = ParameterReceiver(dict(model.named_parameters()), BucketSource(model.device))
        self._version = version
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._waiting_callers: set[asyncio.Future[Any]] = set()
        self._closing = self._updating = self._draining = False
        self._held: list[Sequence] = []
        self._drained: list[Callable[[], None]] = []
        self._ended = ""
        self._failure: Exception | None = None
        self._busy = self._paused_seconds = 0.0
        self._paused_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._check(request)
        guide = await self._guides.guide(request) if self._guides and request.json_schema else None
        future: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
        stop_text = StopText(request.stop, self._decode) if request.stop and self._decode else None

        def deliver(outcome: GenerateResult | GuideError) -> None:
            _settle(future, future.set_exception if isinstance(outcome, GuideError) else future.set_result, outcome)

        sequence = Sequence(request, deliver, stop_text, guide)
        if request.json_schema and guide is None:
            sequence.finish("abort")
            return await future
        self._submit(lambda: (self._held if self._draining else self._batch.waiting).append(sequence), future)
        try:
            return await future
        except asyncio.CancelledError:
            with contextlib.suppress(EngineError):
                self._submit(lambda: self._abort([request.request_id]))
            raise

    async def abort(self, request_ids: list[str]) -> None:
        if self._guides is not None:
            self._guides.abort(request_ids)
        await self._call(lambda: self._abort(request_ids))

    async def pause(self, mode: PauseMode = "keep") -> None:
        if mode == "wait":
            drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def drain() -> None:
                if self._paused_since is not None:  # since an update failed: what is frozen can't end
                    _settle(drained, drained.set_result, None)
                    return
                self._draining = True
                self._drained.append(lambda: _settle(drained, drained.set_result, None))

            self._submit(drain, drained)
            await drained

        if mode == "abort" and self._guides is not None:
            self._guides.abort()

        def pause() -> None:
            if mode == "abort":
                self._abort([sequence.request.request_id for sequence in self._all_sequences()])
            self._paused_since = self._paused_since or time.perf_counter()
            self._take_held()

        await self._call(pause)

    async def resume(self) -> None:
        def resume() -> None:
            if self._paused_since is not None:
                self._paused_seconds += time.perf_counter() - self._paused_since
            self._paused_since = None
            self._take_held()

        await self._call(resume)

    async def sleep(self) -> None:
        await self.pause("abort")

        def sleep() -> None:
            self._batch.preempt()
            self._model.to("cpu")

        await self._call(sleep)

    async def wake(self) -> None:
        await self._call(lambda: self._model.to(self._device))

    async def join_weight_group(self, group: WeightGroup) -> None:
        await self._call(lambda: self._receiver.source.join(group))

    async def start_weight_update(self) -> None:
        def start() -> None:
            if self._paused_since is None:
                raise EngineError("pause the engine before a weight update")
            self._updating = True
            self._receiver.start()

        await self._call(start)

    async def update_weights(self, bucket: Bucket) -> None:
        def update() -> None:
            self._check_updating()
            self._receiver.receive(bucket)

        await self._call(update)

    async def finish_weight_update(self, version: int) -> None:
        def finish() -> None:
            self._check_updating()
            self._receiver.finish()
            self._fast_modules.refresh()
            if self._kv_on_update == "recompute":
                self._batch.preempt()
            self._version = version
            self._updating = False

        await self._call(finish)

    async def stats(self) -> EngineStats:
        with self._wake:
            self._check_alive()
        return EngineStats(
            self._version,
            self._batch.generated_tokens,
            self._batch.prompt_tokens,
            self._busy,
            self._paused_seconds,
            len(self._batch.running),
            len(self._batch.waiting),
            self._batch.cached_tokens,
        )

    async def watch(self) -> None:
        """Waits for the end of the engine.

        Raises:
            EngineDied: it failed.
            EngineError: it was closed.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._submit(lambda: None, future)
        await future

    async def close(self) -> None:
        """Stops the computing thread; requests still in flight are aborted, later ones refused."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, 5.0)
        if self._guides is not None:
            self._guides.close()

    def _check(self, request: GenerateRequest) -> None:
        with self._wake:
            self._check_alive()
        check_request(request, version=self._version, max_model_len=self.max_model_len, vocabulary=self._vocabulary)
        if request.stop and self._decode is None:
            raise EngineError(f"the engine has no tokenizer to find the stop texts {request.stop} with")
        if request.json_schema and self._guides is None:
            raise GuideError("the engine has no tokenizer to guide answers by a JSON schema with")

    def _submit(self, command: Callable[[], None], caller: asyncio.Future[Any] | None = None) -> None:
        """Hands a command to the computing thread; `caller` fails if that thread ends before it is settled."""
        with self._wake:
            self._check_alive()
            self._commands.append(command)
            if caller is not None:
                self._waiting_callers.add(caller)
                caller.add_done_callback(self._forget)
            self._wake.notify()

    def _forget(self, caller: asyncio.Future[Any]) -> None:
        with self._wake:
            self._waiting_callers.discard(caller)

    async def _call(self, function: Callable[[], T]) -> T:
        """Runs `function` in the computing thread, between two steps."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def command() -> None:
            try:
                result = function()
            except Exception as error:  # noqa: BLE001  handed to the caller
                _settle(future, future.set_exception, error)
            else:
                _settle(future, future.set_result, result)

        self._submit(command, future)
        return await future

    def _check_alive(self) -> None:
        if self._ended:
            raise self._end_error()

    def _end_error(self) -> EngineError:
        if self._failure is None:
            return EngineError(self._ended)
        error = EngineDied(self._ended)
        error.__cause__ = self._failure
        return error

    def _check_updating(self) -> None:
        if not self._updating:
            raise EngineError("call start_weight_update before sending weights")

    def _abort(self, request_ids: list[str]) -> None:
        held = [sequence for sequence in self._held if sequence.request.request_id in request_ids]
        self._held = [sequence for sequence in self._held if sequence not in held]
        for sequence in (*self._batch.remove(set(request_ids)), *held):
            sequence.finish("abort")

    def _take_held(self) -> None:
        """What came while the engine drained may wait with the others again."""
        self._draining = False
        self._batch.waiting.extend(self._held)
        self._held = []

    def _all_sequences(self) -> list[Sequence]:
        return [*self._batch.waiting, *self._batch.running, *self._held]

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                started = time.perf_counter()
                self._batch.step(self._version)
                self._busy += time.perf_counter() - started
        except Exception as error:
            log.exception("the engine has failed")
            self._failure = error
        else:
            for sequence in self._all_sequences():
                sequence.finish("abort")
        with self._wake:
            self._ended = f"the engine has failed: {self._failure!r}" if self._failure else "the engine is closed"
            callers = list(self._waiting_callers)
        for caller in callers:
            _settle(caller, caller.set_exception, self._end_error())

    def _wait_for_work(self) -> bool:
        """Runs pending commands, sleeps while there is nothing to compute; False when closing."""
        while True:
            while self._commands:
                self._commands.popleft()()
            with self._wake:
                if self._closing:
                    return False
                if self._commands:
                    continue
                stopped = self._paused_since is not None or self._updating
                if not stopped and (self._batch.waiting or self._batch.running):
                    return True
                if not (self._batch.waiting or self._batch.running) and self._drained:
                    for settle in self._drained:
                        settle()
                    self._drained = []
                self._wake.wait()


def load_torch_engine(
    path: str,
    *,
    dtype: str,
    device: torch.device,
    max_batch_size: int,
    max_model_len: int,
    kv_cache_tokens: int | None = None,
    kv_on_update: KvOnUpdate = "recompute",
) -> TorchEngine:
    """An engine for the model in `path` (directory or hub id), with its tokenizer if it has one.

    Raises:
        OSError: no model there.
        EngineError: a model whose attention the torch engine can't do.
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    tokenizer = load_tokenizer(path)
    return TorchEngine(
        model.to(device),
        max_batch_size=max_batch_size,
        max_model_len=max_model_len,
        kv_cache_tokens=kv_cache_tokens,
        kv_on_update=kv_on_update,
        decode=None if tokenizer is None else decode_with(tokenizer),
        tokenizer=tokenizer,
    )


def _check_attention(config: Any, max_model_len: int) -> None:
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise EngineError(
            "the torch engine has no soft-capped attention: choose a model without attn_logit_softcapping"
        )
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if layer_types - {"full_attention", "sliding_attention"}:
        raise EngineError(
            f"the torch engine has no {', '.join(sorted(layer_types))} layers: choose a model with full attention"
        )
    if "sliding_attention" in layer_types and window is not None and window < max_model_len:
        raise EngineError(
            f"the model's attention window of {window} is shorter than rollout.max_model_len {max_model_len}: "
            f"set rollout.max_model_len to {window} or less"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_model_len > positions:
        raise EngineError(
            f"rollout.max_model_len is {max_model_len}, but the model has {positions} positions: set it to "
            f"{positions} or less"
        )


def _settle(future: asyncio.Future[Any], setter: Callable[[Any], None], value: Any) -> None:
    """Ends a caller's wait from the computing thread, unless it has ended already."""

    def settle() -> None:
        if not future.done():
            setter(value)

    # A loop that is closed has nobody waiting any more.
    with contextlib.suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(settle)
