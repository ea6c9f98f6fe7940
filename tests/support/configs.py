"""Configurations written down as nested dicts, and what loading them says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agentrl.config import ConfigError, Problem, RunConfig, config_notes, load_config
from agentrl.config.tree import put

TASKS = {"data": {"train": "t.jsonl"}}


def nested(*pairs: tuple[str, Any]) -> dict[str, Any]:
    """Keys with dots as sections."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        assert put(values, name, value)
    return values


def refused(source: Any, overrides: Sequence[str] = ()) -> Problem:
    """The one thing that is wrong with a configuration."""
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    [problem] = caught.value.problems
    return problem


def translations(config: RunConfig) -> list[str]:
    """What is said about foreign names."""
    return [note for note in config_notes(config) if note.startswith("translated: ")]


def laid_over(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `top`, section by section."""
    merged = dict(base)
    for name, value in top.items():
        below = merged.get(name)
        merged[name] = laid_over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
