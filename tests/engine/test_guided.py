"""Answers guided by a JSON schema: each one that ends is a value that fits it, sampled among the tokens it allows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.engine.guide import Guide, Guides
from agentrl.engine.sampling import restricted
from agentrl.record import EngineError, GuideError
from agentrl.tiny import tiny_model_path
from agentrl.weights.shm import ShmSender
from tests.support.guides import allowed, guide_of

Fixture = Callable[..., Any]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a friend", "an enemy", None, 7]},
        "home": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "maxLength": 8},
                "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
            },
            "required": ["town", "code"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "kind", "home"],
    "additionalProperties": False,
}
SCHEMAS = {
    "object": PERSON,
    "enum": {"enum": ["yes", "no", "maybe, perhaps"]},
    "array": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 2, "maxItems": 4},
    "any_of": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"const": "x"}, "maxItems": 3}]},
    "number": {"type": "integer", "minimum": 0, "maximum": 10**6},
    "reference": {
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
        "$ref": "#/$defs/tree",
    },
    "any_object": {"type": "object"},
    "anything": {},
}


@pytest.fixture(scope="module")
def model() -> Any:
    """The bundled model; it can write, but was not trained on JSON."""
    return AutoModelForCausalLM.from_pretrained(tiny_model_path(), dtype=torch.float32).eval()


@pytest.fixture
def start(model: Any, tokenizer: Any, start_engine: Fixture) -> Callable[..., Any]:
    """`async with start(max_batch_size=8) as engine`: an engine with model and tokenizer."""

    @asynccontextmanager
    async def begin(own: Any = model, **options: Any) -> AsyncIterator[Any]:
        options = {"max_batch_size": 16, "max_model_len": 512, "tokenizer": tokenizer, **options}
        async with start_engine(own, **options) as engine:
            yield engine

    return begin


def value_of(result: Any, tokenizer: Any) -> Any:
    """What an answer that has ended says."""
    assert result.finish_reason == "stop"
    return json.loads(tokenizer.decode(result.token_ids[:-1].tolist(), clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_that_ends_is_a_value_of_the_schema(
    name: str, start: Fixture, ask: Fixture, tokenizer: Any
) -> None:
    schema = SCHEMAS[name]
    requests = [
        ask(schema, seed=seed, temperature=temperature, request_id=f"{seed}-{temperature}")
        for seed in range(25)
        for temperature in (0.5, 1.0, 2.0)
    ]

    async def play() -> list[Any]:
        async with start(max_batch_size=40) as engine:
            return await asyncio.gather(*map(engine.generate, requests))

    results = asyncio.run(play())
    ended = [result for result in results if result.finish_reason == "stop"]
    for request, result in zip(requests, results, strict=True):
        if result.finish_reason == "stop":
            jsonschema.validate(value_of(result, tokenizer), schema)
            assert result.token_ids[-1] in request.stop_token_ids
        else:
            assert result.finish_reason == "length" and len(result.token_ids) == request.max_tokens
        assert np.isfinite(result.logprobs).all() and (result.logprobs <= 0).all()
    # Where a value may be of any length, a small model does not always find its end.
    assert len(ended) > (10 if name.startswith("any") and name != "any_of" else 70)
    assert len({result.token_ids.tobytes() for result in ended}) > 1


def test_greedy_and_truncated_answers_fit_too(start: Fixture, ask: Fixture, tokenizer: Any) -> None:
    ways = ({"temperature": 0.0}, {"top_k": 1}, {"top_k": 5}, {"top_p": 0.5})

    async def play() -> list[Any]:
        async with start() as engine:
            requests = [ask(PERSON, request_id=str(number), **way) for number, way in enumerate(ways)]
            return await asyncio.gather(*map(engine.generate, requests))

    results = asyncio.run(play())
    for result in results:
        jsonschema.validate(value_of(result, tokenizer), PERSON)
    assert results[0].token_ids.tolist() == results[1].token_ids.tolist()
    assert (results[0].logprobs == 0).all() and (results[1].logprobs == 0).all()


def test_log_probs_are_of_the_distribution_over_the_allowed_tokens(
    start: Fixture, ask: Fixture, model: Any, tokenizer: Any
) -> None:
    requests = [ask(PERSON, seed=seed, temperature=temperature) for seed, temperature in enumerate((1.0, 0.6, 1.7))]

    async def play() -> list[Any]:
        async with start() as engine:
            return await asyncio.gather(*map(engine.generate, requests))

    guides = Guides(tokenizer, len(tokenizer))
    for request, result in zip(requests, asyncio.run(play()), strict=True):
        expected = guided_logprobs(model, guide_of(guides, request), request, result)
        np.testing.assert_allclose(result.logprobs, expected, atol=2e-5)


@torch.no_grad()
def guided_logprobs(model: Any, guide: Guide, request: Any, result: Any) -> list[float]:
    """Of each token, by transformers' forward and a softmax over the allowed ones."""
    ids = [*request.token_ids.tolist(), *result.token_ids.tolist()]
    logits = model(input_ids=torch.tensor([ids])).logits[0, len(request.token_ids) - 1 : -1] / request.temperature
    logprobs = []
    for row, token in zip(logits, result.token_ids.tolist(), strict=True):
        choice = allowed(guide)
        logprobs.append(float(torch.log_softmax(row[choice], -1)[choice.index(token)]))
        if token not in request.stop_token_ids:
            guide.accept(token)
    return logprobs


