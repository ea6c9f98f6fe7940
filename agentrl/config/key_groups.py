"""What a group of foreign keys is: keys of verl and AReaL that only say something together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Contradiction(Exception):
    """Keys that do not go together.

    Args:
        keys: as they were written; the reason is about the first.
    """

    def __init__(self, keys: tuple[str, ...], reason: str, fix: str) -> None:
        super().__init__(reason)
        self.keys, self.reason, self.fix = keys, reason, fix


class View(Protocol):
    """The configuration as far as it is read."""

    def foreign(self, name: str) -> Any:
        """The value of a foreign key, None if it was not given."""
        ...

    def given(self, key: str) -> Any:
        """The value of a key here, under whatever name it was given; None if it was not."""
        ...

    def value(self, key: str) -> Any:
        """The same, or the default."""
        ...

    def written(self, key: str) -> str:
        """The name under which a key here was given."""
        ...


@dataclass(frozen=True, slots=True)
class Group:
    """Foreign keys that mean something together.

    Attributes:
        system: whose they are.
        names: the keys.
        gives: the keys here that may come of them. If a later file or override says one of these itself, and none of
            the names, it has the last word, and the group none.
        needs: keys here that count too. If a later file or override changes one, the group is read again.
        read: the keys here and their values; raises `Contradiction`.
        meaning: what they come to, in words.
    """

    system: str
    names: tuple[str, ...]
    gives: tuple[str, ...]
    needs: tuple[str, ...]
    read: Callable[[View], Mapping[str, Any]]
    meaning: str


def flag(view: View, name: str) -> bool | None:
    """The value of a foreign switch, None if it was not given.

    Raises:
        Contradiction: it is neither true nor false.
    """
    value = view.foreign(name)
    if value is not None and not isinstance(value, bool):
        raise Contradiction((name,), f"expected true or false; got {value!r}", "write true or false")
    return value


def is_count(value: Any) -> bool:
    """Whether it is a whole number, at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_count(name: str, value: Any) -> None:
    """Refuses a value that was given and is no count.

    Raises:
        Contradiction: it is none.
    """
    if value is not None and not is_count(value):
        raise Contradiction((name,), f"expected integer, at least 1; got {value!r}", "write such a value")


OVERLONG_KEYS = ("algorithm.overlong_buffer_len", "algorithm.overlong_penalty_factor")
OVERLONG_MEANING = (
    "algorithm.overlong_buffer_len and algorithm.overlong_penalty_factor; what counts is the longest turn"
)


def overlong(names: tuple[str, str, str]) -> Callable[[View], Mapping[str, Any]]:
    """Reads a penalty for length: its switch, the length of its buffer, and how much an answer may lose."""
    switch, *details = names

    def read(view: View) -> Mapping[str, Any]:
        if not flag(view, switch):
            return {}
        for name in details:
            if view.foreign(name) is None:
                raise Contradiction((switch, name), f"is true, but {name} is not given", f"set {name}")
        return {key: view.foreign(name) for key, name in zip(OVERLONG_KEYS, details, strict=True)}

    return read


LORA_KEYS = ("model.lora_rank", "model.lora_alpha", "model.target_modules")
LORA_MEANING = "model.lora_rank, model.lora_alpha and model.target_modules"

CLIP_KEYS = ("actor.clip_ratio_low", "actor.clip_ratio_high")
CLIP = "the ratio is clipped at 1 - actor.clip_ratio_low and 1 + actor.clip_ratio_high"


def clip_range(both: str, low: str, high: str) -> Callable[[View], Mapping[str, Any]]:
    """Reads two bounds, where one key may give both."""

    def read(view: View) -> Mapping[str, Any]:
        bounds = dict(zip(CLIP_KEYS, (low, high), strict=True))
        values = {
            key: view.foreign(name) if view.foreign(name) is not None else view.foreign(both)
            for key, name in bounds.items()
        }
        return {key: value for key, value in values.items() if value is not None}

    return read
