"""A configuration in verl's or AReaL's key names, read as one in agentrl's.

Each layer (a file, or all overrides) is translated before it is merged, so that what is wrong with it is said at the
line that was written, and so that the last word on a key counts, under whatever name it was said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from agentrl.config.errors import Problem
from agentrl.config.foreign import NOT_GIVEN, Absent, Fixed, ForeignKey, Renamed, foreign_keys, show, show_any
from agentrl.config.foreign_groups import GROUPS
from agentrl.config.key_groups import Contradiction, Group
from agentrl.config.keys import keys, nearest_key
from agentrl.config.layers import Layer, has_no_null
from agentrl.config.tree import ABSENT, at, leaves, put, take

_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
"""A value that is another key's, as OmegaConf writes it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A value that a layer gives a key here, and the names under which it was written."""

    value: Any
    names: tuple[str, ...]


@dataclass(slots=True)
class Known:
    """What the layers up to here say (the `View` of `key_groups`).

    Attributes:
        foreign_values: of the keys that only mean something in groups.
        given_claims: keys here that were written under one name or another.
        derived_claims: keys here that a group of foreign keys came to, and the group.
        contradictions: of groups, until a later layer resolves them.
        origins: where each key was written last.
    """

    foreign_values: dict[str, Any] = field(default_factory=dict)
    given_claims: dict[str, Claim] = field(default_factory=dict)
    derived_claims: dict[str, tuple[Group, Claim]] = field(default_factory=dict)
    contradictions: dict[Group, Problem] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def foreign(self, name: str) -> Any:
        return self.foreign_values.get(name)

    def given(self, key: str) -> Any:
        return self.given_claims[key].value if key in self.given_claims else None

    def value(self, key: str) -> Any:
        if key in self.derived_claims:
            return self.derived_claims[key][1].value
        given = self.given(key)
        return keys()[key].field.get_default(call_default_factory=True) if given is None else given

    def written(self, key: str) -> str:
        return self.given_claims[key].names[0] if key in self.given_claims else key


class Importer:
    """Translates layers one after the other, the lowest first: a later one may change part of what a group of keys
    says."""

    def __init__(self) -> None:
        self._problems: list[Problem] = []
        self._known = Known()

    @property
    def problems(self) -> list[Problem]:
        """What cannot be translated."""
        return [*self._problems, *self._known.contradictions.values()]

    @property
    def notes(self) -> list[str]:
        """What was translated and counts in the end, one line for each name or group of names."""
        claims = self._known.given_claims | {key: claim for key, (_, claim) in self._known.derived_claims.items()}
        lines: dict[tuple[str, ...], list[str]] = {}
        for key, claim in claims.items():
            if claim.names != (key,):
                lines.setdefault(claim.names, []).append(f"{key}: {show(claim.value)}")
        return [f"translated: {', '.join(names)} -> {', '.join(found)}" for names, found in lines.items()]

    def translate(self, layer: Layer) -> Layer:
        """The layer under agentrl's names. What cannot be translated is left out, and a problem."""
        return _LayerReading(layer, self._known, self._problems).result()


