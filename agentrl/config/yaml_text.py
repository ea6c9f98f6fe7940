"""YAML as a person means it: `1e-6` is a number, a key given twice is an error, and keys know their line.

PyYAML follows YAML 1.1, where `1e-6` (no dot) is text and the second of two equal keys silently wins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml

_FLOAT_TAG = "tag:yaml.org,2002:float"
_EXPONENT_FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)[eE][-+]?[0-9]+$")

Path = tuple[str, ...]
"""The keys that lead to a value."""


class _Loader(yaml.SafeLoader):
    """`yaml.SafeLoader` that reads `1e-6` as a number."""


class _Dumper(yaml.SafeDumper):
    """`yaml.SafeDumper` that quotes a text such as `1e-6`, since `_Loader` would read it as a number."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal values out instead of as anchors."""
        return True


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_FLOAT_TAG, _EXPONENT_FLOAT, list("-+.0123456789"))


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed YAML text."""

    value: Any
    """The data: mappings, lists and scalars."""
    lines: dict[Path, int]
    """The line, from 1, of each mapping key."""
    duplicates: tuple[tuple[Path, int, int], ...]
    """Keys given twice: the key, its first line, its second line. `value` holds the second."""


def parse_yaml(text: str) -> Document:
    """Parse one YAML document. An empty text gives the value None.

    Raises:
        yaml.YAMLError: the text is not one well-formed document of plain data.
    """
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return Document(None, {}, ())
        lines: dict[Path, int] = {}
        duplicates: list[tuple[Path, int, int]] = []
        for path, line in _keys(root, (), frozenset()):
            if path in lines:
                duplicates.append((path, lines[path], line))
            lines[path] = line
        return Document(loader.construct_document(root), lines, tuple(duplicates))
    finally:
        loader.dispose()


def to_yaml(value: Mapping[str, Any]) -> str:
    """Write plain data so that `parse_yaml` gives it back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False)


def to_inline_yaml(value: Any) -> str:
    """One value on one line, as it would stand after its key: `[0.9, 0.95]`, `null`, `true`."""
    text = yaml.dump(value, Dumper=_Dumper, allow_unicode=True, default_flow_style=True, width=float("inf"))
    return text.removesuffix("...\n").strip()


def _keys(node: yaml.Node, path: Path, inside: frozenset[int]) -> Iterator[tuple[Path, int]]:
    """Every mapping key below `node` with its line; keys inside lists carry the index on their path."""
    if id(node) in inside:
        _refuse_recursion(node)
    inside |= {id(node)}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            yield here, key.start_mark.line + 1
            yield from _keys(value, here, inside)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _keys(item, (*path, str(index)), inside)


def _refuse_recursion(node: yaml.Node) -> NoReturn:
    raise yaml.MarkedYAMLError(problem="this anchor contains itself", problem_mark=node.start_mark)
