"""Runs Python programs that a model wrote, under limits of time, memory, processes and output.

This keeps a run from being hung or flooded by a clumsy program. It is no isolation from a hostile one: the program runs
as the user of the run, and reads and writes that user's files and network.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl.record import EnvError

_SUPERVISOR = Path(__file__).with_name("python_supervisor.py")
_GRACE_SECONDS = 20.0
"""For the supervisor to start, to end the program's processes and to report, on a busy machine."""

_running: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Request:
    """A program and its limits.

    Attributes:
        seconds: wall time.
        memory: address space of each of its processes, in bytes.
        file_size: of each file it writes, in bytes.
        processes: most at once.
        max_output: bytes of its output that are kept, the last ones.
    """

    code: str
    seconds: float = 5.0
    memory: int = 2**31
    file_size: int = 2**24
    processes: int = 32
    max_output: int = 4096


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a program.

    Attributes:
        output: the end of what it wrote to stdout and stderr.
        omitted: bytes of output that came before.
        status: its exit status, negative for a signal; None if it was ended.
        reason: why it was ended: `timeout`, `processes`, `supervisor` (it killed that itself); else empty.
    """

    output: str
    omitted: int
    status: int | None
    reason: str


async def run_python(request: Request) -> Report:
    """Runs a program to its end. No process of it is left, also if the call is cancelled or this process is killed.

    Raises:
        EnvError: it could not be run.
    """
    loop = asyncio.get_running_loop()
    # More at a time than there are cores for would only make all of them time out.
    async with _running.setdefault(loop, asyncio.Semaphore(2 * (os.cpu_count() or 1))):
        return await _run(request)


async def _run(request: Request) -> Report:
    # The supervisor removes what it makes in there; a program that kills it leaves that to us.
    with tempfile.TemporaryDirectory(prefix="agentrl-python-", ignore_cleanup_errors=True) as place:
        return await _run_in(place, request)


async def _run_in(place: str, request: Request) -> Report:
    try:
        supervisor = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_SUPERVISOR)),
            stdin=asyncio.subprocess.PIPE,  # closed when this process ends: the supervisor then ends the program
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.defpath, "LANG": "C.UTF-8", "TMPDIR": place},
            start_new_session=True,
        )
    except OSError as error:
        raise EnvError(f"the Python tool does not start: {error}") from error
    assert supervisor.stdin is not None and supervisor.stdout is not None and supervisor.stderr is not None
    try:
        async with asyncio.timeout(request.seconds + _GRACE_SECONDS):
            supervisor.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
            answer, complaint = await asyncio.gather(supervisor.stdout.read(), supervisor.stderr.read())
    except TimeoutError:
        supervisor.kill()
        raise EnvError(f"the Python tool's supervisor does not report within {_GRACE_SECONDS:g} s") from None
    finally:
        supervisor.stdin.close()
        await asyncio.shield(supervisor.wait())
    if not answer and supervisor.returncode == -signal.SIGKILL and not complaint:
        return Report("", 0, None, "supervisor")
    if not answer:
        raise EnvError(f"the Python tool's supervisor died: {complaint.decode(errors='replace')[-500:]}")
    return Report(**json.loads(answer))


def described(report: Report, seconds: float) -> str:
    """The report as the model gets to see it."""
    lines = [f"[{report.omitted} bytes of output before this are not shown]"] if report.omitted else []
    lines += [report.output.rstrip("\n")] if report.output.strip() else []
    if report.reason == "timeout":
        lines.append(f"[ended after {seconds:g} s]")
    elif report.reason == "supervisor":
        lines.append("[ended: the program killed the process that ran it]")
    elif report.reason:
        lines.append("[ended: too many processes]")
    elif report.status:
        what = f"signal {-report.status}" if report.status < 0 else f"exit status {report.status}"
        lines.append(f"[{what}]")
    return "\n".join(lines) or "[no output]"
