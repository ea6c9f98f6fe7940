"""What verl's and AReaL's keys are here: the kinds of rows in the two tables, and the tables in one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


class _NotGiven:
    """A value that amounts to leaving the key out."""

    def __repr__(self) -> str:
        return "nothing"


NOT_GIVEN = _NotGiven()
"""What a conversion returns for a value that says the same as leaving the key out, such as verl's -1 for "off"."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """A key that has other names here."""

    name: str
    keys: tuple[str, ...]
    """The keys here that take its value."""
    convert: Callable[[Any], Any] | None = None
    """The value here; raises ValueError, with the reason, for one that cannot be said here. Null is only passed to it
    with `takes_null`; otherwise null is as good as leaving the key out, here as there."""
    takes_null: bool = False
    shared: bool = False
    """The name is a key here too, and only some values are the other's. Where the conversion leaves a value as it is,
    it is agentrl's own."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A key that agentrl has no counterpart of, save that it always does what some of its values say."""

    name: str
    values: tuple[Any, ...]
    """What may be written."""
    why: str

    def allows(self, value: Any) -> bool:
        """Whether `value` is one of them; 0 and 0.0 are one number, false is none."""
        return any(value == own and isinstance(value, bool) == isinstance(own, bool) for own in self.values)


@dataclass(frozen=True, slots=True)
class Absent:
    """A key, or a whole section, without a counterpart."""

    name: str
    why: str


Row = Renamed | Fixed | Absent


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A row, and whose name it is."""

    system: str
    row: Row

    @property
    def name(self) -> str:
        return self.row.name

    def meaning(self) -> str:
        """What the key is here, in words."""
        match self.row:
            case Renamed(keys=keys):
                return f"{self.system}'s name for {', '.join(keys)}"
            case Fixed(values=values, why=why):
                return f"{self.system}'s; {why}, so it may only be {show_any(values)}"
            case Absent(why=why):
                return f"{self.system}'s; no counterpart: {why}"


@lru_cache(maxsize=1)
def foreign_keys() -> dict[str, ForeignKey]:
    """Every row by its dotted name. Sections come after the keys in them, which may say more."""
    from agentrl.config.areal_names import AREAL
    from agentrl.config.verl_names import VERL

    rows = [ForeignKey(system, row) for system, table in (("verl", VERL), ("AReaL", AREAL)) for row in table]
    return {key.name: key for key in sorted(rows, key=lambda key: -key.name.count("."))}


def flag(value: Any) -> bool:
    """`value`, which must be true or false.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def show(value: Any) -> str:
    """A value as it would stand in a file."""
    from agentrl.config.yaml_text import to_inline_yaml

    return to_inline_yaml(value)


def show_any(values: Iterable[Any]) -> str:
    """`true`, or `0 or null`."""
    return " or ".join(map(show, values))
