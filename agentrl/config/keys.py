"""The keys of `RunConfig` by their dotted names: listing, typing in words, and the nearest to a misspelt one.

Where the user chooses the name of a section (`environments.math`), the keys are listed under `NAME`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agentrl.config.schema import RunConfig

_NEAR = 0.6
"""Similarity from which a known key is worth suggesting, as in `difflib.get_close_matches`."""
_SAME_SECTION = 0.1
"""A key of the section that was written in wins over one that is spelt about as close elsewhere."""
_NAMED = "NAME"
"""Stands for the name of a section that the user chose."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a configuration: a section or a field."""

    name: str
    """Dotted."""
    field: FieldInfo
    section: type[BaseModel] | None
    """The model of a section, None for a field."""
    holds_sections: bool = False
    """Whether it is a mapping from names of the user's to sections."""

    @property
    def doc(self) -> str:
        """Its docstring, in one line."""
        own = self.field.description or (self.section.__doc__ if self.section else "") or ""
        return " ".join(own.split())

    @property
    def type(self) -> str:
        """Its type in words, such as `integer, at least 1`."""
        return describe_type(self.field.annotation, self.field.metadata)


class Keys(Mapping[str, Key]):
    """Every section and field by its dotted name, in the order of the schema; found under users' names too."""

    def __init__(self, found: Iterator[Key]) -> None:
        self._keys = {key.name: key for key in found}

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, name: str) -> Key:
        return replace(self._keys[_listed(name)], name=name)


@lru_cache(maxsize=1)
def keys() -> Keys:
    """The keys of a run's configuration."""
    return Keys(_walk(RunConfig, ""))


@lru_cache(maxsize=1)
def _name_holders() -> tuple[str, ...]:
    return tuple(key.name for key in _walk(RunConfig, "") if key.holds_sections)


def _listed(name: str) -> str:
    """The name under which a key is listed: the user's own name of a section replaced."""
    for holder in _name_holders():
        own, dot, rest = name.removeprefix(f"{holder}.").partition(".")
        if own and name.startswith(f"{holder}."):
            return f"{holder}.{_NAMED}{dot}{rest}"
    return name


def known_keys() -> tuple[str, ...]:
    """The dotted name of every section and field, in the order of the schema."""
    return tuple(keys())


def children(name: str) -> list[Key]:
    """The keys directly below a section; of the whole configuration for an empty name."""
    listed = _listed(name)
    found = [key for key in keys().values() if key.name.rpartition(".")[0] == listed]
    return [replace(key, name=f"{name}{key.name.removeprefix(listed)}") for key in found]


def nearest_key(name: str) -> str | None:
    """The known key that an unknown one most likely means, in whatever section; None if none is near."""
    section, _, leaf = name.rpartition(".")

    def similarity(known: str) -> tuple[float, float]:
        known_section, _, known_leaf = known.rpartition(".")
        closeness = SequenceMatcher(None, leaf, known_leaf).ratio()
        bonus = _SAME_SECTION if known_section == section else 0.0
        return (closeness + bonus if closeness >= _NEAR else 0.0, SequenceMatcher(None, name, known).ratio())

    best = max(keys(), key=similarity)
    return best if similarity(best)[0] > 0 else None


def describe_type(annotation: Any, metadata: list[Any] | None = None) -> str:
    """A type annotation with its bounds as a person would say it.

    >>> describe_type(int | None, [annotated_types.Ge(1)])
    'integer, at least 1, or null'
    """
    if get_origin(annotation) is Annotated:
        annotation, *inner = get_args(annotation)
        metadata = [*inner, *(metadata or [])]
    members = [member for member in _members(annotation) if member is not types.NoneType]
    words = " or ".join(_describe_member(member) for member in members)
    bounds = _describe_bounds(metadata or [])
    optional = len(members) < len(_members(annotation))
    if not bounds:
        return f"{words} or null" if optional else words
    return f"{words}, {bounds}{', or null' if optional else ''}"


def allows_null(annotation: Any) -> bool:
    """Whether null is a value of this type."""
    if get_origin(annotation) is Annotated:
        return allows_null(get_args(annotation)[0])
    return any(member in (types.NoneType, Any) for member in _members(annotation))


def allows_bool(annotation: Any) -> bool:
    """Whether true and false are meant as values of this type, and not only taken for 1 and 0."""
    if get_origin(annotation) is Annotated:
        return allows_bool(get_args(annotation)[0])
    members = _members(annotation)
    return bool in members or Any in members or not any(member in (int, float) for member in members)


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        named = _section(get_args(field.annotation)[1]) if get_origin(field.annotation) is dict else None
        yield Key(prefix + name, field, section, holds_sections=named is not None)
        if section is not None:
            yield from _walk(section, f"{prefix}{name}.")
        if named is not None:
            inner = f"{prefix}{name}.{_NAMED}"
            yield Key(inner, FieldInfo(annotation=named, default_factory=dict), named)
            yield from _walk(named, f"{inner}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model among the members of an annotation."""
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def _members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; of any other type, the type itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


_WORDS = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    dict: "mapping with text keys",
    Any: "anything",
}


def _describe_member(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe_type(annotation)
    if origin is Literal:
        values = ", ".join(map(str, arguments))
        return f"one of {values}" if len(arguments) > 1 else values
    if origin is tuple and Ellipsis not in arguments:
        return f"[{', '.join(map(describe_type, arguments))}]"
    if origin in (list, tuple):
        item = describe_type(arguments[0])
        return f"list of ({item})" if " " in item else f"list of {item}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section with keys"
    return _WORDS.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))


def _describe_bounds(metadata: list[Any]) -> str:
    bounds: list[str] = []
    for item in metadata:
        match item:
            case annotated_types.Ge(ge=bound):
                bounds.append(f"at least {bound}")
            case annotated_types.Gt(gt=bound):
                bounds.append(f"above {bound}")
            case annotated_types.Le(le=bound):
                bounds.append(f"at most {bound}")
            case annotated_types.Lt(lt=bound):
                bounds.append(f"below {bound}")
            case _:
                continue
    return " and ".join(bounds)
