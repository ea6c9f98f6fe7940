"""What does the gateway add to a request? One JSON object for each gateway, and one for the comparison.

    .venv/bin/python benchmarks/gateway.py                                    # agentrl's gateway alone
    .venv/bin/python benchmarks/gateway.py --other ~/venv-rllm/bin/python     # and rllm-model-gateway, installed there

500 episodes talk at once, four turns each, every turn sent with the whole conversation before it, as agents do. The
engine is scripted: it answers at once and always the same, so that all the time is the gateway's. `wrk` makes the
requests (Debian: `apt install wrk`), pinned to one core; the gateway is pinned to another one. Each round measures one
gateway after the other:

    requests a second, and latency at 500 connections: how much it can take
    latency at one connection: what it adds to a request where nothing has to wait

`memory_kb_per_session` is what the process of agentrl's gateway grows by for each open session that has had its four
turns. rllm-model-gateway passes requests on, keeping what was said: behind it answers a server on the core of `wrk`, as
vLLM does, with token ids and log-probs and without any tokenising of its own. It stores what it has seen in memory,
which is faster than its default. With hundreds of requests at once most of its time goes into its HTTP client's pool of
connections, whose work for each request grows with their number. agentrl's gateway does more for each request: it
renders, tokenises on top of the recorded tokens, parses, and builds the message graph.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from reporting import report, spread

EPISODES = 500
TURNS = 4
_REPLY = "The carry goes to the tens, so the sum is forty-two; I would check it with the calculator before I answer."
_SYSTEM = (
    "You solve problems step by step. Say what you do, use the tools, and end with the answer on a line of its own."
)
_WRK = """
local requests, at = {}, 0
function init(args)
  for line in io.lines(args[1]) do requests[#requests + 1] = line end
end
function request()
  at = at + 1
  if at > #requests then
    wrk.thread:stop()
    at = #requests
  end
  local path, key, body = string.match(requests[at], "^(%S+)\\t(%S+)\\t(.*)$")
  return wrk.format("POST", path, {["Authorization"] = "Bearer " .. key, ["Content-Type"] = "application/json"}, body)
end
function done(summary, latency, requests)
  io.write(string.format('RESULT {"requests": %d, "seconds": %f, "p50_ms": %f, "p99_ms": %f, "errors": %d}\\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    summary.errors.status + summary.errors.connect + summary.errors.read + summary.errors.write +
    summary.errors.timeout))
end
"""


def conversation(episode: int, turns: int) -> bytes:
    """The body of the request for an episode's turn with that number, from 1."""
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": f"What is {episode} + 17?"}]
    for turn in range(1, turns):
        messages.append({"role": "assistant", "content": _REPLY})
        messages.append({"role": "user", "content": f"And {turn} more than that? Explain it briefly."})
    return json.dumps({"model": "policy", "messages": messages}).encode()


async def serve_agentrl(folder: Path, sessions: int) -> None:
    """A gateway with sessions in front of a scripted engine; says in `ready` where, and which keys there are."""
    from agentrl.cluster.process import freeze_heap
    from agentrl.config.schema import ModelConfig
    from agentrl.gateway import Gateway, GatewayAddress
    from agentrl.record.protocols import GenerateRequest, GenerateResult
    from agentrl.session import ChatFormat, SamplingLimits, Session
    from agentrl.tiny import tiny_model_path

    path = str(tiny_model_path())
    chat_format = ChatFormat.load(ModelConfig(path=path), path)
    ids = np.array([*chat_format.encode(_REPLY), chat_format.stop_token_ids[0]], np.int32)
    logprobs, versions = np.full(len(ids), -0.5, np.float32), np.zeros(len(ids), np.int32)

    class Scripted:
        async def generate(self, request: GenerateRequest) -> GenerateResult:
            return GenerateResult(request.request_id, ids, logprobs, versions, "stop")

    freeze_heap()
    limits = SamplingLimits(temperature=1.0, max_prompt_length=4096, max_response_length=256, max_model_len=8192)
    gateway = Gateway(GatewayAddress(), model="policy")
    open_sessions: dict[str, Session] = {}
    for number in range(sessions):
        session = Session(f"e{number}", chat_format, Scripted(), limits, door=gateway)
        open_sessions[session.api_key] = session
    (folder / "ready.part").write_text(json.dumps({"url": gateway.url, "keys": list(open_sessions)}))
    (folder / "ready.part").rename(folder / "ready")
    ending = asyncio.create_task(_end_finished(open_sessions)) if sessions > EPISODES else None
    await gateway.run()
    assert ending is None or not ending.done()


async def _end_finished(sessions: dict[str, Any]) -> None:
    """Closes sessions that have had their turns, as an episode does that has ended; the last answer is sent first."""
    finished: list[str] = []
    while True:
        await asyncio.sleep(0.5)
        for key in finished:
            sessions.pop(key).close()
        finished = [key for key, session in sessions.items() if len(session.graph.turns) >= TURNS]


async def serve_upstream(folder: Path) -> None:
    """What rllm-model-gateway passes requests on to: an answer as vLLM gives it."""
    from aiohttp import web

    token = {"token": "word", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": _REPLY},
        "finish_reason": "stop",
        "token_ids": list(range(30)),
        "logprobs": {"content": [token] * 30},
    }
    answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
    usage = {"prompt_tokens": 120, "completion_tokens": 30, "total_tokens": 150}
    body = json.dumps({**answer, "prompt_token_ids": list(range(120)), "usage": usage}).encode()

    async def complete(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    logging.disable()  # of connections that end with the program between two measurements
    application = web.Application()
    application.router.add_post("/v1/chat/completions", complete)
    application.router.add_get("/health", health)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    (folder / "upstream.part").write_text(str(runner.addresses[0][1]))
    (folder / "upstream.part").rename(folder / "upstream")
    await asyncio.Event().wait()


@contextmanager
def process(core: int, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program on one core, for the duration of a block."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(["taskset", "-c", str(core), *command], env=environment, stdout=subprocess.DEVNULL)
    try:
        yield running
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()


def wait_for(path: Path, running: subprocess.Popen[bytes]) -> str:
    """The contents of a file that a process writes when it is ready."""
    while not path.exists():
        if running.poll() is not None:
            raise RuntimeError(f"a process ended with {running.returncode} before it was ready")
        time.sleep(0.05)
    return path.read_text()


def load(folder: Path, url: str, lines: list[bytes], *, connections: int, seconds: float) -> dict[str, float]:
    """What `wrk` measures with these requests, one after the other."""
    script, requests = folder / "wrk.lua", folder / "requests"
    script.write_text(_WRK)
    requests.write_bytes(b"\n".join(lines) + b"\n")
    command = ["taskset", "-c", "1", "wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--timeout", "30s"]
    ran = subprocess.run(
        [*command, "-s", str(script), url, "--", str(requests)], check=True, capture_output=True, text=True
    )
    found = re.search(r"^RESULT (.*)$", ran.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"wrk said no result: {ran.stdout}{ran.stderr}")
    result = json.loads(found[1])
    if result["errors"]:
        raise RuntimeError(f"{result['errors']} requests failed: {ran.stdout}")
    return {**result, "requests_per_s": result["requests"] / result["seconds"]}


def requests_of(sessions: list[tuple[str, str]]) -> list[bytes]:
    """All requests of sessions, each a path and a key: block after block of episodes that talk at once."""
    lines = []
    block = 2 * EPISODES  # so that no turn is asked for while the one before it is on its way
    for start in range(0, len(sessions), block):
        for turn in range(1, TURNS + 1):
            for number, (path, key) in enumerate(sessions[start : start + block], start):
                lines.append(b"\t".join((path.encode(), key.encode(), conversation(number, turn))))
    return lines


@contextmanager
def agentrl_gateway(folder: Path, sessions: int) -> Iterator[tuple[str, list[bytes], int]]:
    """A running gateway: its address, the requests for it, and its process."""
    folder.mkdir()
    command = (sys.executable, __file__, "--role", "agentrl", "--folder", str(folder), "--sessions", str(sessions))
    with process(0, *command) as running:
        ready = json.loads(wait_for(folder / "ready", running))
        yield ready["url"], requests_of([("/v1/chat/completions", key) for key in ready["keys"]]), running.pid


@contextmanager
def other_gateway(folder: Path, python: str, sessions: int) -> Iterator[tuple[str, list[bytes], int]]:
    """rllm-model-gateway, likewise."""
    folder.mkdir()
    with process(1, sys.executable, __file__, "--role", "upstream", "--folder", str(folder)) as upstream:
        port = wait_for(folder / "upstream", upstream)
        own = free_port()
        command = (python, "-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(own))
        worker = f"http://127.0.0.1:{port}/v1"
        with process(0, *command, "--worker", worker, "--store", "memory", "--log-level", "ERROR") as running:
            wait_until_open(own, running)
            paths = [(f"/sessions/s{number}/v1/chat/completions", "none") for number in range(sessions)]
            yield f"http://127.0.0.1:{own}", requests_of(paths), running.pid


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def wait_until_open(port: int, running: subprocess.Popen[bytes]) -> None:
    """Returns when a process listens."""
    while True:
        if running.poll() is not None:
            raise RuntimeError(f"a process ended with {running.returncode} before it was ready")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)


def memory_per_session(folder: Path) -> float:
    """KiB that each of 500 open sessions adds when it has had its turns, more than before the first."""
    import httpx
    import psutil

    with agentrl_gateway(folder, EPISODES) as (url, lines, pid):
        gateway = psutil.Process(pid)
        before = gateway.memory_info().rss
        with httpx.Client(timeout=30) as client:
            for line in lines:
                path, key, body = line.split(b"\t", 2)
                headers = {"Authorization": f"Bearer {key.decode()}"}
                client.post(url + path.decode(), content=body, headers=headers).raise_for_status()
        return (gateway.memory_info().rss - before) / 1024 / EPISODES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", help="python of an environment with rllm-model-gateway")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--role", choices=("agentrl", "upstream"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sessions", type=int, default=EPISODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "agentrl":
        asyncio.run(serve_agentrl(arguments.folder, arguments.sessions))
    elif arguments.role == "upstream":
        asyncio.run(serve_upstream(arguments.folder))
    else:
        if shutil.which("wrk") is None:
            raise SystemExit("wrk is not installed: apt install wrk")
        measure(arguments.other, arguments.rounds, arguments.seconds)


def measure(other: str | None, rounds: int, seconds: float) -> None:
    """All rounds, and what they come to."""
    results: dict[str, list[dict[str, float]]] = {"agentrl": [], **({"rllm-model-gateway": []} if other else {})}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for round_number in range(rounds):
            for gateway, rows in results.items():
                for connections, most_per_s in ((1, 1200), (EPISODES, 2000)):
                    sessions = int(most_per_s * seconds / TURNS)
                    folder = root / f"{gateway}-{round_number}-{connections}"
                    made = (
                        agentrl_gateway(folder, sessions)
                        if gateway == "agentrl"
                        else other_gateway(folder, other or "", sessions)
                    )
                    with made as (url, lines, _):
                        row = load(folder, url, lines, connections=connections, seconds=seconds)
                    rows.append({"connections": connections, **row})
        memory = memory_per_session(root / "memory")
    for gateway, rows in results.items():
        loaded = [row for row in rows if row["connections"] == EPISODES]
        alone = [row for row in rows if row["connections"] == 1]
        row: dict[str, Any] = {"gateway": gateway, "episodes": EPISODES, "turns": TURNS}
        row["requests_per_s"] = spread([r["requests_per_s"] for r in loaded])
        row["loaded_p50_ms"] = spread([r["p50_ms"] for r in loaded])
        row["loaded_p99_ms"] = spread([r["p99_ms"] for r in loaded])
        row["added_p50_ms"] = spread([r["p50_ms"] for r in alone])
        row["added_p99_ms"] = spread([r["p99_ms"] for r in alone])
        if gateway == "agentrl":
            row["memory_kb_per_session"] = round(memory, 1)
        report(row)
    if other:
        pairs = zip(results["agentrl"], results["rllm-model-gateway"], strict=True)
        ratios = [a["requests_per_s"] / b["requests_per_s"] for a, b in pairs if a["connections"] == EPISODES]
        report({"comparison": "requests a second, agentrl over rllm-model-gateway", "ratio": spread(ratios)})


if __name__ == "__main__":
    main()
