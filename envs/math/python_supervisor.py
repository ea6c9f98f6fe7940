"""Runs one program under limits and leaves nothing of it behind: `python -I -S python_supervisor.py`.

A process of its own, because only a process that adopts orphans (`PR_SET_CHILD_SUBREAPER`) finds every descendant: a
double fork, a new session or a background job leaves its group, but not this tree. It ends the tree when the program
ends, at the limit, and when the caller closes the pipe at stdin, by which it also notices the caller's death.

The first line at stdin is the request (`Request` in `python_tool.py`) as JSON; the report goes to stdout as JSON.
Standard library only, and little of it: it starts for each call.
"""

from __future__ import annotations

import collections
import ctypes
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_SECONDS = 0.02
"""How often the processes of the program are counted."""


def main() -> None:
    """Runs the program and reports."""
    request = json.loads(_first_line())
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory(prefix="agentrl-python-", ignore_cleanup_errors=True) as folder:
        code_file = os.path.join(folder, "main.py")
        with open(code_file, "w", encoding="utf-8", errors="replace") as file:
            file.write(request["code"])
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            _become_program(code_file, folder, write_end, request)
        os.close(write_end)
        output = _Tail(request["max_output"])
        try:
            status, reason = _watch(child, read_end, output, request)
        finally:
            _kill_group(child)
            end_tree()
        _make_removable(folder)
    report = {"output": output.text(), "omitted": output.omitted, "status": status, "reason": reason}
    os.write(1, json.dumps(report).encode())


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 65536)
        if not part:
            sys.exit(1)  # the caller is gone
        line += part
    return line


def _become_program(code_file: str, folder: str, output: int, request: dict[str, Any]) -> None:
    """In the child: a session of its own, the limits, then the program."""
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        seconds = int(request["seconds"]) + 1
        for limit, value in (
            (resource.RLIMIT_CPU, seconds),
            (resource.RLIMIT_AS, request["memory"]),
            (resource.RLIMIT_FSIZE, request["file_size"]),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(limit, (value, value))
        environment = {
            "PATH": os.defpath,
            "HOME": folder,
            "TMPDIR": folder,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        os.execve(sys.executable, [sys.executable, "-I", "-u", code_file], environment)
    except BaseException as error:  # noqa: BLE001  # nothing of the supervisor may go on in the child
        os.write(2, f"the program does not start: {error}".encode())
    finally:
        os._exit(127)


def _watch(child: int, output_pipe: int, output: _Tail, request: dict[str, Any]) -> tuple[int | None, str]:
    """Waits for the program's end or a reason to end it: its exit status, or None and the reason."""
    os.set_blocking(output_pipe, False)
    ended = os.pidfd_open(child)
    poll = select.poll()
    for descriptor in (0, output_pipe, ended):
        poll.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + request["seconds"]
    look = 0.0
    while True:
        now = time.monotonic()
        if now >= deadline:
            return None, "timeout"
        if now >= look:
            look = now + _LOOK_SECONDS
            if len(descendants()) > request["processes"]:
                return None, "processes"
        happened = {descriptor for descriptor, _ in poll.poll(1000 * min(deadline - now, _LOOK_SECONDS))}
        if output_pipe in happened and not output.take(output_pipe):
            poll.unregister(output_pipe)
        if ended in happened:
            while output.take(output_pipe):  # what is in the pipe; a background job may hold it open
                if output.omitted > 2**24:
                    break
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), ""
        if 0 in happened:
            return None, "cancelled"


class _Tail:
    """The last bytes of an output."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._data = b""
        self.omitted = 0

    def take(self, descriptor: int) -> bool:
        """Reads what there is; False if there is nothing now or will be nothing more."""
        try:
            part = os.read(descriptor, 65536)
        except BlockingIOError:
            return False
        data = self._data + part
        self.omitted += max(0, len(data) - self._size)
        self._data = data[-self._size :]
        return bool(part)

    def text(self) -> str:
        return self._data.decode(errors="replace")


def descendants() -> list[int]:
    """All processes below this one."""
    children_of = _children if _HAS_CHILDREN else _all_children().__getitem__
    found: list[int] = []
    look = [os.getpid()]
    while look:
        children = children_of(look.pop())
        found += children
        look += children
    return found


_HAS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
"""Kernels can be built without it; then all processes of the machine are read."""


def _children(parent: int) -> list[int]:
    children: list[int] = []
    try:
        for task in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{task}/children", "rb") as file:
                children += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        return children  # it ended meanwhile
    return children


def _all_children() -> collections.defaultdict[int, list[int]]:
    children: collections.defaultdict[int, list[int]] = collections.defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            children[int(fields[1])].append(int(name))
    return children


def end_tree() -> None:
    """Kills and reaps every descendant, whole process groups at a time: a group dies at one stroke, while a list of
    processes may be out of date before it is read to the end."""
    own_group = os.getpgrp()
    while True:
        groups: set[int] = set()
        for process in descendants():
            try:
                group = os.getpgid(process)
                if group == own_group:  # forked, and not yet in a session of its own
                    os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
            if group not in groups and group != own_group:
                groups.add(group)
                _kill_group(group)
        try:
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return  # gone already; what it left is this process's by now


def _make_removable(folder: str) -> None:
    """Undoes what a program can do to keep its folder from being removed."""
    os.chmod(folder, 0o700)
    for path, folders, _ in os.walk(folder):
        for name in folders:
            inner = os.path.join(path, name)
            if not os.path.islink(inner):
                os.chmod(inner, 0o700)


if __name__ == "__main__":
    main()
