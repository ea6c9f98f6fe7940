"""A pool of worker processes that judge answers and are killed when one takes too long.

A big number can't be interrupted from inside Python: the C code that works on it neither looks at signals nor lets
other threads run. So each answer is judged in a process of its own that can be killed.

Every worker belongs to one thread, which starts it, talks to it, kills it and reaps it. Callers only wait on a future,
so they may be any thread or event loop. The threads live as long as the process: the kernel kills a child with
`PR_SET_PDEATHSIG` when the thread that started it ends, not when the process does.
"""

from __future__ import annotations

import atexit
import os
import queue
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from agentrl.envs.math import judge_worker
from agentrl.record import EnvError

START_SECONDS = 60.0
"""A worker that needs longer to start has failed. It takes a second, more on a busy machine."""

_GRACE_SECONDS = 2.0
"""The worker keeps to the limit by itself; this much later the pool ends it."""

_ATTEMPTS = 2
"""A worker that dies is not the answer's fault the first time: anything on the machine may have killed it."""

_CLOSED = "the judging of answers ended with the process"


class WorkerTimeout(Exception):
    """The limit passed, and what judged was killed."""


class WorkerDied(Exception):
    """The worker ended in the middle of a request."""


@dataclass(slots=True)
class _Work:
    arguments: dict[str, Any]
    limit: float
    future: Future[dict[str, Any]] = field(default_factory=Future)


class JudgePool:
    """Up to `size` workers for one kind of answers (see `judge_worker.JUDGES`), started when they are needed.

    * A request is with one worker at a time, and no longer than its limit; waiting for a worker does not count.
    * The future of each request is done sooner or later, also when the pool is closed.
    * No worker outlives the process.
    """

    def __init__(self, kind: str, size: int) -> None:
        self._kind = kind
        self._size = size
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._seats: list[_Seat] = []
        self._free = 0
        self._closed = False

    def submit(self, arguments: dict[str, Any], limit: float) -> Future[dict[str, Any]]:
        """Has an answer judged. The result has `outcome` (`equal`, `different`, `timeout`, `error`) and `detail`.

        The future raises EnvError if there is no worker to be had or the task itself can't be judged.
        """
        work = _Work(arguments, limit)
        with self._lock:
            if self._closed:
                raise EnvError(_CLOSED)
            self._waiting.put(work)
            if self._free > 0:
                self._free -= 1
            elif len(self._seats) < self._size:
                seat = _Seat(self._kind, self._waiting.get, self._done, f"judge-{self._kind}-{len(self._seats)}")
                self._seats.append(seat)
                seat.thread.start()
        return work.future

    def process_ids(self) -> list[int]:
        """Of the workers that run now."""
        with self._lock:
            return [worker.pid for seat in self._seats if (worker := seat.worker) is not None]

    def close(self) -> None:
        """Kills the workers and fails what is waiting."""
        with self._lock:
            self._closed = True
            seats = list(self._seats)
        for seat in seats:
            seat.close()
            self._waiting.put(None)
        for seat in seats:
            seat.thread.join(timeout=5.0)

    def forget(self) -> None:
        """In a forked child: drops the parent's ends of the pipes, so that the workers still notice its death."""
        for seat in self._seats:
            if seat.worker is not None:
                seat.worker.abandon()

    def _done(self) -> None:
        """A seat has nothing to do unless something waits. Told before its caller hears of the result, so that one
        caller who asks again and again keeps to one worker."""
        with self._lock:
            if self._waiting.empty():
                self._free += 1  # `submit` takes it back when it puts work in


