"""Answers of vLLM guided by a JSON schema: whole values, log-probs of the restricted distribution, typed refusals."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import xgrammar
from transformers import AutoTokenizer

from agentrl.engine.vllm_local import reports_versions
from agentrl.record import GuideError
from agentrl.tiny import tiny_model_path
from tests.vllm.conftest import Background, prompt, request_of, until_sampling

TOKENIZER: Any = AutoTokenizer.from_pretrained(tiny_model_path())
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
OTHER_END = TOKENIZER.convert_tokens_to_ids("<|endoftext|>")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["a friend", "an enemy", 7]},
        "ways": {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "maxItems": 3},
    },
    "required": ["name", "kind", "ways"],
    "additionalProperties": False,
}
LONG = {"type": "array", "items": {"enum": ["one", "two", "three"]}, "minItems": 60, "maxItems": 60}


def guided(number: int, schema: Any = SCHEMA, **changes: Any) -> Any:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    values = {"json_schema": text, "stop_token_ids": (END,), "max_tokens": 200, **changes}
    return request_of(prompt(6 + number % 7, number), number, **values)


def value_of(result: Any) -> Any:
    assert result.finish_reason == "stop"
    return json.loads(TOKENIZER.decode(result.token_ids[:-1].tolist(), clean_up_tokenization_spaces=False))


def test_every_answer_that_ends_is_a_value_and_others_stay_as_they_are(
    engine: Any, publish: Any, weights: list[Any], background: Background
) -> None:
    plain = [request_of(prompt(9, i), 1000 + i, max_tokens=30) for i in range(4)]

    async def play() -> tuple[list[Any], list[Any], list[Any]]:
        await publish(engine, weights[0])
        alone = await asyncio.gather(*map(engine.generate, plain))
        calls = [
            engine.generate(
                guided(i, temperature=1 + i % 2, stop_token_ids=(END, OTHER_END) if i % 3 else (OTHER_END,))
            )
            for i in range(24)
        ]
        *beside, last = await asyncio.gather(*map(engine.generate, plain), asyncio.gather(*calls))
        return alone, beside, last

    alone, beside, results = background.run(play())
    for result in results:
        jsonschema.validate(value_of(result), SCHEMA)
        assert result.token_ids[-1] in (END, OTHER_END)
    assert len({result.token_ids.tobytes() for result in results}) > 10
    assert [r.token_ids.tolist() for r in beside] == [r.token_ids.tolist() for r in alone]


def test_log_probs_are_of_the_distribution_over_the_allowed_tokens(
    engine: Any, publish: Any, weights: list[Any], background: Background
) -> None:
    """After a value vLLM allows the model's own ends besides the request's."""
    schema, ends = {"enum": ["yes", "no", "maybe"]}, (END, OTHER_END)
    requests = [guided(i, schema, temperature=1.3, stop_token_ids=ends) for i in range(8)]

    async def play() -> list[Any]:
        await publish(engine, weights[0])
        return await gather(engine, requests)

    for request, result in zip(requests, background.run(play()), strict=True):
        expected = restricted_logprobs(weights[0], request, result)
        assert min(expected) < -0.1, "there has to be a choice"
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


@torch.no_grad()
def restricted_logprobs(model: Any, request: Any, result: Any) -> list[float]:
    """Of each token, by transformers' forward and a softmax over those that xgrammar allows."""
    tokens = xgrammar.TokenizerInfo.from_huggingface(TOKENIZER, vocab_size=len(TOKENIZER))
    compiled = xgrammar.GrammarCompiler(tokens).compile_json_schema(request.json_schema, any_whitespace=False)
    matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(request.stop_token_ids))
    bits = xgrammar.allocate_token_bitmask(1, len(TOKENIZER))
    ids = torch.tensor([[*request.token_ids.tolist(), *result.token_ids.tolist()]])
    logits = model(input_ids=ids).logits[0, len(request.token_ids) - 1 : -1].float() / request.temperature
    logprobs = []
    for row, token in zip(logits, result.token_ids.tolist(), strict=True):
        matcher.fill_next_token_bitmask(bits)
        choice = np.flatnonzero(np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")).tolist()
        logprobs.append(float(torch.log_softmax(row[choice], -1)[choice.index(token)]))
        assert matcher.accept_token(token)
    return logprobs


def test_values_stay_whole_over_updates(engine: Any, publish: Any, weights: list[Any], background: Background) -> None:
    """Where vLLM reports versions, values go on under the new weights; where answers come in parts they begin anew."""

    async def play() -> tuple[list[Any], bool]:
        await publish(engine, weights[0])
        calls = [asyncio.create_task(engine.generate(guided(i, LONG, max_tokens=700))) for i in range(6)]
        for number in range(2):
            await until_sampling(engine, calls[0])
            running = not any(call.done() for call in calls)
            await publish(engine, weights[number + 1])
        return await asyncio.gather(*calls), running

    results, running = background.run(play())
    assert running, "the updates have to come in the middle of the answers"
    assert (max(len(set(result.versions.tolist())) for result in results) > 1) == reports_versions()
    for result in results:
        jsonschema.validate(value_of(result), LONG)
        assert (np.diff(result.versions) >= 0).all() and len(result.logprobs) == len(result.token_ids)
        assert np.isfinite(result.logprobs).all()


def test_whitespace_does_not_go_on_for_ever(engine: Any, background: Background) -> None:
    results = background.run(gather(engine, [guided(i, LONG, max_tokens=700, temperature=2.0) for i in range(4)]))
    for result in results:
        text = TOKENIZER.decode(result.token_ids[:-1].tolist(), clean_up_tokenization_spaces=False)
        assert "  " not in text and "\n" not in text


async def gather(engine: Any, requests: list[Any]) -> list[Any]:
    return await asyncio.gather(*map(engine.generate, requests))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "not JSON"),
        ("[]", "use an object"),
        ('{"type": "text"}', "schema"),
        ('{"type": "array", "uniqueItems": true}', "not supported"),
        ('{"$ref": "#/nowhere"}', "schema"),
        ('{"type": "string", "pattern": "("}', "schema"),
    ],
)
def test_a_schema_that_vllm_refuses_is_a_typed_error_and_the_others_go_on(
    schema: str, message: str, engine: Any, background: Background
) -> None:
    async def play() -> Any:
        good = asyncio.create_task(engine.generate(guided(1)))
        with pytest.raises(GuideError, match=message):
            await engine.generate(guided(2, schema))
        return await good

    jsonschema.validate(value_of(background.run(play())), SCHEMA)
