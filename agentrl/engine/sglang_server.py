"""The server that SGLang is: started as a child process, or by somebody else, and checked to be fit for training."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
from importlib.util import find_spec
from typing import Any

from agentrl.config import RunConfig
from agentrl.device import get_device
from agentrl.engine import sglang_payloads as payloads
from agentrl.engine.engine_server import EngineServer
from agentrl.engine.placement import engine_places
from agentrl.record import EngineError

ANSWER_SECONDS = 30.0
_LOOK_SECONDS = 0.25
_START_SECONDS = 1800.0
_STOP_SECONDS = 10.0


class SglangServer(EngineServer):
    """SGLang's HTTP server.

    Args:
        process: the server, if it is ours to end.
    """

    def __init__(self, url: str, process: asyncio.subprocess.Process | None = None) -> None:
        super().__init__(url)
        self.process = process

    async def close(self) -> None:
        """Ends the server if it is ours, with all its processes."""
        await super().close()
        if self.process is not None and self.process.returncode is None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, number)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_STOP_SECONDS):
                        await self.process.wait()
                        return


async def start_server(config: RunConfig, model_path: str, index: int) -> SglangServer:
    if find_spec("sglang") is None:
        raise EngineError("rollout.engine = sglang, but SGLang is not installed: pip install 'agentrl[sglang]'")
    device = get_device(config.trainer.device)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    arguments = payloads.server_arguments(config, model_path, index, device=device.type, port=port)
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def die_with_parent() -> None:
        if libc is not None:
            libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; SGLang's own children do the same

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sglang.launch_server", *arguments),
        env={
            **os.environ,
            **device.environment(engine_places(device, config.rollout.tensor_parallel_size, index)),
            "OMP_NUM_THREADS": str(config.rollout.threads),
            # The context is a little longer than the longest sequence, which may be all that the model has.
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=2,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    return SglangServer(f"http://127.0.0.1:{port}", process)


async def healthy(server: SglangServer, process: asyncio.subprocess.Process) -> None:
    """Waits until a server that was started gives tokens."""
    problem: Exception | None = None
    try:
        async with asyncio.timeout(_START_SECONDS):
            while process.returncode is None:
                try:
                    await server.call("/health_generate", seconds=ANSWER_SECONDS)
                    return
                except EngineError as error:
                    problem = error
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError as error:
        raise EngineError(f"SGLang gave no token within {_START_SECONDS:g} s of its start: {problem}") from error
    raise EngineError(f"SGLang has ended with status {process.returncode} while it started: its log says why")


def check_server(config: RunConfig, url: str, info: dict[str, Any]) -> int:
    """Its workers, if a server is one that can be trained with."""
    rollout = config.rollout
    longest = info.get("max_req_input_len")
    if longest is not None and longest < rollout.max_model_len:
        raise EngineError(
            f"{url} takes prompts of {longest} tokens, below rollout.max_model_len = {rollout.max_model_len}: start it "
            f"with --context-length {rollout.max_model_len + payloads.CONTEXT_MARGIN}, and a cache that holds as many"
        )
    for name in ("dp_size", "pp_size"):
        if (info.get(name) or 1) != 1:
            raise EngineError(f"{url} has {name} {info[name]}: its weights can't be updated. Start it without")
    if info.get("skip_tokenizer_init"):
        raise EngineError(f"{url} runs without a tokenizer: start it without --skip-tokenizer-init")
    if rollout.kv_on_update == "keep" and not info.get("disable_overlap_schedule"):
        raise EngineError(
            f"rollout.kv_on_update is keep, and {url} runs the overlap scheduler, under which the versions of tokens "
            "would not be exact: start it with --disable-overlap-schedule, or set rollout.kv_on_update to recompute"
        )
    return int(info.get("tp_size") or 1)
