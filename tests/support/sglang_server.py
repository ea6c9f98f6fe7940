"""A server that speaks SGLang's protocol as 0.5.23 does, without a model: what it samples is a function of seed,
position and weights, and its weights are what updates really brought.

Each token's log-prob is that of the weights which sampled it, whatever version the server reports for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

EOS = 96
CHUNK = 4
"""Tokens after which a request that is put aside has reported what it has."""


def token_at(seed: int, position: int) -> int:
    """What any weights sample at a position of the sequence; never EOS."""
    return (seed * 31 + position * 17 + (position * position) % 13) % EOS


def logprob_of(weight: float, token: int) -> float:
    return -(weight + 1) - token / 128


@dataclass(eq=False)
class Running:
    """A request in the scheduler."""

    rid: str
    prompt: list[int]
    sampling: dict[str, Any]
    done: asyncio.Future[dict[str, Any]]
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)
    retractions: int = 0
    to_finish: bool = False


class ProtocolServer:
    """Serves on a port of its own. Tests change its attributes to have it misbehave.

    Attributes:
        calls: bodies of all calls, by path.
        failures: status and text to answer the next calls of a path with.
        delays: seconds that calls of a path take.
        mangle: changes answers of `/generate` before they are sent.
    """

    def __init__(self, arguments: dict[str, Any] | None = None, *, step_seconds: float = 0.002) -> None:
        self.info = {
            "max_req_input_len": 4096,
            "tp_size": 1,
            "dp_size": 1,
            "disable_overlap_schedule": True,
            "skip_tokenizer_init": False,
            **(arguments or {}),
        }
        self.step_seconds = step_seconds
        self.calls: dict[str, list[Any]] = {}
        self.failures: dict[str, deque[tuple[int, str]]] = {}
        self.delays: dict[str, float] = {}
        self.mangle: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.version = str(self.info.get("weight_version", "default"))
        self.weights: dict[str, Any] = {}
        self.running: list[Running] = []
        self.waiting: list[Running] = []
        self.flushes = 0
        self.asleep = False
        self.aborts = 0
        self.url = ""
        self._is_pause = self._engine_paused = False
        self._unpaused = asyncio.Condition()
        self._session = False
        self._groups: dict[str, Any] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=2**26, middlewares=[self._misbehave])
        for path, handler in {
            "/generate": self._generate,
            "/abort_request": self._abort_request,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/update_weights_from_disk": self._update_from_disk,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_distributed": self._update_from_distributed,
            "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
            "/update_weight_version": self._update_version,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
        }.items():
            app.router.add_post(path, handler)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/health_generate", self._health)
        # A client that hangs up ends its request.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._tasks.append(asyncio.create_task(self._schedule()))

    async def die(self) -> None:
        """As when its process ends: connections break, nobody listens any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._runner is not None:
            await self._runner.cleanup()

    # What the scheduler does.

    async def _schedule(self) -> None:
        while True:
            await asyncio.sleep(self.step_seconds)
            if self._engine_paused or self.asleep:
                continue
            self.running += self.waiting
            self.waiting = []
            for request in list(self.running):
                self._step(request)

    def _step(self, request: Running) -> None:
        sampling = request.sampling
        if request.to_finish:
            return self._finish(request, {"type": "abort", "message": "AbortReq"})
        seed = sampling.get("sampling_seed")
        token = token_at(42 if seed is None else seed, len(request.prompt) + len(request.output))
        if request.sampling.get("custom_eos_at") == len(request.output):
            token = EOS
        request.output.append(token)
        request.logprobs.append(logprob_of(self.weight, token))
        stops = set(sampling.get("stop_token_ids") or ())
        if not sampling.get("ignore_eos") and (token in stops or token == EOS):
            return self._finish(request, {"type": "stop", "matched": token})
        if len(request.output) >= sampling["max_new_tokens"]:
            return self._finish(request, {"type": "length", "length": len(request.output)})
        return None

    @property
    def weight(self) -> float:
        tensor = self.weights.get("weight")
        return 0.0 if tensor is None else float(tensor.reshape(-1)[0])

    def _finish(self, request: Running, reason: dict[str, Any], count: int | None = None) -> None:
        self.running = [other for other in self.running if other is not request]
        self.waiting = [other for other in self.waiting if other is not request]
        count = len(request.output) if count is None else count
        if not request.done.done():
            request.done.set_result(self._answer(request, reason, count))

    def _answer(self, request: Running, reason: dict[str, Any], count: int) -> dict[str, Any]:
        spans: list[dict[str, Any]] = []
        for version, end in [*request.events, (self.version, len(request.output))]:
            end = min(end, count)
            if spans and end <= spans[-1]["end"]:
                continue
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = end
                continue
            spans.append({"version": version, "start": spans[-1]["end"] if spans else 0, "end": end})
        return {
            "text": "",
            "output_ids": request.output[:count],
            "meta_info": {
                "id": request.rid,
                "finish_reason": reason,
                "prompt_tokens": len(request.prompt),
                "completion_tokens": count,
                "cached_tokens": 0,
                "num_retractions": request.retractions,
                "weight_version": self.version,
                "weight_versions": spans,
                "output_token_logprobs": [
                    [logprob, token, None]
                    for logprob, token in zip(request.logprobs[:count], request.output[:count], strict=True)
                ],
            },
        }

    def _change_version(self, new: str | None) -> None:
        if new is None or new == self.version:
            return
        for request in (*self.running, *self.waiting):
            if request.output:
                request.events.append((self.version, len(request.output)))
        self.version = new

    def _abort(self, rid: str) -> None:
        for request in [request for request in self.waiting if request.rid.startswith(rid)]:
            self.aborts += 1
            # What it has not reported yet is lost.
            count = len(request.output) // CHUNK * CHUNK
            self._finish(request, {"type": "abort", "message": "Abort in waiting queue"}, count)
        for request in self.running:
            if request.rid.startswith(rid):
                self.aborts += 1
                request.to_finish = True

    # What it answers.

    @web.middleware
    async def _misbehave(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.calls.setdefault(request.path, []).append(body)
        await asyncio.sleep(self.delays.get(request.path, 0))
        failures = self.failures.get(request.path)
        if failures:
            status, text = failures.popleft()
            return web.Response(status=status, text=text)
        return await handler(request)

    async def _generate(self, http: web.Request) -> web.Response:
        body = await http.json()
        ids = body["input_ids"]
        if not ids or len(ids) >= self.info["max_req_input_len"]:
            return web.json_response({"error": {"message": f"The input ({len(ids)} tokens) is too long"}}, status=400)
        async with self._unpaused:
            await self._unpaused.wait_for(lambda: not self._is_pause)
        done: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        request = Running(body["rid"], ids, body["sampling_params"], done)
        self.waiting.append(request)
        try:
            return web.Response(text=_text(self.mangle(await done)), content_type="application/json")
        finally:
            if not done.done():
                self._finish(request, {"type": "abort", "message": "the client is gone"})

    async def _abort_request(self, http: web.Request) -> web.Response:
        body = await http.json()
        if body.get("abort_all") or body.get("rid"):
            self._abort("" if body.get("abort_all") else body["rid"])
        return web.Response()

    async def _pause(self, http: web.Request) -> web.Response:
        mode = (await http.json()).get("mode", "abort")
        self._is_pause = True
        if mode == "abort":
            self._abort("")
            while self.running or self.waiting:  # noqa: ASYNC110  as the real one does
                await asyncio.sleep(0.01)
        else:
            self._engine_paused = True
        if mode == "retract":
            for request in self.running:
                request.retractions += 1
            self.waiting = self.running + self.waiting
            self.running = []
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, http: web.Request) -> web.Response:
        self._is_pause = self._engine_paused = False
        async with self._unpaused:
            self._unpaused.notify_all()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, http: web.Request) -> web.Response:
        if self.running or (self.waiting and not self._engine_paused):
            return web.Response(status=400, text="Flush cache failed.\n")
        self.flushes += 1
        return web.Response(text="Cache flushed.\n")

    async def _update_from_disk(self, http: web.Request) -> web.Response:
        body = await http.json()
        if body.get("abort_all_requests"):
            self._abort("")
        try:
            self.weights = _load(Path(body["model_path"]))
        except (OSError, KeyError, ValueError) as error:
            return self._said(False, f"Failed to get weights iterator: {error}.")
        self._change_version(body.get("weight_version"))
        if body.get("flush_cache", True) and self.running:
            return self._said(False, "Weights were updated, but the cache was not flushed")
        return self._said(True, "Succeeded to update model weights.")

    async def _begin(self, http: web.Request) -> web.Response:
        if self._session:
            return self._said(False, "a weight-update session is already open; call end_weight_update() first")
        self._session = True
        return self._said(True, "Success")

    async def _end(self, http: web.Request) -> web.Response:
        was_open, self._session = self._session, False
        return self._said(was_open, "Success" if was_open else "no weight-update session is open")

    async def _init_group(self, http: web.Request) -> web.Response:
        body = await http.json()
        try:
            self._groups[body["group_name"]] = await asyncio.to_thread(_join, body)
        except (RuntimeError, ValueError) as error:
            return self._said(False, f"Failed to initialize custom process group: {error}.")
        return self._said(True, "Succeeded to initialize custom process group.")

    async def _destroy_group(self, http: web.Request) -> web.Response:
        known = self._groups.pop((await http.json())["group_name"], None)
        return self._said(known is not None, "The group to be destroyed does not exist.")

    async def _update_from_distributed(self, http: web.Request) -> web.Response:
        body = await http.json()
        if not self._session:
            return self._said(False, "update_weights_from_distributed must run between begin and end")
        try:
            self.weights |= await asyncio.to_thread(_receive, self._groups[body["group_name"]], body)
        except (RuntimeError, ValueError, KeyError) as error:
            return self._said(False, f"Failed to receive weights: {error}")
        self._change_version(body.get("weight_version"))
        return self._said(True, "Succeeded to update parameter online.")

    async def _update_version(self, http: web.Request) -> web.Response:
        body = await http.json()
        if body.get("abort_all_requests", True):
            self._abort("")
        self._change_version(body["new_version"])
        return self._said(True, "Weight version updated")

    async def _release(self, http: web.Request) -> web.Response:
        if self.running:
            await self.die()  # the real scheduler fails an assertion
        self.asleep = True
        return web.Response()

    async def _resume(self, http: web.Request) -> web.Response:
        self.asleep = False
        return web.Response()

    async def _model_info(self, http: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _server_info(self, http: web.Request) -> web.Response:
        return web.json_response({**self.info, "version": "0.5.23"})

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(status=503 if self._is_pause else 200)

    @staticmethod
    def _said(success: bool, message: str) -> web.Response:
        return web.json_response({"success": success, "message": message}, status=200 if success else 400)


def _load(folder: Path) -> dict[str, Any]:
    """The tensors of a model folder, as its index says where they are."""
    from safetensors.torch import load_file

    json.loads((folder / "config.json").read_text())
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    return {name: files[file][name] for name, file in weight_map.items()}


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer)


