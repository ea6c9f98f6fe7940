"""Functions looked up by the name a config uses; a new one registers itself from any module."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, metadata
from typing import Generic, TypeVar

from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., object])


def describe(value: object) -> str:
    """What a function returned, in a few words for the message that it should have returned something else."""
    match value:
        case Tensor():
            return f"a tensor {list(value.shape)}"
        case tuple() | list() if len(value) <= 4:
            return f"({', '.join(map(describe, value))})"
        case _:
            return f"a {type(value).__name__}"


class UnknownNameError(ValueError):
    """A config names something that nothing registered; the message lists what is known."""


class Registry(Generic[Function]):
    """Names to functions of one kind. Names are unique: a second function under a taken name is an error.

    Args:
        kind: what the functions are, for messages.
        entry_points: group of entry points through which other packages offer functions of this kind.
    """

    def __init__(self, kind: str, entry_points: str = "") -> None:
        self.kind = kind
        self._entry_points = entry_points
        self._functions: dict[str, Function] = {}

    def register(self, *names: str) -> Callable[[Function], Function]:
        """Decorator: makes the function available under each of `names`.

        Raises:
            ValueError: another function already has one of the names.
        """

        def add(function: Function) -> Function:
            for name in names:
                if self._functions.setdefault(name, function) is not function:
                    raise ValueError(f"the {self.kind} {name!r} is already registered: choose another name")
            return function

        return add

    def get(self, name: str) -> Function:
        """The function registered as `name`, offered as an entry point of that name, or named by its dotted path,
        `package.module:function`.

        Raises:
            UnknownNameError: no such name.
            ImportError, AttributeError: a dotted path leads nowhere.
        """
        module, dotted, attribute = name.partition(":")
        if dotted:
            function: Function = getattr(import_module(module), attribute)
            return function
        if name not in self._functions and self._entry_points:
            for entry_point in metadata.entry_points(group=self._entry_points, name=name):
                self._functions.setdefault(name, entry_point.load())
        if name not in self._functions:
            known = ", ".join(self.names())
            raise UnknownNameError(f"unknown {self.kind} {name!r}: use one of {known}, or register it first")
        return self._functions[name]

    def names(self) -> tuple[str, ...]:
        """All registered names, sorted."""
        return tuple(sorted(self._functions))
