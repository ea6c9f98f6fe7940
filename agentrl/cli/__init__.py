"""The command line: `agentrl train | config`. Heavy imports happen inside the commands."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli import config as config_commands
from agentrl.cli.config import USAGE_ERROR, config_errors_exit

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
    from agentrl.config import load_config

    with config_errors_exit():
        config = load_config(file, overrides or ())
    _train(config, (str(file.resolve().parent),))


def _train(config: object, plugin_folders: tuple[str, ...]) -> None:
    from rich.console import Console

    from agentrl.cli.summary import print_summary
    from agentrl.config import RunConfig
    from agentrl.device import DeviceError
    from agentrl.record import AgentRLError
    from agentrl.rollout.tasks import DataError
    from agentrl.run import Interrupted, run
    from agentrl.sdk.plugin import PluginError

    assert isinstance(config, RunConfig)
    console = Console()
    try:
        result = run(config, plugin_folders=plugin_folders, console=console)
    except (PluginError, DataError, DeviceError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(USAGE_ERROR) from None
    except AgentRLError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except Interrupted as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(130) from None
    print_summary(console, result)
    if result.problem:
        typer.echo(f"error: {result.problem}", err=True)
        raise typer.Exit(1)


def main() -> None:
    """The entry point of the console script."""
    logging.basicConfig(level=logging.WARNING)
    app()
