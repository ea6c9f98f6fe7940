"""`load_config`: from a YAML file and command-line overrides to a checked `RunConfig`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.errors import ConfigError
from agentrl.config.layers import LayerReader
from agentrl.config.schema import RunConfig
from agentrl.config.validate import validate


def load_config(path: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration, resolve what it extends, apply overrides, and check all of it.

    Args:
        path: a YAML file, or a mapping with the same keys. `extends:` in it names files (relative to the file
            that says so) or shipped presets such as `modes/async_stale`; they are merged in order, the file's
            own keys last.
        overrides: `dotted.key=value`, the value read as YAML; the last word on its key. A mapping merges into
            what is there. `extends=modes/on_policy` lays a preset over the file.

    Raises:
        ConfigError: with every problem found: the key, where it was written, the reason and the fix.
    """
    reader = LayerReader()
    layer = reader.read(path, overrides)
    if reader.incomplete:
        raise ConfigError(reader.problems)
    try:
        config = validate(layer)
    except ConfigError as error:
        raise ConfigError([*reader.problems, *error.problems]) from None
    if reader.problems:
        raise ConfigError(reader.problems)
    return config
