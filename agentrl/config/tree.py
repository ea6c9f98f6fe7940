"""Nested mappings by dotted names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
"""The value of a key that is not there."""


def at(values: Any, name: str) -> Any:
    """The value of a dotted key, `ABSENT` if there is none."""
    for part in name.split("."):
        values = values.get(part, ABSENT) if isinstance(values, Mapping) else ABSENT
    return values


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Everything that is no mapping, or an empty one, by its dotted name."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def put(values: dict[str, Any], name: str, value: Any) -> bool:
    """Sets a dotted key; false if something that is no mapping stands in its way."""
    *sections, leaf = name.split(".")
    for section in sections:
        below = values.setdefault(section, {})
        if not isinstance(below, dict):
            return False
        values = below
    values[leaf] = deepcopy(value)
    return True


def take(values: dict[str, Any], name: str) -> Any:
    """Removes a dotted key, and the mappings that are empty without it; returns its value, or `ABSENT`."""
    first, dot, rest = name.partition(".")
    if not dot:
        return values.pop(first, ABSENT)
    below = values.get(first)
    if not isinstance(below, dict):
        return ABSENT
    value = take(below, rest)
    if value is not ABSENT and not below:
        del values[first]
    return value
