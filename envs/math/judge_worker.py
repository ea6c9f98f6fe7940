"""A worker that judges answers, one at a time: `python -m agentrl.envs.math.judge_worker KIND PARENT_PID`.

Two processes: one that loads the judge, which takes a second, and its child, which judges. An answer that passes its
limit costs the child, killed by its own alarm, and the next child is there at once.

The child reads requests from stdin and replies at what was stdout, a JSON object behind its length in four bytes. A
reply has two parts, so that the pool knows whose fault it is if the second does not come: `{"ready": true}` once the
gold answer (or the task) is understood, then the verdict. Instead comes `{"ended": status}` if the child died.

Both die with the process that started them, whatever they are doing.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

Judge = Callable[..., Iterator[dict[str, Any]]]

MEMORY_LIMIT = 2**30
"""Address space of each process in bytes; what needs more is a memory bomb."""

MOST_REQUESTS = 2000
"""A child is replaced after so many, since algebra systems keep what they have computed."""

_PIPE_CLOSED = 3
_PR_SET_PDEATHSIG = 1

JUDGES = {
    "math": "agentrl.envs.math.symbolic:judge_math",
    "reasoning_gym": "agentrl.envs.math.reasoning_judge:judge_reasoning_gym",
}
"""The kinds. A judge yields `{"ready": True}` once it understands the task, then its verdict. What it raises before
that, or yields as `{"failed": reason}`, is a failure of the task; afterwards, a fault of the answer."""

_WARM_UP = {"math": {"gold": "x^2 + 2x + 1", "answer": "(x + 1)^2"}}
"""The first use of a parser and of sympy builds tables for most of a second; no answer shall pay for that."""


def main() -> None:
    """Serves requests until the pool closes the pipe."""
    kind, parent = sys.argv[1], int(sys.argv[2])
    _die_with(parent)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Libraries that print must not end up in the replies.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    try:
        judge = _load(kind)
    except ImportError as error:
        send(replies, {"failed": f"{type(error).__name__}: {error}"})
        return
    send(replies, {"started": True})
    gc.freeze()  # the children share this memory as long as nobody writes to it
    while True:
        status = _child(judge, requests, replies)
        if status == _PIPE_CLOSED:
            return
        if status != 0:
            send(replies, {"ended": status})


def _load(kind: str) -> Judge:
    module_name, _, name = JUDGES[kind].partition(":")
    judge: Judge = getattr(importlib.import_module(module_name), name)
    if kind in _WARM_UP:
        list(judge(**_WARM_UP[kind]))
    return judge


def _child(judge: Judge, requests: BinaryIO, replies: BinaryIO) -> int:
    """Has a child serve requests to its end: its exit status, negative for a signal."""
    loader = os.getpid()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _die_with(loader)
            status = _serve(judge, requests, replies)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _serve(judge: Judge, requests: BinaryIO, replies: BinaryIO) -> int:
    for _ in range(MOST_REQUESTS):
        request = receive(requests)
        if request is None:
            return _PIPE_CLOSED
        # Nobody handles the signal, so the kernel ends the process, which no Python code could be relied on to do.
        signal.setitimer(signal.ITIMER_REAL, request["limit"])
        last: dict[str, Any] = {}
        for last in _parts(judge, request["arguments"]):
            if "ready" in last:
                send(replies, last)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(replies, last)
        if last.get("detail") == MemoryError.__name__:
            break  # what is left of the memory is no place for the next answer
    return 0


def _parts(judge: Judge, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    ready = False
    try:
        for part in judge(**arguments):
            yield part
            ready = True
    except Exception as error:  # noqa: BLE001  # whatever a judge raises is its verdict, or a failure before it is ready
        # The name alone: a message may hold the number that could not be written out.
        yield {"outcome": "error", "detail": type(error).__name__} if ready else {"failed": type(error).__name__}


def send(stream: BinaryIO, message: dict[str, Any]) -> None:
    """Writes one message."""
    body = json.dumps(message).encode()
    stream.write(struct.pack(">I", len(body)) + body)
    stream.flush()


def receive(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message; None at the end of the stream."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    return decoded(stream.read(struct.unpack(">I", header)[0]))


def decoded(body: bytes) -> dict[str, Any]:
    """The message that a body holds."""
    return json.loads(body)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


if __name__ == "__main__":
    main()
