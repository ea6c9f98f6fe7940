"""The configuration described to people and editors: one key in words, or all of it as JSON Schema."""

from __future__ import annotations

from textwrap import fill
from typing import Any

from agentrl.config.errors import ConfigError, Problem
from agentrl.config.importers import foreign_meaning
from agentrl.config.keys import Key, children, keys, nearest_key
from agentrl.config.schema import RunConfig
from agentrl.config.yaml_text import to_inline_yaml


def explain(key: str = "") -> str:
    """What a key means: its docstring, type and default; for a section, the keys in it; without a key, all
    sections; for a key of verl's or AReaL's, what it is here.

    Raises:
        ConfigError: there is no such key; the message names the nearest.
    """
    if not key:
        return _section_text("", RunConfig.__doc__ or "")
    found = keys().get(key)
    meaning = foreign_meaning(key)
    if meaning is not None:
        return f"{key}\n\n{_wrapped(meaning)}\n"
    if found is None:
        near = nearest_key(key)
        fix = f"did you mean {near}?" if near else "`agentrl config explain` lists the sections"
        raise ConfigError([Problem(key, "unknown key", fix)])
    if found.section is not None:
        return _section_text(key, found.doc)
    return f"{key}\n  type     {found.type}\n  default  {_default(found)}\n\n{_wrapped(found.doc)}\n"


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a configuration file, `extends` included: editors complete and check YAML with it."""
    schema = RunConfig.model_json_schema()
    entry = {"type": "string"}
    schema["properties"]["extends"] = {
        "description": "Files, relative to this one, or presets such as `modes/async_stale`, that this file "
        "is merged over, in order.",
        "anyOf": [entry, {"type": "array", "items": entry}],
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _section_text(name: str, doc: str) -> str:
    rows = [
        (child.name.rpartition(".")[2], "section" if child.section else _default(child), child.doc)
        for child in children(name)
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {_first_sentence(row[2])}" for row in rows]
    return "\n".join([f"{name or 'sections'}: {doc}", "", *map(str.rstrip, lines), ""])


def _wrapped(text: str) -> str:
    return fill(text, width=96, initial_indent="  ", subsequent_indent="  ")


def _default(key: Key) -> str:
    """The default as it would stand in a file."""
    if key.field.is_required():
        return "required"
    return to_inline_yaml(key.field.get_default(call_default_factory=True))


def _first_sentence(doc: str) -> str:
    head, stop, _ = doc.partition(". ")
    return head + "." if stop else doc
