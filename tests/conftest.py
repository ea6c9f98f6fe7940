"""Shared by all tests: one torch thread, and the bundled model's real chat format."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from agentrl.config.schema import ModelConfig
from agentrl.session import ChatFormat
from agentrl.tiny import tiny_model_path

_NEEDED = {"parity": "verl", "vllm": "vllm", "frameworks": "pydantic_ai"}
collect_ignore = [folder for folder, package in _NEEDED.items() if not find_spec(package)]
if not find_spec("sglang"):
    collect_ignore.append("engine/test_sglang_contract.py")
"""`make parity`, `make test-vllm` and `make test-frameworks` run those tests where the packages are installed."""


@pytest.fixture(scope="session")
def chat_format() -> ChatFormat:
    """The bundled model's own format: Qwen3 turns, tools described in compact form."""
    return _load("compact")


@pytest.fixture(scope="session")
def template_format() -> ChatFormat:
    """The same tokenizer with Qwen3's full tool template."""
    return _load("template")


def _load(tool_prompt: str) -> ChatFormat:
    import torch

    torch.set_num_threads(1)
    path = str(tiny_model_path())
    return ChatFormat.load(ModelConfig.model_validate({"path": path, "tool_prompt": tool_prompt}), path)