class _LayerReading:
    def __init__(self, layer: Layer, known: Known, problems: list[Problem]) -> None:
        self._layer = layer
        self._known = known
        self._problems = problems
        self._values = deepcopy(layer.values)
        self._names: set[str] = set()
        self._claims: dict[str, Claim] = {}
        self._takes_back: set[str] = set()
        known.origins |= layer.origins

    def result(self) -> Layer:
        self._take_back()
        self._take_groups()  # first: a row may be about the whole section that a key of a group stands in
        renamed = [found for key in foreign_keys().values() for found in self._row(key)]
        given = [(key, value) for key, value in leaves(self._values) if key in keys()]
        own = [(key, Claim(value, (key,))) for key, value in given if value is not None or not has_no_null(key)]
        for key, claim in (*own, *renamed):
            self._claim(key, claim)
        self._settle()
        for group in GROUPS:
            self._group(group)
        self._leftovers()
        origins = dict(self._layer.origins)
        for key, claim in self._claims.items():
            if claim.names != (key,) and put(self._values, key, claim.value):
                origins[key] = f"{self._layer.origin(claim.names[0])}, as {', '.join(claim.names)}".removeprefix(", ")
        return Layer(self._values, origins, self._takes_back - self._claims.keys())

    def _take_back(self) -> None:
        """Forgets what lower layers said of the keys and sections that are null here and have no null."""
        known = self._known
        for name in [name for name, value in leaves(self._values) if value is None and has_no_null(name)]:
            below = f"{name}."
            claims = known.given_claims | {key: claim for key, (_, claim) in known.derived_claims.items()}
            keys_said = [
                key
                for key, claim in claims.items()
                if f"{key}.".startswith(below) or any(said.startswith(below) for said in claim.names)
            ]
            names_said = [said for said in known.foreign_values if said.startswith(below)]
            for key in keys_said:
                self._forget(key)
            for said in names_said:
                del known.foreign_values[said]
                self._names.add(said)
            if keys_said or names_said:
                self._takes_back.add(name)
                take(self._values, name)

    def _forget(self, key: str) -> None:
        """What lower layers said of a key."""
        self._known.given_claims.pop(key, None)
        self._known.derived_claims.pop(key, None)
        self._takes_back.add(key)

    def _row(self, key: ForeignKey) -> list[tuple[str, Claim]]:
        """What a row of the tables comes to in this layer."""
        row, value = key.row, at(self._values, key.name)
        if value is ABSENT or (_is_own(key.name, value) and not (isinstance(row, Renamed) and row.shared)):
            return []
        match row:
            case Renamed():
                return self._renamed(row, value)
            case Fixed():
                if not row.allows(self._taken(key.name)):
                    reason = f"is {show(value)}, and {key.system}'s {key.name} has no counterpart: {row.why}"
                    self._problem(key.name, reason, f"remove it, or set it to {show_any(row.values)}")
            case Absent():
                taken = self._taken(key.name)
                names = _unsupported(key.name, taken)
                if not names:
                    return []
                has, them = ("has", "it") if len(names) == 1 else ("have", "them")
                reason = f"{key.system}'s {', '.join(names)} {has} no counterpart: {row.why}"
                self._problem(names[0], reason, f"remove {them}")
        return []

    def _renamed(self, row: Renamed, value: Any) -> list[tuple[str, Claim]]:
        value = self._resolved(row.name, value)
        written = row.name
        try:
            converted = value if row.convert is None or (value is None and not row.takes_null) else row.convert(value)
        except ValueError as error:
            self._taken(row.name)
            self._problem(row.name, f"is {show(value)}: {error}", f"correct it, or write {row.keys[0]}", row.keys)
            return []
        if row.keys == (row.name,):
            if converted == value and value is not None:
                return []
            written = f"{row.name} {show(value)}"
        self._taken(row.name)
        if converted is NOT_GIVEN or converted is None:
            for key in row.keys:
                claim = self._known.given_claims.get(key)
                if claim is not None and any(said.partition(" ")[0] == row.name for said in claim.names):
                    self._forget(key)
            return []
        return [(key, Claim(converted, (written,))) for key in row.keys]

    def _resolved(self, name: str, value: Any) -> Any:
        """The value that `${a.b}` stands for; None, and a problem, if there is no such key."""
        seen: set[str] = set()
        while isinstance(value, str) and (reference := _REFERENCE.fullmatch(value)):
            value = at(self._layer.values, reference[1])
            if value is ABSENT or reference[1] in seen:
                reason = f"refers to {reference[1]}, which the same file does not give"
                self._problem(name, reason, "write the value itself")
                return None
            seen.add(reference[1])
        return value

    def _claim(self, key: str, claim: Claim) -> None:
        first = self._claims.setdefault(key, claim)
        if show(first.value) != show(claim.value) and first.value != claim.value:
            itself = first.names == (key,)
            other = f"{key} itself is" if itself else f"{', '.join(first.names)} makes it"
            reason = f"means that {key} is {show(claim.value)}, but {other} {show(first.value)}"
            self._problem(claim.names[0], reason, f"keep one of the two; agentrl's name is {key}", (*first.names, key))

    def _take_groups(self) -> None:
        """Takes down the keys of this layer that only mean something in groups."""
        for name in (name for group in GROUPS for name in group.names):
            value = self._taken(name)
            if value is not ABSENT:
                self._known.foreign_values.pop(name, None)
                value = self._resolved(name, value)
                if value is not None:
                    self._known.foreign_values[name] = value

    def _settle(self) -> None:
        """Takes down what this layer gives. Where that is what a group in lower layers is about, the group has had its
        day."""
        for key, claim in self._claims.items():
            self._known.given_claims[key] = claim
            self._known.derived_claims.pop(key, None)
        for group in GROUPS:
            if self._claims.keys().isdisjoint(set(group.gives) - set(group.needs)):
                continue
            if self._names.isdisjoint(group.names):
                self._known.contradictions.pop(group, None)
                for name in group.names:
                    self._known.foreign_values.pop(name, None)

    def _group(self, group: Group) -> None:
        changed = self._claims.keys() | self._takes_back
        if self._names.isdisjoint(group.names) and changed.isdisjoint(group.needs):
            return
        known = self._known
        known.contradictions.pop(group, None)
        present = tuple(name for name in group.names if name in known.foreign_values)
        try:
            derived = group.read(known) if present else {}
        except Contradiction as error:
            others = (*error.keys[1:], *group.needs)
            known.contradictions[group] = self._about(error.keys[0], error.reason, error.fix, others)
            return
        assert derived.keys() <= set(group.gives), (group.names, derived)
        for key in [key for key, (own, _) in known.derived_claims.items() if own is group and key not in derived]:
            self._forget(key)
        for key, value in derived.items():
            claim = Claim(value, present)
            self._claim(key, claim)
            known.derived_claims[key] = (group, claim)

    def _leftovers(self) -> None:
        """Names that are verl's or AReaL's by their section, or written with dots, and in no table."""
        for section in [name for name in self._values if name in _foreign_sections()]:
            for name, _ in leaves({section: self._values.pop(section)}):
                near = get_close_matches(name, _foreign_names(), n=1, cutoff=0.8) or [nearest_key(name)]
                fix = f"did you mean {near[0]}?" if near[0] else "remove it"
                self._problem(name, "unknown key: not agentrl's, and none of verl's or AReaL's that it knows", fix)
        for name in [name for name in self._values if name in _foreign_names()]:
            del self._values[name]
            below = ": {".join(name.split("."))
            fix = f"in a file, nest it: {below}: ...{'}' * name.count('.')} (dots are for the command line)"
            self._problem(name, "is written with dots", fix)

    def _taken(self, name: str) -> Any:
        value = take(self._values, name)
        if value is not ABSENT:
            self._names.add(name)
        return value

    def _problem(self, key: str, reason: str, fix: str, others: tuple[str, ...] = ()) -> None:
        self._problems.append(self._about(key, reason, fix, others))

    def _about(self, key: str, reason: str, fix: str, others: tuple[str, ...]) -> Problem:
        origin = self._layer.origin(key) or Layer(origins=self._known.origins).origin(key)
        return Problem(key, reason, fix, origin, tuple(name for name in others if name != key))


