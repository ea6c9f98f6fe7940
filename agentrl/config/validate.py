"""From a merged layer to a `RunConfig`, or to every problem in it at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from datetime import date
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from agentrl.config.checks import find_problems
from agentrl.config.errors import ConfigError, Problem
from agentrl.config.keys import Key, allows_bool, children, keys, nearest_key
from agentrl.config.layers import Layer
from agentrl.config.schema import RunConfig
from agentrl.config.tree import ABSENT, at
from agentrl.config.yaml_text import to_inline_yaml


def validate(layer: Layer, earlier: Sequence[Problem] = ()) -> RunConfig:
    """Build the configuration and check it across keys.

    Args:
        earlier: problems that were found before; nothing more is said about their keys.

    Raises:
        ConfigError: with those, and every unknown key, wrong value and contradiction, each with its origin.
    """
    config: RunConfig | None = None
    problems = list(_booleans_as_numbers(layer.values, ""))
    try:
        config = RunConfig.model_validate(layer.values)
    except ValidationError as error:
        problems += _translate(error.errors(include_url=False), layer.values)
    if problems:
        config = _without(layer.values, problems)
    if config is not None:
        problems += _not_about(find_problems(config), [*earlier, *problems])
    if earlier or problems or config is None:
        located = [replace(problem, origin=_origin(layer, problem)) for problem in problems]
        raise ConfigError([*earlier, *located])
    return config


def _origin(layer: Layer, problem: Problem) -> str:
    """The place of the first key of a problem that was written anywhere, else of the section around it."""
    written = (layer.origins[name] for name in (problem.key, *problem.others) if name in layer.origins)
    return next(written, layer.origin(problem.key))


def _booleans_as_numbers(values: Mapping[str, Any], prefix: str) -> Iterator[Problem]:
    """Numbers given as true or false, which pydantic takes for 1 and 0."""
    for name, value in values.items():
        key = keys().get(f"{prefix}{name}")
        if key is None:
            continue
        if (key.section is not None or key.holds_sections) and isinstance(value, Mapping):
            yield from _booleans_as_numbers(value, f"{key.name}.")
        elif isinstance(value, bool) and not allows_bool(key.field.annotation):
            yield _wrong_value(key, value)


def _translate(errors: list[ErrorDetails], values: Mapping[str, Any]) -> Iterator[Problem]:
    """Pydantic's errors as problems, one a key."""
    seen: set[str] = set()
    for error in errors:
        name = _key_name(error)
        if name in seen:
            continue
        seen.add(name)
        if error["type"] in ("extra_forbidden", "invalid_key"):
            yield _unknown(name)
        elif error["type"] in ("value_error", "assertion_error"):
            reason = f"{error['msg'].partition(', ')[2]}; got {_show(error['input'])}"
            yield Problem(name, reason, f"see `agentrl config explain {name}`")
        elif at(values, name) is not ABSENT:
            yield _wrong_value(keys()[name], at(values, name))
        else:
            yield _missing(name)


def _key_name(error: ErrorDetails) -> str:
    """The dotted key an error is about: without list positions and union members below a known field."""
    name = ""
    for part in error["loc"]:
        here = f"{name}.{part}" if name else str(part)
        if name in keys() and keys()[name].section is None and not keys()[name].holds_sections:
            return name
        if here not in keys() and error["type"] not in ("extra_forbidden", "invalid_key"):
            continue  # a union member's name between a section and its keys
        name = here
    return name


def _missing(name: str) -> Problem:
    """A required key that is not there; of a missing section, the key in it that is required."""
    key = keys()[name]
    if key.section is not None:
        return _missing(next(child.name for child in children(name) if child.field.is_required()))
    return Problem(name, "is required", f"set it. {key.doc}")


def _wrong_value(key: Key, value: Any) -> Problem:
    reason = f"expected {key.type}; got {_show(value)}"
    if key.section is not None:
        names = ", ".join(_leaf(child.name) for child in children(key.name))
        return Problem(key.name, reason, f"write keys below it, or remove the empty section; keys: {names}")
    if key.field.is_required():
        return Problem(key.name, reason, f"set it. {key.doc}")
    if "text" in key.type and isinstance(value, bool | int | float | date):
        return Problem(key.name, reason, f'quote it: {key.name}: "{value}"')
    default = to_inline_yaml(key.field.get_default(call_default_factory=True))
    return Problem(key.name, reason, f"write such a value, or remove it for the default `{default}`")


def _unknown(name: str) -> Problem:
    section = name.rpartition(".")[0]
    near = nearest_key(name)
    if name in keys():
        below = ": {".join(name.split("."))
        fix = f"in a file, nest it: {below}: ...{'}' * name.count('.')} (dots are for the command line)"
        return Problem(name, "is written with dots", fix, others=(name,))
    if near is not None:
        return Problem(name, "unknown key", f"did you mean {near}?", others=(near,))
    known = ", ".join(_leaf(key.name) for key in children(section))
    return Problem(name, "unknown key", f"remove it; keys{f' of {section}' if section else ''}: {known}")


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _show(value: Any) -> str:
    """A value with its type, short enough for a line."""
    words: dict[type, str] = {str: "text", bool: "true or false", int: "integer", float: "number"}
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    kind = words.get(type(value), "mapping" if isinstance(value, Mapping) else type(value).__name__)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kind})"


def _without(values: Mapping[str, Any], problems: list[Problem]) -> RunConfig | None:
    """The configuration as far as it is sound, so that what it contradicts is found in the same run."""
    sound = deepcopy(dict(values))
    for problem in problems:
        *sections, leaf = problem.key.split(".")
        parent: Any = sound
        for section in sections:
            parent = parent.get(section) if isinstance(parent, dict) else None
        if isinstance(parent, dict):
            parent.pop(leaf, None)
        sound.pop(problem.key, None)
    try:
        return RunConfig.model_validate(sound)
    except ValidationError:
        return None


def _not_about(found: list[Problem], earlier: list[Problem]) -> list[Problem]:
    """The problems that do not speak of a key which already has one: those would vanish with it."""
    blamed = {name for problem in earlier for name in (problem.key, *problem.others)}
    return [problem for problem in found if blamed.isdisjoint((problem.key, *problem.others))]
