"""The main function of every process that a host starts: `python -m agentrl.cluster.process ROLE SPEC`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.cluster.loop_watch import LoopWatch
from agentrl.cluster.rpc import RPC_SILENCE, RpcClient, RpcServer, connected
from agentrl.cluster.spec import RunSpec, plugin_paths
from agentrl.config import RunConfig
from agentrl.record import AgentRLError, RemoteError
from agentrl.record.errors import leaves
from agentrl.record.protocols import Engine, EvaluationService, RolloutService, TrainerService
from agentrl.sdk.plugin import PluginError

if TYPE_CHECKING:
    from agentrl.weights.sender import WeightSender

_GOODBYE_SECONDS = 60.0
"""How long a trainer that is done waits for its supervisor to ask how the run went; one that is gone ends it."""
STARTUP_FAILED = 3
"""Exit status of an engine that could not even start: another try would end the same way."""


class StartupFailed(AgentRLError):
    """An engine could not be started; the message says why."""


async def run_engine(spec: RunSpec, role: str) -> None:
    """Serves one engine until told to stop."""
    from agentrl.engine.load import load_engine

    try:
        index = spec.engine_roles().index(role)
        engine = await load_engine(spec.run_config(), spec.model_path, index, Path(spec.segments))
    except Exception as error:
        if not isinstance(error, AgentRLError):
            logging.getLogger("agentrl").info("the engine could not be started", exc_info=error)
        raise StartupFailed(f"the engine could not be started: {error}") from error
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(RpcServer(spec.address(role), engine, Engine).serve())
            tasks.create_task(engine.watch())
    finally:
        await engine.close()


def freeze_heap() -> None:
    """Takes all objects there are out of garbage collection: walking through those of the libraries again and again
    would hold up the event loop for a tenth of a second each time."""
    gc.collect()
    gc.freeze()


async def run_rollout(spec: RunSpec, role: str) -> None:
    """Plays episodes and serves batches until told to stop."""
    from agentrl.rollout import Plugins, RolloutWorker
    from agentrl.session import ChatFormat

    config = spec.run_config()
    LoopWatch(asyncio.get_running_loop(), warn_after=5.0, give_up_after=RPC_SILENCE - 5.0).start()
    chat_format = await asyncio.to_thread(ChatFormat.load, config.model, spec.model_path)
    freeze_heap()
    clients = {name: RpcClient(spec.address(name), Engine, name=name) for name in spec.engine_roles()}
    async with connected(*clients.values()):
        worker = RolloutWorker(
            config,
            chat_format=chat_format,
            plugins=Plugins.load(config),
            engines={name: client.proxy for name, client in clients.items()},
            run_dir=Path(spec.run_dir),
            reconnect=lambda name: clients[name].expect_new_peer(),
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(RpcServer(spec.address(role), worker, RolloutService).serve())
            tasks.create_task(worker.gateway.run())
            tasks.create_task(worker.run())
            tasks.create_task(worker.watch())


async def run_evaluator(spec: RunSpec, role: str) -> None:
    """Plays the tasks of an evaluation until told to stop."""
    from agentrl.rollout import Plugins, load_tasks
    from agentrl.rollout.evaluator import Evaluator
    from agentrl.session import ChatFormat

    config = spec.run_config()
    LoopWatch(asyncio.get_running_loop(), warn_after=5.0, give_up_after=RPC_SILENCE - 5.0).start()
    chat_format = await asyncio.to_thread(ChatFormat.load, config.model, spec.model_path)
    freeze_heap()
    tasks = [task for own in load_tasks(config, "val").values() for task in own[: config.val.limit]]
    clients = {name: RpcClient(spec.address(name), Engine, name=name) for name in spec.engine_roles()}
    async with connected(*clients.values()):
        evaluator = Evaluator(
            config,
            tasks,
            chat_format=chat_format,
            plugins=Plugins.load(config),
            engines={name: client.proxy for name, client in clients.items()},
            run_dir=Path(spec.run_dir),
        )
        await RpcServer(spec.address(role), evaluator, EvaluationService).serve()


async def run_trainer(spec: RunSpec, role: str) -> None:
    """Trains to the end of the run."""
    from transformers import AutoTokenizer

    from agentrl.models import resolve_model
    from agentrl.observe import MetricsWriter
    from agentrl.trainer.actor import load_actor
    from agentrl.trainer.loop import TrainLoop

    config = spec.run_config()
    run_dir = Path(spec.run_dir)
    client = RpcClient(spec.address("rollout"), RolloutService, name="rollout worker")
    async with connected(client):
        critic_path = (
            resolve_model(config.critic.path, key="critic.path") if config.has_critic and config.critic.path else None
        )
        actor = await asyncio.to_thread(load_actor, config, spec.model_path, critic_path)
        with MetricsWriter(run_dir, tensorboard="tensorboard" in config.trainer.logger) as writer:
            loop = TrainLoop(
                config,
                actor=actor,
                rollout=client.proxy,
                sender=await asyncio.to_thread(make_sender, config, Path(spec.segments)),
                sink=writer,
                run_dir=run_dir,
                tokenizer=await asyncio.to_thread(AutoTokenizer.from_pretrained, spec.model_path),
            )
            server = asyncio.ensure_future(RpcServer(spec.address(role), loop, TrainerService).serve())
            training = asyncio.ensure_future(loop.run())
            done, _ = await asyncio.wait([server, training], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            # The supervisor's summary is the last status it gets: it has to be that of the end.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(loop.end_seen.wait(), _GOODBYE_SECONDS)
            server.cancel()


def make_sender(config: RunConfig, segments: Path) -> WeightSender:
    """What sends the trainer's weights to the engines.

    Args:
        segments: the run's own folder in shared memory.
    """
    from agentrl.device import get_device

    nbytes = config.weights.bucket_mb * 2**20
    if config.weight_transport == "shm":
        from agentrl.weights.shm import ShmSender

        return ShmSender(segments, nbytes)
    if config.weight_transport == "disk":
        from agentrl.weights.disk import DiskSender

        return DiskSender(Path(config.weights.directory or segments), nbytes)
    from agentrl.weights.bucket import BucketLayout
    from agentrl.weights.collective import CollectiveSender

    device = get_device(config.trainer.device)
    # SGLang takes a bucket for the tensors of one type, one directly after the other.
    sglang = config.rollout.engine == "sglang"
    layout = BucketLayout(nbytes, alignment=1, split=False, one_dtype=True) if sglang else BucketLayout(nbytes)
    return CollectiveSender(
        layout,
        backend=device.collective_backend,
        device=device.torch_device(),
        host=config.weights.host or (socket.gethostname() if config.rollout.engine_urls else "127.0.0.1"),
        timeout=config.weights.timeout,
    )


ROLES: dict[str, Callable[[RunSpec, str], Awaitable[None]]] = {
    "engine": run_engine,
    "evaluator": run_evaluator,
    "rollout": run_rollout,
    "trainer": run_trainer,
}


async def _until_signal(work: Awaitable[None]) -> int:
    """Runs `work`; SIGTERM cancels it. Returns the process's exit status."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
        return 0
    return 128 + signal.SIGTERM


