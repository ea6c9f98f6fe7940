"""The command line: `agentrl train | serve | eval | config`. Heavy imports happen inside the commands."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from agentrl.cli import config as config_commands
from agentrl.cli.config import USAGE_ERROR, config_errors_exit

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)

app = typer.Typer(
    help="Train LLM agents with asynchronous reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(config_commands.app, name="config")


@app.command()
def train(
    file: Annotated[Path, typer.Argument(help="YAML file of the run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="dotted.key=value, the last word on its key.")] = None,
) -> None:
    """Train an agent: `agentrl train examples/math.yaml actor.optim.lr=1e-4`."""
    _train(file, overrides or ())


@app.command()
def serve(
    file: Annotated[Path, typer.Argument(help="YAML file of the run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="dotted.key=value, the last word on its key.")] = None,
) -> None:
    """Train an agent that runs elsewhere, and asks for its episodes over HTTP:
    `agentrl serve examples/serve.yaml gateway.port=8080`."""
    from agentrl.config.names import OUTSIDE_AGENT

    played = {"agent.loop": OUTSIDE_AGENT, "agent.args": "{}", "env.cls": "null", "env.args": "{}"}
    own = [f"{key}={value}" for key, value in played.items()]
    _train(file, [*own, *(overrides or ())])


def _train(file: Path, overrides: Sequence[str]) -> None:
    from agentrl.config import load_config

    with config_errors_exit():
        config = load_config(file, overrides)

    from rich.console import Console

    from agentrl.cli.summary import print_summary
    from agentrl.run import run

    console = Console()
    with errors_exit():
        result = run(config, plugin_folders=(str(file.resolve().parent),), console=console)
    print_summary(console, result)
    if result.problem:
        typer.echo(f"error: {result.problem}", err=True)
        raise typer.Exit(1)


@app.command("eval")
def evaluate(
    target: Annotated[Path, typer.Argument(help="YAML file, or the directory of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="dotted.key=value, the last word on its key.")] = None,
    k: Annotated[list[int] | None, typer.Option("--k", help="pass@k to estimate; can be repeated.")] = None,
    step: Annotated[int | None, typer.Option(help="Of a run: the policy saved at this training step.")] = None,
) -> None:
    """Measure a policy: `agentrl eval runs/math/latest val.n=4 --k 1 --k 4`, or
    `agentrl eval examples/math.yaml model.path=Qwen/Qwen3-0.6B`."""
    from rich.console import Console

    from agentrl.cli.eval import print_evaluation, run_overrides
    from agentrl.config import load_config
    from agentrl.evaluate import evaluate
    from agentrl.observe.run_dir import plugin_folders

    if step is not None and not target.is_dir():
        raise typer.BadParameter("is about the directory of a run", param_hint="--step")
    console = Console()
    with errors_exit():
        file, own = run_overrides(target, step) if target.is_dir() else (target, [])
        config = load_config(file, [*own, *(overrides or ())])
        folders = plugin_folders(target) if target.is_dir() else []
        result = evaluate(config, k=k or [1], plugin_folders=[*folders, str(file.resolve().parent)], console=console)
    print_evaluation(console, result)


@contextmanager
def errors_exit() -> Iterator[None]:
    """What is known to go wrong becomes its message on stderr. Exit status: 2 for what the user named wrongly, 1 for a
    run that failed, 130 for one that was stopped."""
    from agentrl.device import DeviceError
    from agentrl.record import AgentRLError
    from agentrl.rollout.sources import DataError
    from agentrl.run import Interrupted
    from agentrl.sdk.plugin import PluginError

    with config_errors_exit():
        try:
            yield
        except (PluginError, DataError, DeviceError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(USAGE_ERROR) from None
        except AgentRLError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        except Interrupted as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(130) from None


def main() -> None:
    """The entry point of the console script. SIGINT and SIGTERM end it with status 130; a run takes them meanwhile."""
    logging.basicConfig(level=logging.WARNING)
    warnings.showwarning = _one_line
    for number in _ENDING_SIGNALS:
        signal.signal(number, _end)
    try:
        app()
    finally:
        # Python takes handlers away before it ends, but leaves alone what is ignored: the exit status stays.
        for number in _ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def _end(*_: object) -> NoReturn:
    raise SystemExit(130)


def _one_line(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """A warning as a user reads it, without the place in the code that gave it."""
    kind = "warning" if issubclass(category, UserWarning) else category.__name__
    typer.echo(f"{kind}: {message}", err=True)