def _join(body: dict[str, Any]) -> Any:
    """Enters a group as SGLang's workers do: by its address, under its name."""
    from datetime import timedelta

    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    where = f"tcp://{body['master_address']}:{body['master_port']}"
    timeout = timedelta(seconds=20)
    store, rank, size = next(rendezvous(where, body["rank_offset"], body["world_size"], timeout=timeout))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        c10d.Backend(body["backend"]),
        c10d.PrefixStore(body["group_name"], store),
        group_name=c10d.GroupName(body["group_name"]),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}
    return group


def _receive(group: Any, body: dict[str, Any]) -> dict[str, Any]:
    """One flat buffer with all tensors of a bucket, one after the other."""
    import torch

    sizes = []
    for dtype, shape in zip(body["dtypes"], body["shapes"], strict=True):
        sizes.append(int(torch.Size(shape).numel()) * getattr(torch, dtype).itemsize)
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    torch.distributed.broadcast(flat, src=0, group=group)
    tensors, offset = {}, 0
    for name, dtype, shape, size in zip(body["names"], body["dtypes"], body["shapes"], sizes, strict=True):
        tensors[name] = flat[offset : offset + size].view(getattr(torch, dtype)).reshape(shape)
        offset += size
    return tensors


def main() -> None:
    """As `python -m sglang.launch_server`, of whose arguments it keeps those that it is asked about."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context-length", type=int, required=True)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--fail", action="store_true")
    known, rest = parser.parse_known_args()
    if known.fail:
        raise SystemExit("sglang: this model is not for me")

    async def serve() -> None:
        server = ProtocolServer(
            {
                "max_req_input_len": known.context_length - 6,
                "tp_size": known.tp_size,
                "weight_version": known.weight_version,
                "disable_overlap_schedule": "--disable-overlap-schedule" in rest,
                "arguments": rest,
                "pid": os.getpid(),
                "threads": os.environ.get("OMP_NUM_THREADS"),
            }
        )
        await server.start(known.port)
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        await stopped.wait()
        await server.die()

    asyncio.run(serve())
