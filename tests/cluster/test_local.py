"""What a host finds and leaves on its machine, and the ways a run is started from Python."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl import train
from agentrl.cluster.local import LocalHost, RunState
from agentrl.cluster.processes import Child, Processes, _remove_leftovers, _socket_folder
from agentrl.config import load_config
from agentrl.record.protocols import RolloutStatus, TrainerStatus

CONFIG = Path(__file__).parents[2] / "examples" / "math.yaml"


def test_folders_of_runs_that_are_gone_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone, alive, other = (
        tmp_path / name for name in (f"agentrl-{ended.pid}-ab", f"agentrl-{os.getpid()}-ab", "agentrl-notes-ab")
    )
    for folder in (gone, alive, other):
        folder.mkdir()
        (folder / "bucket-0").write_bytes(b"0")
    _remove_leftovers(tmp_path)
    assert [folder.exists() for folder in (gone, alive, other)] == [False, True, True]


def test_a_second_signal_does_not_cut_the_end_short(tmp_path: Path) -> None:
    """A process that ignores SIGTERM takes the host its three seconds; it is killed, and the folders go."""
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(300)"

    async def play() -> tuple[int | None, tuple[str, str]]:
        processes = Processes(load_config(CONFIG), tmp_path, "nowhere", ())
        async with processes:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", stubborn, stdout=asyncio.subprocess.PIPE, start_new_session=True
            )
            assert process.stdout is not None
            await process.stdout.readline()
            processes.children.append(Child("engine-0", process, tmp_path / "engine-0.log"))
            stopping = asyncio.create_task(processes.stop())
            await asyncio.sleep(0.2)
            stopping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stopping
            return process.returncode, (processes.spec.sockets, processes.spec.segments)

    status, folders = asyncio.run(play())
    assert status == -9
    assert not any(map(os.path.exists, folders))


def test_a_killed_process_leaves_no_shared_memory_though_its_children_ignore_sigterm(tmp_path: Path) -> None:
    """The resource tracker removes it, once the last process that could use it is gone."""
    script = """if True:
        import os, signal, time
        from multiprocessing.shared_memory import SharedMemory
        memory = SharedMemory(create=True, size=1)
        if not os.fork():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print(memory.name, flush=True)
        time.sleep(300)"""
    memory, output = Path("/dev/shm"), tmp_path / "output"

    async def play() -> str:
        processes = Processes(load_config(CONFIG), tmp_path, "nowhere", ())
        with output.open("wb") as stdout:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", script, stdout=stdout, start_new_session=True
            )
        name = ""
        while not name.endswith("\n"):
            await asyncio.sleep(0.02)
            name = output.read_text()
        name = name.strip()
        assert (memory / name).exists()
        process.kill()
        await process.wait()
        await processes.end_session(Child("engine-0", process, tmp_path / "engine-0.log"))
        return name

    assert not (memory / asyncio.run(play())).exists()


def test_sockets_get_a_short_path_whatever_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder = _socket_folder("agentrl-test-")
    try:
        assert len(str(folder)) < 90
        assert not list(deep.iterdir())
    finally:
        folder.rmdir()


def test_a_run_inside_a_running_event_loop_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async def notebook() -> None:
        train(CONFIG, [f"trainer.output_dir={tmp_path}"])

    with pytest.raises(RuntimeError, match=r"asyncio\.to_thread\(train"):
        asyncio.run(notebook())
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_a_run_works_from_another_thread(tmp_path: Path) -> None:
    overrides = [f"trainer.output_dir={tmp_path}", "trainer.total_steps=1", "val.limit=8"]

    async def notebook() -> int:
        return (await asyncio.to_thread(train, CONFIG, overrides)).steps

    assert asyncio.run(notebook()) == 1


def test_the_last_answer_of_a_trainer_that_ends_is_not_lost(tmp_path: Path) -> None:
    """It ends as soon as it has said how the run went; the rollout worker may still be busy with its own answer."""

    async def play() -> RunState | None:
        host = LocalHost(load_config(CONFIG), tmp_path, "nowhere", ())
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "", start_new_session=True)
        host._processes.children.append(Child("trainer", process, tmp_path / "trainer.log"))

        async def answer() -> RunState:
            await process.wait()
            await asyncio.sleep(0.3)
            return RunState(TrainerStatus(1, 1, 1, "done", 0.0, problem="in vain"), RolloutStatus(1, 0, 0))

        return await host._while_alive(asyncio.ensure_future(answer()))

    state = asyncio.run(play())
    assert state is not None and state.trainer.problem == "in vain"