def test_unguided_neighbours_get_the_same_tokens(start: Fixture, ask: Fixture) -> None:
    plain = [ask(seed=seed, request_id=f"p{seed}", temperature=1 + seed % 2, max_tokens=40) for seed in range(8)]
    guided = [ask(PERSON, seed=seed, request_id=f"g{seed}") for seed in range(8)]

    async def play(requests: list[Any]) -> dict[str, Any]:
        async with start() as engine:
            return {r.request_id: r for r in await asyncio.gather(*map(engine.generate, requests))}

    alone, mixed = (
        asyncio.run(play(plain)),
        asyncio.run(play([r for pair in zip(guided, plain, strict=True) for r in pair])),
    )
    only = asyncio.run(play(guided))
    for request_id, result in {**alone, **only}.items():
        assert mixed[request_id].token_ids.tolist() == result.token_ids.tolist()
        np.testing.assert_allclose(mixed[request_id].logprobs, result.logprobs, atol=2e-5)


def test_the_other_rows_logits_are_untouched() -> None:
    logits = torch.randn(3, 21)
    bits = np.packbits(np.arange(32) % 3 == 0, bitorder="little")
    found = restricted(logits, {1: bits})
    assert torch.equal(found[[0, 2]], logits[[0, 2]])
    free = torch.arange(21) % 3 == 0
    assert torch.equal(found[1, free], logits[1, free]) and (found[1, ~free] == -torch.inf).all()


def test_new_weights_and_a_full_memory_do_not_disturb_the_value(
    tmp_path: Path, start: Fixture, ask: Fixture, model: Any, tokenizer: Any, steps_of: Fixture
) -> None:
    """Answers go on where they were, under the new weights, after their keys and values were lost."""
    import copy

    new = copy.deepcopy(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3 * parameter.std())
    requests = [ask(PERSON, seed=seed) for seed in range(8)]

    async def play() -> list[Any]:
        async with start(max_batch_size=8, max_model_len=256, kv_cache_tokens=512) as engine:
            steps = steps_of(engine)
            steps.hold_at(9)
            calls = [asyncio.create_task(engine.generate(request)) for request in requests]
            await asyncio.to_thread(steps.reached)
            pause = asyncio.create_task(engine.pause())
            await asyncio.sleep(0)
            steps.release()
            await pause
            await engine.start_weight_update()
            await ShmSender(tmp_path, bucket_bytes=200_000).send(new.named_parameters(), engine.update_weights)
            await engine.finish_weight_update(3)
            await engine.resume()
            return await asyncio.gather(*calls)

    results = asyncio.run(play())
    assert any(set(result.versions.tolist()) == {0, 3} for result in results)
    guides = Guides(tokenizer, len(tokenizer))
    for request, result in zip(requests, results, strict=True):
        jsonschema.validate(value_of(result, tokenizer), PERSON)
        for version, weights in ((0, model), (3, new)):
            own = result.versions == version
            expected = np.array(guided_logprobs(weights, guide_of(guides, request), request, result))
            np.testing.assert_allclose(result.logprobs[own], expected[own], atol=2e-5)


