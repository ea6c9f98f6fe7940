"""From files, presets and overrides to one tree of plain data that knows where each key comes from.

Layers, each merged over the one before: the files named by `extends:` in their order, the file itself, then the
overrides. Mappings merge key by key; anything else, lists included, replaces.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from agentrl.config.errors import Problem
from agentrl.config.keys import allows_null, keys
from agentrl.config.tree import ABSENT, at, leaves, take
from agentrl.config.yaml_text import parse_yaml

PRESETS = Path(__file__).parent / "presets"
"""The folder of shipped presets. In a checkout it links to `configs/`; in a wheel it is a copy."""


@dataclass(slots=True)
class Layer:
    """A tree of keys, and the place each key was written at."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    takes_back: set[str] = field(default_factory=set)
    """Keys of lower layers that are as if they had not been given."""

    def over(self, base: Layer) -> Layer:
        """This layer merged over `base`. Null for a key that has no null takes back what `base` says of it."""
        lower, upper = deepcopy(base.values), deepcopy(self.values)
        nulls = {name for name, value in leaves(upper) if value is None and has_no_null(name)}
        taken = {name for name in nulls | self.takes_back if take(lower, name) is not ABSENT} | self.takes_back
        for name in nulls & taken:
            take(upper, name)
        origins = base.origins | self.origins
        gone = {key for key in origins for name in taken if f"{key}.".startswith(f"{name}.")}
        kept = {key for key in gone if at(upper, key) is not ABSENT}
        return Layer(_merge(lower, upper), {key: origins[key] for key in origins if key not in gone - kept})

    def origin(self, key: str) -> str:
        """Where `key`, or the nearest section around it, was written. Empty: nowhere."""
        while key not in self.origins and "." in key:
            key = key.rpartition(".")[0]
        return self.origins.get(key, "")


def preset_names() -> list[str]:
    """Names that `extends:` can use, such as `modes/async_stale`."""
    return sorted(path.relative_to(PRESETS).with_suffix("").as_posix() for path in PRESETS.glob("*/*.yaml"))


class LayerReader:
    """Reads a configuration with everything it extends, and collects what cannot be read."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        """What is wrong so far."""
        self.incomplete = False
        """Whether a layer is missing, so that checking the rest would blame the wrong keys."""

    def read(self, source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> list[Layer]:
        """The layers of `source` (a YAML file, or a mapping with the same keys), what it extends, and `overrides`; the
        last counts most."""
        if isinstance(source, Mapping):
            layers = self._extended(Layer(_merge({}, source)), Path.cwd(), ())
        else:
            layers = self._file(Path(source), ())
        return [*layers, *self._overrides(overrides)]

    def _overrides(self, overrides: Sequence[str]) -> list[Layer]:
        layer = Layer()
        for text in overrides:
            one = self._override(text)
            layer = Layer(_merge(layer.values, one.values), layer.origins | one.origins)
        return self._extended(layer, Path.cwd(), ())

    def _override(self, text: str) -> Layer:
        """The layer of one `dotted.key=value`."""
        key, equals, value_text = text.partition("=")
        path = key.strip().lstrip("+").split(".")  # Hydra's + is said of keys that its own schema does not have
        if not equals or not all(path):
            self._unreadable(text, "an override is a dotted key, `=` and a value", "write e.g. actor.optim.lr=1e-6")
            return Layer()
        try:
            values: Any = parse_yaml(value_text).value
        except yaml.YAMLError as error:
            self._unreadable(text, f"the value is not YAML: {_describe(error)}", "quote the value")
            return Layer()
        origins = {".".join(path[:depth]): f"override {text}" for depth in range(1, len(path) + 1)}
        for name in reversed(path):
            values = {name: values}
        return Layer(values, origins)

    def _file(self, path: Path, chain: tuple[Path, ...]) -> list[Layer]:
        """The layers of a file and all that it extends; `chain` holds the files that led here."""
        real = path.resolve()
        if real in chain:
            names = " -> ".join(_short(link) for link in (*chain[chain.index(real) :], real))
            self._unreadable(_short(path), f"`extends` runs in a circle: {names}", "remove one of these links")
            return []
        try:
            document = parse_yaml(path.read_text(encoding="utf-8"))
        except OSError as error:
            fix = "name an existing YAML file; the path is relative to the current folder"
            self._unreadable(str(path), f"cannot be read: {error.strerror}", fix)
            return []
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            self._unreadable(_short(path), f"not a YAML file: {_describe(error)}", "correct the file at this place")
            return []
        values = {} if document.value is None else document.value
        if not isinstance(values, dict):
            reason = f"expected sections such as `rollout:`; the file holds a {type(values).__name__}"
            self._unreadable(_short(path), reason, "write `section:` and below it, indented, `key: value`")
            return []
        for path_of_key, first, second in document.duplicates:
            origin = f"{_short(path)}, line {second}"
            reason = f"given twice: on line {first} and on line {second}"
            self.problems.append(Problem(".".join(path_of_key), reason, "keep one of them", origin))
        origins = {".".join(parts): f"{_short(path)}, line {line}" for parts, line in document.lines.items()}
        return self._extended(Layer(values, origins), path.parent, (*chain, real))

    def _extended(self, layer: Layer, folder: Path, chain: tuple[Path, ...]) -> list[Layer]:
        """`layer` after the files that its `extends` names, which are relative to `folder` or presets."""
        names = layer.values.pop("extends", None)
        names = [names] if isinstance(names, str) else names or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            reason = f"expected a path or a preset, or a list of them; got {names!r}"
            self._unreadable("extends", reason, "write e.g. extends: [modes/async_stale]", layer.origin("extends"))
            return [layer]
        bases: list[Layer] = []
        for name in names:
            path = _find(name, folder)
            if path is None:
                near = get_close_matches(name.removesuffix(".yaml"), preset_names(), n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                reason = f"{name!r} is neither a file in {folder} nor a preset"
                fix = f"{hint}presets: {', '.join(preset_names())}"
                self._unreadable("extends", reason, fix, layer.origin("extends"))
            else:
                bases += self._file(path, chain)
        return [*bases, layer]

    def _unreadable(self, key: str, reason: str, fix: str, origin: str = "") -> None:
        self.problems.append(Problem(key, reason, fix, origin))
        self.incomplete = True


def _find(name: str, folder: Path) -> Path | None:
    """The file that an entry of `extends` names: next to the file that says so, else a preset."""
    candidates = [base / f"{name}{suffix}" for base in (folder, PRESETS) for suffix in ("", ".yaml")]
    return next((path for path in candidates if path.is_file()), None)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A new tree with the keys of both; where both hold a mapping these merge, else `over` wins. An empty mapping
    clears a key that is one of values (`data.val_args={}`), not a section."""
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and (value or not _holds_values(f"{prefix}{key}")):
            below = merged.get(key)
            merged[key] = _merge(below if isinstance(below, Mapping) else {}, value, f"{prefix}{key}.")
        else:
            merged[key] = value
    return merged


def has_no_null(name: str) -> bool:
    """Whether null is no value of this key, so that it can only take back another one."""
    key = keys().get(name)
    return key is not None and not allows_null(key.field.annotation)


def _holds_values(name: str) -> bool:
    key = keys().get(name)
    return key is not None and key.section is None and not key.holds_sections


def _short(path: Path) -> str:
    """A path as a person would type it from here; a preset by its name."""
    if path.resolve().is_relative_to(PRESETS.resolve()):
        return f"preset {path.resolve().relative_to(PRESETS.resolve()).with_suffix('').as_posix()}"
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _describe(error: Exception) -> str:
    """A YAML error in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(str(error).split())
