"""Guides without an engine: which tokens may come next in a value that fits a schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engine.guide import Guides
from agentrl.record.protocols import GenerateRequest
from tests.support.guides import allowed, guide_of

Fixture = Callable[..., Any]

PAIRS = {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 2, "maxItems": 4}


def test_there_is_no_whitespace_to_go_on_with_for_ever(tokenizer: Any, ask: Fixture) -> None:
    """Between two tokens of JSON at most one space, whatever the schema says about itself."""
    schema = {**PAIRS, "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": "[ ]*"}}
    guides = Guides(tokenizer, len(tokenizer))

    def reads(text: str) -> bool:
        guide = guide_of(guides, ask(schema))
        for token in tokenizer.encode(text, add_special_tokens=False):
            if token not in allowed(guide):
                return False
            guide.accept(token)
        return set(allowed(guide)) == set(ask(schema).stop_token_ids)

    assert reads("[1,2]") and reads("[1, 2]")
    assert not any(map(reads, ["[1,  2]", "[ 1,2]", " [1,2]", "[1,\n2]", "[1,2] ", "[1 ,2]"]))


def test_compiled_schemas_are_kept_within_a_bound(tokenizer: Any, ask: Fixture) -> None:
    guides = Guides(tokenizer, len(tokenizer))
    for number in range(100):
        guide_of(guides, ask({"const": number}))
        guide_of(guides, ask({"const": 0}))
    assert len(guides._compiled) == 64 and json.dumps({"const": 0}) in guides._compiled
    first, second = guide_of(guides, ask({"const": 0})), guide_of(guides, ask({"const": 0}))
    before = allowed(second)
    first.accept(allowed(first)[0])
    assert allowed(second) == before, "what one answer says does not move another one's guide"


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas whose values are short."""
    leaves = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(
            lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
            st.integers(-99, 99),
            st.integers(0, 99),
        ),
        st.builds(
            lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
            st.integers(0, 3),
            st.integers(0, 3),
        ),
        st.lists(
            st.text(max_size=5)
            | st.integers(-(10**15), 10**15)
            | st.decimals(-1000, 1000, places=5).map(float)
            | st.none(),
            min_size=1,
            max_size=4,
        ).map(lambda values: {"enum": values}),
    )

    def containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        arrays = st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2)
        )
        objects = st.builds(
            lambda properties, count: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:count],
                "additionalProperties": False,
            },
            st.dictionaries(st.text(max_size=4), inner, max_size=3),
            st.integers(0, 3),
        )
        return arrays | objects | st.lists(inner, min_size=1, max_size=3).map(lambda ways: {"anyOf": ways})

    return st.recursive(leaves, containers, max_leaves=6)


@settings(max_examples=150, deadline=None)
@given(schemas(), st.integers(0, 2**32))
def test_any_walk_over_allowed_tokens_ends_with_a_value(walker: Any, schema: dict[str, Any], seed: int) -> None:
    guides, tokenizer, end = walker
    random = np.random.default_rng(seed)
    request = GenerateRequest("r", np.zeros(1, np.int32), 9, 1.0, (end,), 0, json_schema=json.dumps(schema))
    guide = guide_of(guides, request)
    tokens: list[int] = []
    while True:
        token = int(random.choice(allowed(guide)))
        if token == end:
            break
        tokens.append(token)
        guide.accept(token)
        assert len(tokens) < 2000
    jsonschema.validate(json.loads(tokenizer.decode(tokens, clean_up_tokenization_spaces=False)), schema)


@pytest.fixture(scope="module")
def walker(tokenizer: Any) -> Any:
    return Guides(tokenizer, len(tokenizer)), tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>")