class _Seat:
    """A thread and the worker it has at present."""

    def __init__(self, kind: str, next_work: Callable[[], _Work | None], done: Callable[[], None], name: str) -> None:
        self.worker: _Worker | None = None
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._kind = kind
        self._next = next_work
        self._done = done
        self._closed = False

    def close(self) -> None:
        """Ends what the thread waits for; it reaps the worker itself. Called from another thread."""
        self._closed = True
        if self.worker is not None:
            self.worker.kill()

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            if not work.future.set_running_or_notify_cancel():
                self._done()
                continue
            try:
                result = self._judge(work)
            except BaseException as error:  # noqa: BLE001  # it belongs to the caller; the thread serves on
                self._done()
                work.future.set_exception(error)
            else:
                self._done()
                work.future.set_result(result)
        self._drop()

    def _judge(self, work: _Work) -> dict[str, Any]:
        understood, died = False, ""
        for _ in range(_ATTEMPTS):
            understood = False
            try:
                worker = self._ready_worker()
                deadline = time.monotonic() + work.limit + _GRACE_SECONDS
                worker.request(work.arguments, work.limit)
                first = worker.receive(deadline)
                if "failed" in first:
                    raise EnvError(f"{_named(work)} can't be judged: {first['failed']}")
                understood = True
                return worker.receive(deadline)
            except WorkerTimeout:
                if not understood:
                    raise EnvError(f"{_named(work)} can't be evaluated in {work.limit:g} s") from None
                return {"outcome": "timeout", "detail": f"not judged in {work.limit:g} s"}
            except WorkerDied as error:
                self._drop()
                died = str(error)
        if not understood:
            raise EnvError(f"the process that judges answers keeps dying at {_named(work)}: {died}")
        return {"outcome": "error", "detail": died}

    def _ready_worker(self) -> _Worker:
        if self.worker is not None and not self.worker.alive:
            self._drop()
        if self.worker is None and not self._closed:
            self.worker = _Worker(self._kind)
            try:
                self.worker.wait_until_started()
            except BaseException:
                self._drop()
                raise
        if self.worker is None or self._closed:
            raise EnvError(_CLOSED)
        return self.worker

    def _drop(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.end()


def _named(work: _Work) -> str:
    if "gold" in work.arguments:
        return f"the gold answer {work.arguments['gold'][:200]!r}"
    return f"the task {str(work.arguments)[:200]}"


class _Worker:
    """One worker, seen from the thread it belongs to; only `kill` may be called from another."""

    def __init__(self, kind: str) -> None:
        """Starts it; raises EnvError if the system refuses."""
        self._kind = kind
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the worker
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", judge_worker.__name__, kind, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the run, which then ends its workers
            )
        except OSError as error:
            self._errors.close()
            raise EnvError(f"the process that judges answers does not start: {error}") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        self._poll = select.poll()
        self._poll.register(self._replies, select.POLLIN)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_started(self) -> None:
        """Raises EnvError if it does not start, or a package is missing."""
        try:
            first = self.receive(time.monotonic() + START_SECONDS)
        except (WorkerTimeout, WorkerDied) as error:
            self._errors.seek(0)
            last_words = self._errors.read().decode(errors="replace").strip()[-1000:]
            raise EnvError(f"the process that judges answers does not start: {error}; {last_words}") from None
        if "failed" in first:
            raise EnvError(
                f"answers of the kind {self._kind} can't be judged: {first['failed']}: install what is missing with "
                "`pip install 'agentrl[math]'`"
            )

    def request(self, arguments: dict[str, Any], limit: float) -> None:
        """Sends a request; raises WorkerDied or WorkerTimeout."""
        try:
            judge_worker.send(self._requests, {"arguments": arguments, "limit": limit})  # pyright: ignore[reportArgumentType]
        except BrokenPipeError:
            raise self._end() from None

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next message.

        Raises:
            WorkerTimeout: the limit passed; what judged is gone, the worker can go on, unless it is not `alive`.
            WorkerDied: see there.
        """
        (length,) = struct.unpack(">I", self._read(4, deadline))
        message = judge_worker.decoded(self._read(length, deadline))
        if "ended" not in message:
            return message
        status = message["ended"]
        if status == -signal.SIGALRM:
            raise WorkerTimeout("its alarm ended it")
        raise WorkerDied(_ending(status))

    def _read(self, count: int, deadline: float) -> bytes:
        data = b""
        while len(data) < count:
            left = max(0.0, deadline - time.monotonic())
            if not self._poll.poll(left * 1000):
                self.end()
                raise WorkerTimeout("it is silent for too long")
            part = os.read(self._replies.fileno(), count - len(data))
            if not part:
                raise self._end()
            data += part
        return data

    def _end(self) -> WorkerDied:
        try:
            return WorkerDied(_ending(self._process.wait(timeout=5.0)))
        except subprocess.TimeoutExpired:
            return WorkerDied("it closed its pipe")

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Kills and reaps it, and closes the pipes."""
        self._process.kill()
        self._process.wait()
        for stream in (self._requests, self._replies, self._errors):
            stream.close()

    def abandon(self) -> None:
        for stream in (self._requests, self._replies, self._errors):
            stream.close()


def _ending(status: int) -> str:
    return f"it ended by signal {-status}" if status < 0 else f"it exited with status {status}"


_shared: dict[str, JudgePool] = {}
_shared_lock = threading.Lock()


def shared_pool(kind: str) -> JudgePool:
    """This process's pool for a kind of answers; its workers end with the process."""
    with _shared_lock:
        if kind not in _shared:
            # Four even on two cores: a worker that is busy with a bomb must not hold up the others' answers.
            _shared[kind] = JudgePool(kind, max(4, min(16, os.cpu_count() or 1)))
            atexit.register(_shared[kind].close)
        return _shared[kind]


def _after_fork() -> None:
    global _shared, _shared_lock
    for pool in _shared.values():
        atexit.unregister(pool.close)
        pool.forget()
    _shared, _shared_lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
