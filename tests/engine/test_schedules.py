"""Random schedules: whatever is shared, evicted, aborted or updated, each answer is what it would be alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.engine.attention import ENGINE_ATTENTION
from agentrl.engine.batch import ContinuousBatch
from agentrl.engine.sequence import Sequence
from agentrl.record import GuideError
from agentrl.record.protocols import GenerateRequest, GenerateResult

Fixture = Callable[..., Any]

LONGEST = 160


class Play:
    """A batch that is driven step by step, and what it delivered."""

    def __init__(self, model: Any, **sizes: int) -> None:
        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation(ENGINE_ATTENTION)
        self.bound = sizes["kv_cache_tokens"]
        self.batch = ContinuousBatch(self.model, max_model_len=LONGEST, **sizes)
        self.version = 0
        self.results: dict[str, GenerateResult] = {}

    def submit(self, request: GenerateRequest) -> None:
        self.batch.waiting.append(Sequence(request, self._deliver))

    def step(self) -> None:
        self.batch.step(self.version)
        assert self.batch.kv_tokens <= self.bound
        assert len(self.batch.running) <= self.batch._cache.rows

    def abort(self, request_id: str) -> None:
        for sequence in self.batch.remove({request_id}):
            sequence.finish("abort")

    def update(self, model: Any) -> None:
        self.model.load_state_dict(model.state_dict())
        self.batch.preempt()
        self.version += 1

    def finish(self) -> None:
        while self.batch.waiting or self.batch.running:
            before = self.batch.generated_tokens
            self.step()
            assert self.batch.generated_tokens > before

    def _deliver(self, result: GenerateResult | GuideError) -> None:
        assert isinstance(result, GenerateResult)
        assert result.request_id not in self.results
        self.results[result.request_id] = result


ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 2), st.integers(1, 70), st.integers(1, 40), st.integers(1, 5)),
    st.tuples(st.just("go on"), st.integers(0, 10), st.integers(0, 20), st.integers(1, 20)),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("update")),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(ACTIONS, min_size=1, max_size=25),
    rows=st.integers(1, 20),
    kv_cache_tokens=st.integers(LONGEST, 4000),
    max_prefill_tokens=st.sampled_from([1, 60, 4096]),
)
def test_every_answer_is_what_it_would_be_alone(
    actions: list[Any],
    rows: int,
    kv_cache_tokens: int,
    max_prefill_tokens: int,
    models: list[Any],
    reference_logprobs: Fixture,
    prompt: Fixture,
) -> None:
    play = Play(models[0], max_batch_size=rows, kv_cache_tokens=kv_cache_tokens, max_prefill_tokens=max_prefill_tokens)
    requests: dict[str, GenerateRequest] = {}

    def ask(ids: list[int], max_tokens: int) -> None:
        name, ids = str(len(requests)), ids[: LONGEST - max_tokens]
        requests[name] = GenerateRequest(name, np.array(ids, np.int32), max_tokens, 1.0, (), seed=len(requests))
        play.submit(requests[name])

    for action in actions:
        match action:
            case "ask", which, length, max_tokens, count:
                for _ in range(count):
                    ask(prompt(70, which)[:length], max_tokens)
            case "go on", which, extra, max_tokens:
                if play.results:
                    result = list(play.results.values())[which % len(play.results)]
                    before = requests[result.request_id].token_ids.tolist()
                    ask([*before, *result.token_ids.tolist(), *prompt(20)[:extra]], max_tokens)
            case "step", count:
                for _ in range(count):
                    play.step()
            case "abort", which:
                play.abort(str(which))
            case _:
                play.update(models[(play.version + 1) % len(models)])
    play.finish()

    assert play.results.keys() == requests.keys()
    assert play.batch.generated_tokens == sum(len(result.token_ids) for result in play.results.values())
    for name, request in requests.items():
        result = play.results[name]
        for version in set(result.versions.tolist()):
            own = result.versions == version
            model = models[version % len(models)]
            expected = reference_logprobs(model, request.token_ids.tolist(), result.token_ids)
            np.testing.assert_allclose(result.logprobs[own], expected[own], atol=1e-4)
        versions = set(result.versions.tolist())
        if len(versions) == 1:
            # Alone, in a batch with room for nothing to reuse.
            alone = Play(models[versions.pop() % len(models)], max_batch_size=1, kv_cache_tokens=LONGEST)
            alone.submit(request)
            alone.finish()
            count = len(result.token_ids)
            assert alone.results[name].token_ids[:count].tolist() == result.token_ids.tolist()
            assert alone.batch.cached_tokens == 0
            if result.finish_reason != "abort":
                assert count == request.max_tokens


@pytest.fixture(scope="module")
def models(new_model: Fixture) -> list[Any]:
    return [new_model("qwen3", seed=seed) for seed in range(2)]
