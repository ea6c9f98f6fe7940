"""Programs of a model: their limits hold, and nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from agentrl.envs.math.python_tool import Report, Request, described, run_python
from tests.support.asynchrony import asynchronous, until

HANG = "import subprocess; subprocess.run('sleep 300 & sleep 300', shell=True)"
DOUBLE_FORK = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            time.sleep(300)
        os._exit(0)
print("left behind", flush=True)
"""
IGNORE_SIGNALS = """
import signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
time.sleep(300)
"""


@pytest.fixture(autouse=True)
def _a_place_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other programs leave in the system's temporary folder is not ours."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def leftovers() -> list[str]:
    """Processes that belong to a tool call, living or dead, and its folders."""
    found = [str(child) for child in psutil.Process().children(recursive=True) if _is_of_a_call(child)]
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if "sleep 300" in line or "python_supervisor" in line or "agentrl-python-" in line:
            found.append(line)
    return found + [path.name for path in Path(tempfile.gettempdir()).glob("agentrl-python-*")]


def _is_of_a_call(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE or process.name() == "sleep"
    except psutil.NoSuchProcess:
        return False


@asynchronous
async def test_a_program_has_a_folder_where_temporary_files_go(tmp_path: Path) -> None:
    report = await run("import os; print(os.getcwd())")
    assert Path(report.output.strip()).is_relative_to(tmp_path)
    assert leftovers() == []


@asynchronous
async def test_a_program_that_kills_its_supervisor_is_told_so_and_leaves_nothing() -> None:
    report = await run("import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(300)")
    assert report.reason == "supervisor"
    assert "killed the process that ran it" in described(report, 10.0)
    await until(lambda: leftovers() == [])


async def run(code: str, seconds: float = 10.0) -> Report:
    return await run_python(Request(code, seconds=seconds))


@asynchronous
async def test_output_and_status() -> None:
    assert await run("print(6 * 7)") == Report("42\n", 0, 0, "")
    assert described(await run("print(6 * 7)"), 1) == "42"
    assert described(await run("pass"), 1) == "[no output]"
    assert described(await run("import sys; print('a'); print('b', file=sys.stderr); sys.exit(3)"), 1) == (
        "a\nb\n[exit status 3]"
    )
    assert "ZeroDivisionError" in described(await run("1 / 0"), 1)
    assert "SyntaxError" in described(await run("1 +"), 1)
    assert described(await run("import os; os.kill(os.getpid(), 9)"), 1) == "[signal 9]"


@asynchronous
async def test_the_environment_is_bare() -> None:
    os.environ["MY_SECRET"] = "secret"
    report = await run("import os, sys; print(os.environ, os.listdir(), sys.stdin.read() == '')")
    del os.environ["MY_SECRET"]
    assert "secret" not in report.output and "['main.py'] True" in report.output


@asynchronous
async def test_limits() -> None:
    assert "MemoryError" in (await run("x = [0] * 10**9")).output
    assert "File too large" in (await run("open('f', 'wb').write(b'x' * 10**8)")).output
    flood = await run("while True: print('x' * 1000)", seconds=1.0)
    assert flood.reason == "timeout" and len(flood.output) <= 4096 < flood.omitted
    assert described(flood, 1.0).endswith("[ended after 1 s]")
    assert (await run("import time\nwhile True: pass", seconds=0.5)).reason == "timeout"


@asynchronous
async def test_too_many_processes() -> None:
    code = "import os, time\nfor _ in range(100):\n    if os.fork() == 0: time.sleep(300)\ntime.sleep(300)"
    report = await run(code)
    assert described(report, 1) == "[ended: too many processes]"
    assert leftovers() == []


@pytest.mark.parametrize("code", [HANG, DOUBLE_FORK + "time.sleep(300)", IGNORE_SIGNALS])
def test_a_timeout_leaves_nothing(code: str) -> None:
    began = time.monotonic()
    assert asyncio.run(run(code, seconds=1.0)).reason == "timeout"
    assert time.monotonic() - began < 5.0
    assert leftovers() == []


def test_what_runs_on_in_the_background_ends_with_the_program() -> None:
    assert asyncio.run(run(DOUBLE_FORK)) == Report("left behind\n", 0, 0, "")
    assert leftovers() == []


@asynchronous
async def test_a_folder_that_resists_is_removed() -> None:
    await run("import os; os.makedirs('a/b'); open('a/b/c', 'w'); [os.chmod(p, 0) for p in ('a/b', 'a', '.')]")
    assert leftovers() == []


def test_a_hundred_timeouts_in_a_row_leave_nothing() -> None:
    async def all_of_them() -> list[Report]:
        return await asyncio.gather(*(run(HANG, seconds=0.3) for _ in range(100)))

    assert {report.reason for report in asyncio.run(all_of_them())} == {"timeout"}
    assert leftovers() == []


@asynchronous
async def test_a_cancelled_call_leaves_nothing() -> None:
    call = asyncio.ensure_future(run(HANG, seconds=100))
    await until(lambda: any("sleep 300" in line for line in leftovers()))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert leftovers() == []


def test_the_death_of_the_caller_leaves_nothing() -> None:
    code = (
        "import asyncio; from agentrl.envs.math.python_tool import Request, run_python; "
        f"asyncio.run(run_python(Request({HANG!r}, seconds=100)))"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        deadline = time.monotonic() + 20
        while not any("sleep 300" in line for line in leftovers()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert leftovers()
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while leftovers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers() == []