def test_a_model_with_more_tokens_than_its_tokenizer(start: Fixture, ask: Fixture, model: Any, tokenizer: Any) -> None:
    """Rows that only pad the embeddings are never sampled, however likely the model finds them."""
    import copy

    padded = copy.deepcopy(model)
    padded.resize_token_embeddings(len(tokenizer) + 75, mean_resizing=False)
    with torch.no_grad():
        padded.get_input_embeddings().weight[len(tokenizer) :] = 3 * model.get_input_embeddings().weight.mean(0)

    async def play() -> list[Any]:
        async with start(padded) as engine:
            return await asyncio.gather(*(engine.generate(ask(PERSON, seed=seed)) for seed in range(10)))

    for result in asyncio.run(play()):
        jsonschema.validate(value_of(result, tokenizer), PERSON)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "use an object"),
        ("true", "use an object"),
        ('{"type": "text"}', "text"),
        ('{"$ref": "#/nowhere"}', "nowhere"),
        ('{"not": {"type": "string"}}', "not"),
        ('{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ('{"enum": []}', "Unsatisfiable"),
        ('{"type": "integer", "minimum": 5, "maximum": 3}', "minimum"),
        ('{"type": "string", "pattern": "("}', "unclosed group"),
        ('{"items": ' * 500 + "{}" + "}" * 500, "recursion"),
        ('{"maximum": 1e999}', "1e999 is not kept exactly"),
        ('{"enum": [-9223372036854775808]}', "not kept exactly"),
        ('{"enum": [123456789.123456789]}', "not kept exactly"),
        ('{"minimum": 1e-9}', "not kept exactly"),
        ('{"$ref": "#"}', "can't guide"),
    ],
)
def test_a_bad_schema_is_refused_with_the_reason_and_the_others_go_on(
    schema: str, message: str, start: Fixture, ask: Fixture
) -> None:
    async def play() -> Any:
        async with start() as engine:
            good = asyncio.create_task(engine.generate(ask(SCHEMAS["enum"], seed=1)))
            with pytest.raises(GuideError, match=message):
                await engine.generate(ask(schema, seed=2))
            return await good

    assert asyncio.run(play()).finish_reason == "stop"


def test_guided_requests_that_could_not_end_are_refused(
    start: Fixture, ask: Fixture, start_engine: Fixture, model: Any
) -> None:
    async def play() -> None:
        async with start() as engine:
            with pytest.raises(EngineError, match="without stop_token_ids"):
                await engine.generate(ask({}, stop=()))
            with pytest.raises(EngineError, match="would cut the value"):
                await engine.generate(ask({}, stop_texts=("x",)))
            cut = await engine.generate(ask(PERSON, max_tokens=3))
            assert cut.finish_reason == "length" and len(cut.token_ids) == 3
        async with start_engine(model) as engine:
            with pytest.raises(GuideError, match="no tokenizer"):
                await engine.generate(ask({}))

    asyncio.run(play())


def test_a_stop_token_that_is_text_ends_only_whole_values(start: Fixture, ask: Fixture, tokenizer: Any) -> None:
    (one,) = tokenizer.encode("1", add_special_tokens=False)

    async def play() -> list[Any]:
        async with start() as engine:
            requests = [ask(SCHEMAS["number"], seed=seed, stop=(one,)) for seed in range(10)]
            results = await asyncio.gather(*map(engine.generate, requests))
            # A value that can't be written without it: at its beginning, and in its middle.
            for value in (1, 71):
                with pytest.raises(GuideError, match="no token"):
                    await engine.generate(ask({"const": value}, stop=(one,)))
            return results

    for result in asyncio.run(play()):
        digits = tokenizer.decode(result.token_ids[:-1].tolist())
        assert result.token_ids[-1] == one and 0 <= int(digits) <= 10**6


def test_requests_can_be_aborted_before_and_after_their_schema_is_compiled(start: Fixture, ask: Fixture) -> None:
    async def play() -> tuple[Any, Any, Any]:
        async with start() as engine:
            early = asyncio.create_task(engine.generate(ask(PERSON, request_id="early")))
            other = asyncio.create_task(engine.generate(ask(PERSON, request_id="other")))
            await asyncio.sleep(0)
            await engine.abort(["early"])
            all_of_them = asyncio.create_task(engine.generate(ask({"const": 1}, request_id="all")))
            await asyncio.sleep(0)
            await engine.pause("abort")
            await engine.resume()
            return await early, await other, await all_of_them

    early, other, last = asyncio.run(play())
    assert early.finish_reason == "abort" and len(early.token_ids) == 0
    assert other.finish_reason == "abort"
    assert last.finish_reason == "abort" and len(last.token_ids) == 0


def test_a_closed_engine_refuses_guided_requests_as_any(start: Fixture, ask: Fixture) -> None:
    async def play() -> None:
        async with start() as engine:
            await engine.close()
            with pytest.raises(EngineError, match="closed"):
                await engine.generate(ask(PERSON))

    asyncio.run(play())
