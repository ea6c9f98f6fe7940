"""Tools: async methods that the model may call, described to it by their type hints and docstring."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from agentrl.record import ToolSpec

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__agentrl_tool__"


class ToolError(ValueError):
    """Tells the model that its call was wrong: it sees the message and the episode goes on.

    A tool whose own machinery fails raises `EnvError` instead.
    """


def tool(method: F) -> F:
    """Marks an async method of an `Env` as a tool.

    The docstring's first paragraph describes it to the model; lines `name: text` under `Args:` its arguments.

    Raises:
        TypeError: the method is not async, or a parameter has no type hint or no name of its own (`*args`).
    """
    name = getattr(method, "__qualname__", repr(method))
    if not inspect.iscoroutinefunction(method):
        raise TypeError(f"tool {name} must be `async def`, so that a slow tool does not stop the other episodes")
    missing = [p.name for p in _parameters(method) if p.annotation is inspect.Parameter.empty]
    if missing:
        raise TypeError(f"tool {name} needs type hints for: {', '.join(missing)}")
    variadic = [p.name for p in _parameters(method) if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)]
    if variadic:
        raise TypeError(f"tool {name} can't take {', '.join(variadic)}: name each argument the model may pass")
    setattr(method, _MARK, True)
    return method


@dataclass(frozen=True, slots=True)
class BoundTool:
    """A tool of one environment: its specification and a checked way to call it."""

    name: str
    spec: ToolSpec
    _call: Callable[..., Any]
    _arguments: type[BaseModel]

    async def __call__(self, arguments: dict[str, Any]) -> str:
        """Runs the tool.

        Raises:
            ToolError: arguments that do not fit the tool's signature.
        """
        try:
            checked = self._arguments.model_validate(arguments)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ToolError(f"{self.name}: {problems}") from None
        values = {key: getattr(checked, key) for key in type(checked).model_fields}
        return str(await self._call(**values))


def bound_tools(owner: object) -> dict[str, BoundTool]:
    """The tools of an object, by name, in the order of their definition."""
    names = [name for cls in reversed(type(owner).__mro__) for name in vars(cls)]
    tools = {}
    for name in dict.fromkeys(names):
        if getattr(getattr(type(owner), name, None), _MARK, False):
            tools[name] = _bind(name, getattr(owner, name))
    return tools


def _bind(name: str, method: Any) -> BoundTool:
    spec, arguments = _described(name, getattr(method, "__func__", method), inspect.getdoc(method) or "")
    return BoundTool(name, copy.deepcopy(spec), method, arguments)


@functools.lru_cache(maxsize=1024)
def _described(name: str, function: Any, doc: str) -> tuple[ToolSpec, type[BaseModel]]:
    """Once for each function, though an environment is built for each episode: a model class takes a millisecond."""
    description, about = _docstring(doc)
    hints = get_type_hints(function)
    fields: dict[str, Any] = {}
    for parameter in _parameters(function):
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    schema = arguments.model_json_schema()
    properties = {key: _untitled(value) for key, value in schema.get("properties", {}).items()}
    for key, text in about.items():
        if key in properties:
            properties[key]["description"] = text
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": schema.get("required", [])}
    if "$defs" in schema:
        parameters["$defs"] = schema["$defs"]
    specification = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": specification}, arguments


def _parameters(method: Any) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(method).parameters.values() if p.name != "self"]


def _untitled(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "title"}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    head, _, tail = text.partition("Args:")
    description = " ".join(head.split("\n\n")[0].split())
    about = {m[1]: m[2].strip() for m in re.finditer(r"^\s*(\w+)(?:\s*\([^)]*\))?:\s*(.+)$", tail, re.MULTILINE)}
    return description, about
