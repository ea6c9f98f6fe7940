"""SGLang's HTTP server as an engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.config import RunConfig
from agentrl.engine import sglang_payloads as payloads
from agentrl.engine.busy_clock import BusyClock
from agentrl.engine.checkpoint import checkpoint_shapes
from agentrl.engine.continuation import Part, continued, either
from agentrl.engine.request_checks import check_request
from agentrl.engine.sglang_server import ANSWER_SECONDS, SglangServer, check_server, healthy, start_server
from agentrl.engine.stop_text import Decode, StopText, load_decode
from agentrl.record import EngineDied, EngineError, GuideError, WeightTransferError
from agentrl.record.protocols import Bucket, EngineStats, GenerateRequest, GenerateResult, PauseMode, WeightGroup
from agentrl.weights.bucket import checksum
from agentrl.weights.sources import BucketSource

_HEALTH_SECONDS = 1.0
_MOST_FAILURES = 3
_ABORT_SECONDS = 5.0
"""How long an aborted request may take to hand out what it has; then it ends with nothing."""
_ABORT_AGAIN_SECONDS = 0.2
_FLUSH_AGAIN_SECONDS = 0.2


@dataclass(eq=False, slots=True)
class _Ticket:
    """A request from its arrival to its result."""

    aborted: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Update:
    """A weight update on its way."""

    names: set[str] = field(default_factory=set)
    next: int = 0
    folder: payloads.UpdateFolder | None = None
    session: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class SglangEngine:
    """Implements `record.protocols.Engine` on a server.

    Pauses put running requests back into the server's queue (`retract`), or with `keeps_cache` hold them where they are
    (`in_place`); either way they go on after an update within the same HTTP call, and the server says which tokens it
    sampled under which weights. Nothing is ever aborted for an update. Requests that come during a pause wait here.

    The log-probs are those after temperature, before top-p and top-k. Seeds decide what is sampled if the server runs
    with `enable_deterministic_inference`.

    Args:
        keeps_cache: leave the keys and values of older weights in use after an update.
        expected: tensors that an update has to bring.
        timeout: seconds for one step of an update.
        workers: processes that hold the weights.
    """

    def __init__(
        self,
        server: SglangServer,
        model_path: str,
        *,
        max_model_len: int,
        vocabulary: int,
        keeps_cache: bool,
        timeout: float,
        expected: Iterable[str] = (),
        workers: int = 1,
    ) -> None:
        self._server = server
        self._model_path = model_path
        self._max_model_len = max_model_len
        self._vocabulary = vocabulary
        self._keeps_cache = keeps_cache
        self._timeout = timeout
        self._expected = frozenset(expected)
        self._workers = workers
        self._version = 0
        self._tickets: dict[str, _Ticket] = {}
        self._admitting, self._running, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for event in (self._admitting, self._running, self._idle):
            event.set()
        self._update: _Update | None = None
        self._group: str | None = None
        self._source = BucketSource()
        self._decode: Decode | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._clock = BusyClock()
        self._generated = self._prompted = self._cached = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        check_request(request, version=self._version, max_model_len=self._max_model_len, vocabulary=self._vocabulary)
        if request.request_id in self._tickets:
            raise EngineError(f"a request {request.request_id} is running already")
        completes_stop = None
        if request.stop:
            completes_stop = StopText(request.stop, await self._decoder()).ends_with
        ticket = self._tickets[request.request_id] = _Ticket()
        try:
            await either(self._admitting, ticket.aborted)
            self._count(1)
            try:
                return await continued(
                    request,
                    lambda part: self._sample(part, ticket),
                    ready=lambda: either(self._running, ticket.aborted),
                    aborted=ticket.aborted.is_set,
                    completes_stop=completes_stop,
                )
            finally:
                self._count(-1)
        finally:
            del self._tickets[request.request_id]

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if request_id in self._tickets:
                self._tickets[request_id].aborted.set()

    async def pause(self, mode: PauseMode = "keep") -> None:
        self._admitting.clear()
        if mode == "wait" and self._running.is_set():
            await self._idle.wait()
        if mode == "abort":
            if not self._running.is_set():
                await self._pause_server("retract")  # requests paused in place would not hear of the abort
            await self.abort(list(self._tickets))
            await self._idle.wait()
        await self._pause_server("in_place" if self._keeps_cache and mode == "keep" else "retract")

    async def resume(self) -> None:
        if self._update is not None:
            raise EngineError("the weights are a mixture, or none: finish an update before the engine goes on")
        await self._server.json("/continue_generation", {"torch_empty_cache": False}, seconds=ANSWER_SECONDS)
        self._clock.resume()
        self._running.set()
        self._admitting.set()

    async def sleep(self) -> None:
        await self.pause("abort")
        await self._server.call("/release_memory_occupation", {}, seconds=self._timeout)

    async def wake(self) -> None:
        await self._server.call("/resume_memory_occupation", {}, seconds=self._timeout)
        await self._give_up_update()
        self._update = _Update()  # without weights it must not go on before an update

    async def join_weight_group(self, group: WeightGroup) -> None:
        old, self._group = self._group, None
        if old is not None:
            # Of a group that broke nobody knows whether it can still be left.
            with contextlib.suppress(WeightTransferError):
                await self._transfer("/destroy_weights_update_group", {"group_name": old})
        await self._transfer("/init_weights_update_group", payloads.group_payload(group), group.timeout)
        self._group = group.name

    async def start_weight_update(self) -> None:
        if not self._clock.paused:
            raise EngineError("pause the engine before a weight update")
        await self._give_up_update()
        self._update = _Update()

    async def update_weights(self, bucket: Bucket) -> None:
        update = self._updating()
        # Several buckets may be on their way; a lock lets them in as they came.
        async with update.turn:
            if bucket.index != update.next:
                raise WeightTransferError(f"bucket {bucket.index} came where bucket {update.next} was due")
            if bucket.segment:
                await self._take_file(update, bucket)
            else:
                await self._take_broadcast(update, bucket)
            update.next += 1
            update.names |= {piece.name for piece in bucket.slices}

    async def finish_weight_update(self, version: int) -> None:
        update = self._updating()
        missing = sorted(self._expected - update.names)
        if missing or not update.names:
            raise WeightTransferError(f"{len(missing)} tensors did not arrive whole: {', '.join(missing[:5])}")
        if update.folder is not None:
            await asyncio.to_thread(update.folder.finish)
            await self._transfer("/update_weights_from_disk", payloads.disk_payload(update.folder.path, version))
            await asyncio.to_thread(update.folder.remove)
        if update.session:
            await self._transfer("/end_weight_update", {})
            update.session = False
            await self._transfer("/update_weight_version", payloads.version_payload(version))
        if not self._keeps_cache:
            await self._flush()
        self._version = version
        self._update = None

    async def stats(self) -> EngineStats:
        running = self._clock.in_flight if self._running.is_set() else 0
        return EngineStats(
            self._version,
            self._generated,
            self._prompted,
            self._clock.busy_seconds,
            self._clock.paused_seconds,
            running,
            len(self._tickets) - running,
            self._cached,
            workers=self._workers,
        )

    async def watch(self) -> None:
        """Asks the server how it is until it is gone.

        Raises:
            EngineDied: it is, or it has other weights than it was given.
            EngineError: it was closed.
        """
        failures, problem = 0, ""
        while failures < _MOST_FAILURES:
            if self._closed:
                raise EngineError("the engine is closed")
            process, version, updating = self._server.process, self._version, self._update is not None
            if process is not None and process.returncode is not None:
                raise EngineDied(f"SGLang has ended with status {process.returncode}")
            try:
                # Not /health: it asks for a token, which nobody gets during a pause.
                found = (await self._server.json("/model_info", seconds=ANSWER_SECONDS)).get("weight_version")
            except EngineDied:
                if self._closed:
                    continue
                raise
            except EngineError as error:
                failures, problem = failures + 1, str(error)
            else:
                unchanged = not updating and self._update is None and version == self._version
                strange = unchanged and found != str(version)
                failures = failures + 1 if strange else 0
                problem = f"{self._server.url} has weights {found!r} and was given {version}: was it started anew?"
            await asyncio.sleep(_HEALTH_SECONDS)
        raise EngineDied(problem)

    async def close(self) -> None:
        """Ends what this process started; calls in flight fail."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._update is not None and self._update.folder is not None:
            self._update.folder.remove()
        await self._server.close()

    async def _sample(self, request: GenerateRequest, ticket: _Ticket) -> Part:
        """One call of the server, until it ends or the request is aborted."""
        if ticket.aborted.is_set():
            return Part.empty()
        rid = uuid.uuid4().hex
        # Whatever else could be wrong with a request was checked before.
        refusal = GuideError if request.json_schema else EngineError
        body = payloads.generate_payload(request, rid)
        call = asyncio.create_task(self._server.json("/generate", body, refusal=refusal))
        aborted = asyncio.create_task(ticket.aborted.wait())
        try:
            await asyncio.wait((call, aborted), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                await self._end(rid, call)
            if not call.done():
                return Part.empty()
            answer = call.result()
            part = payloads.read_answer(request, answer)
            self._generated += len(part.token_ids)
            self._prompted += int(answer["meta_info"].get("prompt_tokens") or 0)
            self._cached += int(answer["meta_info"].get("cached_tokens") or 0)
            return part
        finally:
            aborted.cancel()
            if not call.done():
                call.cancel()
                self._spawn(self._forget(rid))

    async def _end(self, rid: str, call: asyncio.Task[Any]) -> None:
        """Has the server end a request, and waits for what it has of it."""
        until = time.perf_counter() + _ABORT_SECONDS
        while not call.done() and time.perf_counter() < until:
            # Again and again: the server does not know a request that it has not read yet.
            await self._server.call("/abort_request", {"rid": rid}, seconds=ANSWER_SECONDS)
            await asyncio.wait((call,), timeout=_ABORT_AGAIN_SECONDS)

    async def _forget(self, rid: str) -> None:
        """Nobody waits for that request any more."""
        with contextlib.suppress(EngineError):  # `watch` says so if the server is gone
            await self._server.call("/abort_request", {"rid": rid}, seconds=ANSWER_SECONDS)

    async def _pause_server(self, mode: str) -> None:
        await self._server.json("/pause_generation", {"mode": mode}, seconds=ANSWER_SECONDS)
        self._running.clear()
        self._clock.pause()

    async def _take_file(self, update: _Update, bucket: Bucket) -> None:
        file = Path(bucket.segment)
        if file.suffix != ".safetensors":
            raise WeightTransferError(_NO_SHM)
        if update.folder is None:
            update.folder = await asyncio.to_thread(payloads.UpdateFolder, file.parent, self._model_path)
        try:
            await asyncio.to_thread(update.folder.add, bucket)
        except OSError as error:
            raise WeightTransferError(f"bucket {bucket.index}: {error}") from error
        found = await asyncio.to_thread(lambda: checksum(self._source.read(bucket)))
        if found != bucket.checksum:
            raise WeightTransferError(f"bucket {bucket.index}: checksum {found:016x}, sent {bucket.checksum:016x}")

    async def _take_broadcast(self, update: _Update, bucket: Bucket) -> None:
        if self._group is None:
            raise WeightTransferError(f"bucket {bucket.index} comes over a process group that this engine is not in")
        body = payloads.bucket_payload(bucket, self._group)
        if not update.session:
            await self._transfer("/begin_weight_update", {})
            update.session = True
        await self._transfer("/update_weights_from_distributed", body)

    async def _give_up_update(self) -> None:
        """Ends what a failed update left open."""
        update = self._update
        if update is not None and update.folder is not None:
            await asyncio.to_thread(update.folder.remove)
        if update is not None and update.session:
            with contextlib.suppress(WeightTransferError):
                await self._transfer("/end_weight_update", {})

    async def _flush(self) -> None:
        """Drops the keys and values of older weights; the server refuses while it still puts requests aside."""
        deadline = time.perf_counter() + self._timeout / 2
        while True:
            left = max(deadline - time.perf_counter(), 0.1)
            try:
                await self._server.call("/flush_cache", {}, seconds=left)
                return
            except EngineDied:
                raise
            except EngineError as error:
                if time.perf_counter() + _FLUSH_AGAIN_SECONDS > deadline:
                    raise WeightTransferError(f"the cache of the old weights is still there: {error}") from error
            await asyncio.sleep(_FLUSH_AGAIN_SECONDS)

    async def _transfer(self, path: str, body: dict[str, Any], seconds: float | None = None) -> None:
        """A step of an update; what the server says of it is a typed error."""
        try:
            await self._server.json(path, body, seconds=seconds or self._timeout)
        except EngineDied:
            raise
        except EngineError as error:
            raise WeightTransferError(str(error)) from error

    def _updating(self) -> _Update:
        if self._update is None:
            raise EngineError("call start_weight_update before sending weights")
        return self._update

    async def _decoder(self) -> Decode:
        if self._decode is None:
            self._decode = await asyncio.to_thread(load_decode, self._model_path)
        if self._decode is None:
            raise EngineError(f"there is no tokenizer in {self._model_path} to find stop texts with")
        return self._decode

    def _count(self, change: int) -> None:
        self._clock.count(change)
        if self._clock.in_flight:
            self._idle.clear()
        else:
            self._idle.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


_NO_SHM = (
    "SGLang's server takes no weights from shared memory segments: set weights.transport to disk (its files lie in "
    "shared memory by default) or collective"
)


async def start_sglang_engine(config: RunConfig, model_path: str, index: int) -> SglangEngine:
    """The engine of that index: a server of `rollout.engine_urls`, or one started here.

    Raises:
        EngineError: SGLang is not installed, did not start, or was started without what training needs.
    """
    rollout = config.rollout
    if rollout.engine_urls:
        server = SglangServer(rollout.engine_urls[index])
    else:
        server = await start_server(config, model_path, index)
    try:
        if server.process is not None:
            await healthy(server, server.process)
        workers = check_server(config, server.url, await server.json("/server_info", seconds=ANSWER_SECONDS))
        engine = SglangEngine(
            server,
            model_path,
            max_model_len=rollout.max_model_len,
            vocabulary=await asyncio.to_thread(_vocabulary, model_path),
            keeps_cache=rollout.kv_on_update == "keep",
            timeout=config.weights.timeout,
            expected=await asyncio.to_thread(checkpoint_shapes, model_path),
            workers=workers,
        )
        await engine.resume()  # whoever used the server before may have left it paused
        await server.json("/update_weight_version", payloads.version_payload(0), seconds=ANSWER_SECONDS)
    except BaseException:
        await server.close()
        raise
    return engine


def _vocabulary(model_path: str) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model_path).get_text_config().vocab_size)