def _is_own(name: str, value: Any) -> bool:
    """Whether a name that is also in a table is agentrl's here. A section may be a plain key there."""
    here = keys().get(name)
    return here is not None and (here.section is None or isinstance(value, Mapping))


def _unsupported(name: str, value: Any) -> list[str]:
    """What to blame of a section that was found: the keys in it, if others of the section are known, else the whole;
    nothing if it asks for nothing."""
    if value in (None, {}):
        return []
    if isinstance(value, Mapping) and any(known.startswith(f"{name}.") for known in _foreign_names()):
        return [f"{name}.{key}" for key, _ in leaves(value)]
    return [name]


def foreign_meaning(name: str) -> str | None:
    """What a key of verl's or AReaL's is here, in words; None for any other name."""
    for group in GROUPS:
        if name in group.names:
            others = ", ".join(other for other in group.names if other != name)
            return f"{group.system}'s; {f'together with {others}: ' if others else ''}{group.meaning}"
    found = foreign_keys().get(name)
    return found.meaning() if found and name not in keys() else None


@lru_cache(maxsize=1)
def _foreign_names() -> frozenset[str]:
    return frozenset((*foreign_keys(), *(name for group in GROUPS for name in group.names))) - frozenset(keys())


@lru_cache(maxsize=1)
def _foreign_sections() -> frozenset[str]:
    """Top-level names that are not agentrl's."""
    return frozenset(name.partition(".")[0] for name in _foreign_names()) - frozenset(keys())
