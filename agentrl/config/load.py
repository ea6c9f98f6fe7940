"""`load_config`: from a YAML file and command-line overrides to a checked `RunConfig`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.errors import ConfigError
from agentrl.config.importers import Importer
from agentrl.config.layers import Layer, LayerReader
from agentrl.config.notes import remember_translations
from agentrl.config.schema import RunConfig
from agentrl.config.validate import validate


def load_config(path: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration, resolve what it extends, apply overrides, and check all of it.

    Keys under verl's or AReaL's names are translated; `config_notes` says which.

    Args:
        path: a YAML file, or a mapping with the same keys. `extends:` in it names files (relative to the file
            that says so) or shipped presets such as `modes/async_stale`; they are merged in order, the file's
            own keys last. Null for a key that has no null takes back what they say of it.
        overrides: `dotted.key=value`, the value read as YAML; the last word on its key. A mapping merges into
            what is there. `extends=modes/on_policy` lays a preset over the file.

    Raises:
        ConfigError: with every problem found: the key, where it was written, the reason and the fix.
    """
    reader, importer = LayerReader(), Importer()
    layers = reader.read(path, overrides)
    if reader.incomplete:
        raise ConfigError(reader.problems)
    merged = Layer()
    for layer in layers:
        merged = importer.translate(layer).over(merged)
    config = validate(merged, [*reader.problems, *importer.problems])
    remember_translations(config, importer.notes)
    return config
