"""`agentrl config`: show a resolved configuration, explain a key, print the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from agentrl.config import ConfigError, config_notes, dump_yaml, json_schema, load_config
from agentrl.config import explain as explain_key

app = typer.Typer(help="Look at a configuration without running it.", no_args_is_help=True)

USAGE_ERROR = 2
"""Exit status of a configuration that cannot be run."""


@contextmanager
def config_errors_exit() -> Iterator[None]:
    """Turn a `ConfigError` into its message on stderr and exit status 2."""
    try:
        yield
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(USAGE_ERROR) from None


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="YAML file of the run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="dotted.key=value, the last word on its key.")] = None,
) -> None:
    """Print the resolved configuration: presets, file, overrides and defaults in one. Notes go to stderr."""
    with config_errors_exit():
        config = load_config(file, overrides or ())
    typer.echo(dump_yaml(config), nl=False)
    for note in config_notes(config):
        typer.echo(note, err=True)


@app.command()
def schema() -> None:
    """Print the JSON Schema of configuration files, for editors."""
    typer.echo(json.dumps(json_schema(), indent=2))


@app.command()
def explain(key: Annotated[str, typer.Argument(help="Dotted key or section; all sections without one.")] = "") -> None:
    """Say what a key does, its type and its default."""
    with config_errors_exit():
        typer.echo(explain_key(key), nl=False)
