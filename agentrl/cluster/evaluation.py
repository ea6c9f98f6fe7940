"""The local host of an evaluation: engines, and one process that plays the episodes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from agentrl.cluster.processes import PLAIN_ENVIRONMENT, Processes
from agentrl.cluster.rpc import RpcClient, connected
from agentrl.config import RunConfig
from agentrl.record.protocols import EvaluationReport, EvaluationService

_POLL_SECONDS = 0.25
_SHADOW_SECONDS = 2.0


class EvaluationHost:
    """Starts the processes of an evaluation; when it returns, they are gone.

    Args:
        model_path: where the model's files are.
        plugin_paths: folders in which the user's own modules are looked for.
    """

    def __init__(self, config: RunConfig, run_dir: Path, model_path: str, plugin_paths: tuple[str, ...]) -> None:
        self._processes = Processes(config, run_dir, model_path, plugin_paths)

    async def evaluate(self, console: Console) -> EvaluationReport:
        """Plays all tasks, with a bar on `console`.

        Raises:
            ProcessFailed: a process ended.
        """
        async with self._processes as processes:
            for role in processes.spec.engine_roles():
                await processes.start_engine(role)
            await processes.start("evaluator", PLAIN_ENVIRONMENT)
            client = RpcClient(processes.spec.address("evaluator"), EvaluationService, name="evaluator")
            async with connected(client):
                work = asyncio.ensure_future(client.proxy.evaluate())
                showing = asyncio.ensure_future(_show(client.proxy, console))
                exits = {asyncio.ensure_future(child.process.wait()): child for child in processes.children}
                try:
                    await asyncio.wait((work, *exits), return_when=asyncio.FIRST_COMPLETED)
                    if work.done() and work.exception() is not None:
                        # Often the shadow of a process that is about to end, whose own log says more.
                        await asyncio.wait(exits, timeout=_SHADOW_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    failed = next((child for task, child in exits.items() if task.done()), None)
                    if failed is not None and (not work.done() or work.exception() is not None):
                        raise processes.failure(failed)
                    return await work
                finally:
                    for task in (work, showing, *exits):
                        task.cancel()


async def _show(service: EvaluationService, console: Console) -> None:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("solved {task.fields[solved]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("episodes", total=None, solved="-")
        while True:
            status = await service.status()
            solved = f"{status.solved / status.done:.3f}" if status.done else "-"
            progress.update(bar, completed=status.done, total=status.total, solved=solved)
            await asyncio.sleep(_POLL_SECONDS)
