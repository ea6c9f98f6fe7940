"""OpenAI's own SDK: what its exceptions say, and what becomes of a request that it gives up and sends again."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from agentrl.agents.external import openai_client
from agentrl.session import ChatFormat
from tests.support.asynchrony import asynchronous, until
from tests.support.frameworks import ANSWER, QUESTION
from tests.support.gateway import episode
from tests.support.rollout import HeldEngine
from tests.support.scripted import assert_trained_as_sampled, says, turns

REQUEST: Any = {"model": "any", "messages": [{"role": "user", "content": QUESTION}]}


@asynchronous
async def test_refusals_are_the_sdks_own_exceptions(chat_format: ChatFormat) -> None:
    async with episode(chat_format, turns(chat_format, ANSWER)) as client, openai_client(client.session) as own:
        with pytest.raises(openai.BadRequestError, match="logit_bias is not supported here") as refused:
            await own.chat.completions.create(**REQUEST, logit_bias={"1": 5})
        assert (refused.value.code, refused.value.param) == ("unsupported", "logit_bias")
        with pytest.raises(openai.BadRequestError, match="the prompt has") as refused:
            await own.responses.create(model="any", input="2 " * 2000)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.AuthenticationError, match="this key opens no running episode"):
            await own.with_options(api_key="agentrl-wrong").responses.create(model="any", input=QUESTION)
        client.engine.lose()
        with pytest.raises(openai.InternalServerError, match="no engine could answer"):
            await own.with_options(max_retries=0).chat.completions.create(**REQUEST)


@pytest.mark.parametrize("streams", [False, True])
@asynchronous
async def test_a_retry_gets_the_answer_of_the_first_generation(streams: bool, chat_format: ChatFormat) -> None:
    engine = HeldEngine(turns(chat_format, ANSWER), hold_at=2)
    async with episode(chat_format, engine) as client, openai_client(client.session) as own:
        impatient = own.with_options(timeout=0.3, max_retries=2)
        asked = asyncio.create_task(impatient.chat.completions.create(**REQUEST, stream=streams))
        await until(lambda: bool(engine.held))
        await asyncio.sleep(0.5)  # past the first time-out
        engine.let_go()
        answer: Any = await asked
        if streams:
            text = "".join([c.choices[0].delta.content or "" async for c in answer])
        else:
            text = answer.choices[0].message.content
        branches = client.session.graph.branches()
    assert text == ANSWER
    assert_trained_as_sampled(branches, engine, [says(chat_format, ANSWER).token_ids])


@asynchronous
async def test_parallel_samples_of_one_prompt_are_all_trained(chat_format: ChatFormat) -> None:
    async with episode(chat_format, turns(chat_format, ANSWER)) as client, openai_client(client.session) as own:
        completion = await own.chat.completions.create(**REQUEST, n=3)
        branches = client.session.graph.branches()
    assert [choice.message.content for choice in completion.choices] == [ANSWER] * 3
    assert_trained_as_sampled(branches, client.engine, [says(chat_format, ANSWER).token_ids] * 3)
