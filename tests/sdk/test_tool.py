"""`@tool`: what the model is told, and what becomes of its arguments."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from agentrl.sdk import Env, ToolError, tool
from agentrl.sdk.tool import BoundTool
from tests.support.asynchrony import asynchronous


class Unit(Enum):
    METRE = "m"
    FOOT = "ft"


class Point(BaseModel):
    x: float
    y: float = 0.0


class Shop(Env):
    def __init__(self) -> None:
        self.log: list[Any] = []

    @property
    def connection(self) -> str:
        raise RuntimeError("not connected: this must not be touched")

    @tool
    async def search(self, query: str, limit: int = 5, *, exact: bool = False) -> str:
        """Searches the shop
        for things.

        Not told to the model.

        Args:
            query: what to look for.
            limit (int): most results.
        """
        self.log.append((query, limit, exact))
        return f"{limit} of {query}"

    @tool
    async def measure(self, unit: Unit, mode: Literal["fast", "slow"], tags: list[str] | None = None) -> int:
        self.log.append((unit, mode, tags))
        return 42

    @tool
    async def go(self, to: Point) -> str:
        """Goes there."""
        return f"{type(to).__name__} {to.x} {to.y}"

    async def helper(self) -> None: ...


class BiggerShop(Shop):
    @tool
    async def buy(self, item: str) -> str:
        """Buys."""
        return item


def tools(env: Env) -> dict[str, BoundTool]:
    return env.tools()


def function(name: str) -> dict[str, Any]:
    return tools(BiggerShop())[name].spec["function"]


def test_only_marked_methods_are_tools_in_the_order_of_their_definition() -> None:
    assert list(tools(BiggerShop())) == ["search", "measure", "go", "buy"]


def test_the_first_paragraph_of_the_docstring_describes_a_tool() -> None:
    assert function("search")["description"] == "Searches the shop for things."
    assert function("measure")["description"] == ""


def test_type_hints_defaults_and_docstring_make_the_schema() -> None:
    assert tools(Shop())["search"].spec["type"] == "function"
    assert function("search")["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to look for."},
            "limit": {"type": "integer", "default": 5, "description": "most results."},
            "exact": {"type": "boolean", "default": False},
        },
        "required": ["query"],
    }


def test_enumerations_and_optional_lists_are_spelled_out() -> None:
    parameters = function("measure")["parameters"]
    assert parameters["properties"]["mode"]["enum"] == ["fast", "slow"]
    assert parameters["$defs"]["Unit"]["enum"] == ["m", "ft"]
    assert parameters["required"] == ["unit", "mode"]
    assert {"type": "array", "items": {"type": "string"}} in parameters["properties"]["tags"]["anyOf"]


def test_references_of_a_nested_model_resolve_within_the_parameters() -> None:
    parameters = function("go")["parameters"]
    assert parameters["properties"]["to"] == {"$ref": "#/$defs/Point"}
    assert parameters["$defs"]["Point"]["required"] == ["x"]


def test_what_one_environment_does_to_its_description_no_other_sees() -> None:
    one, other = tools(Shop()), tools(Shop())
    one["search"].spec["function"]["parameters"]["properties"].clear()
    assert tools(Shop())["search"].spec == other["search"].spec != one["search"].spec


@asynchronous
async def test_arguments_arrive_with_the_types_of_the_hints() -> None:
    shop = Shop()
    bound = tools(shop)
    assert await bound["search"]({"query": "nails", "limit": "3"}) == "3 of nails"
    assert await bound["measure"]({"unit": "ft", "mode": "slow"}) == "42"
    assert await bound["go"]({"to": {"x": 1}}) == "Point 1.0 0.0"
    assert shop.log == [("nails", 3, False), (Unit.FOOT, "slow", None)]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("search", {}, "search: query: Field required"),
        ("search", {"query": "a", "limit": "many"}, "search: limit: .*integer"),
        ("search", {"query": "a", "colour": 1}, "search: colour: Extra inputs"),
        ("search", {"query": 3}, "search: query: .*string"),
        ("measure", {"unit": "inch", "mode": "fast"}, "measure: unit: .*'m' or 'ft'"),
        ("go", {"to": {"y": 1}}, r"go: to\.x: Field required"),
    ],
)
@asynchronous
async def test_arguments_that_do_not_fit_are_the_models_mistake(
    name: str, arguments: dict[str, Any], says: str
) -> None:
    shop = Shop()
    with pytest.raises(ToolError, match=says):
        await tools(shop)[name](arguments)
    assert shop.log == []


def test_a_tool_must_be_async() -> None:
    with pytest.raises(TypeError, match="must be `async def`"):

        @tool
        def slow(self: Any, query: str) -> str:
            return query


def test_a_tool_needs_type_hints_and_is_told_for_which_arguments() -> None:
    with pytest.raises(TypeError, match="needs type hints for: limit, exact"):

        @tool
        async def search(self: Any, query: str, limit=5, exact=False) -> str:
            return query


def test_a_tool_names_every_argument() -> None:
    with pytest.raises(TypeError, match="can't take words, options"):

        @tool
        async def search(self: Any, *words: str, **options: int) -> str:
            return ""