def _take_standard_input() -> int:
    """Moves the supervisor's pipe away from standard input, which is then empty: no tool of an agent may read it."""
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return lifeline


def _die_with_parent(lifeline: int, spec: RunSpec) -> None:
    """`lifeline` is a pipe held by the supervisor: its end means that the supervisor is gone, and that nobody
    else will remove the run's sockets and shared memory."""
    while os.read(lifeline, 4096):
        pass
    for folder in (spec.sockets, spec.segments):
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(5.0)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # this process, and what it started


def _known(error: BaseException) -> Exception | None:
    """The typed error behind a failure, whose message says all there is to say."""
    known = (leaf for leaf in leaves(error) if isinstance(leaf, AgentRLError | PluginError))
    return next((leaf for leaf in known if not isinstance(leaf, RemoteError)), None)


def main(role: str, spec_path: str) -> int:
    """Takes a role in a run."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = RunSpec.read(Path(spec_path))
    threading.Thread(target=_die_with_parent, args=(_take_standard_input(), spec), daemon=True).start()
    with plugin_paths(spec.plugin_paths):
        return asyncio.run(_until_signal(ROLES[role.partition("-")[0]](spec, role)))


if __name__ == "__main__":
    status = 1
    try:
        status = main(sys.argv[1], sys.argv[2])
    except BaseException as failure:
        status = STARTUP_FAILED if isinstance(failure, StartupFailed) else 1
        known = _known(failure)
        if known is not None:
            logging.getLogger("agentrl").error("%s: %s", type(known).__name__, known)
        else:
            logging.getLogger("agentrl").exception("%s failed", sys.argv[1])
    # Threads that still compute must not hold the process back.
    logging.shutdown()
    os._exit(status)
