"""What all adapters have in common."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from agentrl.agents import external
from agentrl.record import AgentRLError
from agentrl.session import ChatFormat, Session
from tests.support.asynchrony import asynchronous
from tests.support.frameworks import ANSWER, QUESTION
from tests.support.gateway import episode
from tests.support.scripted import turns

PACKAGES = {
    "agents_sdk_chat_model": "agents",
    "agents_sdk_model": "agents",
    "anthropic_client": "anthropic",
    "autogen_client": "autogen_ext.models.openai",
    "dspy_lm": "dspy",
    "langchain_model": "langchain_openai",
    "mini_swe_model": "minisweagent.models.litellm_model",
    "openai_client": "openai",
    "pydantic_ai_model": "pydantic_ai.models.openai",
    "smolagents_model": "smolagents",
}


@pytest.mark.parametrize("adapter", sorted(set(external.__all__) - {"litellm_arguments"}))
def test_without_its_package_an_adapter_says_what_to_install(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[adapter], None)
    policy: Any = None
    with pytest.raises(AgentRLError, match="pip install"):
        getattr(external, adapter)(policy)


@asynchronous
async def test_a_client_that_closes_leaves_the_connections_to_the_others(chat_format: ChatFormat) -> None:
    async def ask(session: Session) -> str:
        client = external.openai_client(session)
        answer = await client.responses.create(model="m", input=QUESTION)
        await client.close()
        with pytest.raises(RuntimeError, match="closed"):
            await client._client.get(session.base_url)
        return answer.output_text

    async with episode(chat_format, turns(chat_format, ANSWER)) as there:
        assert await ask(there.session) == ANSWER
        answers = await asyncio.gather(*(ask(there.session) for _ in range(4)))
    assert answers == [ANSWER] * 4
    assert len(there.session.graph.turns) == 5
