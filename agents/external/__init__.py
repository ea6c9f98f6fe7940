"""An episode's policy in the form that agent frameworks take: clients, models and arguments for them.

Each adapter imports its framework when it is called, and sets what keeps training honest: no time-out of its own but
the episode's, no cache that answers instead of the policy, no forced tool calls (they are sampled under a grammar, and
so not trained), and nothing that is told to anybody else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from agentrl.agents.external.connections import sharing_client
from agentrl.record import AgentRLError
from agentrl.sdk import Policy, SyncPolicy

if TYPE_CHECKING:
    import dspy
    from agents import Model
    from anthropic import AsyncAnthropic
    from autogen_ext.models.openai import OpenAIChatCompletionClient
    from langchain_openai import ChatOpenAI
    from minisweagent.models.litellm_model import LitellmModel
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel
    from smolagents import OpenAIModel

__all__ = [
    "agents_sdk_chat_model",
    "agents_sdk_model",
    "anthropic_client",
    "autogen_client",
    "dspy_lm",
    "langchain_model",
    "litellm_arguments",
    "mini_swe_model",
    "openai_client",
    "pydantic_ai_model",
    "smolagents_model",
]

TIMEOUT_SECONDS = 3600.0
"""How long clients wait for an answer. Generation pauses while weights are updated, and callers wait: what bounds an
episode is `rollout.episode_timeout`."""


def openai_client(policy: Policy | SyncPolicy) -> AsyncOpenAI:
    """A client of OpenAI's SDK, for Chat Completions and Responses; `async with` closes it."""
    with _installed("openai"):
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient
    return AsyncOpenAI(
        base_url=policy.base_url,
        api_key=policy.api_key,
        timeout=TIMEOUT_SECONDS,
        http_client=sharing_client(DefaultAsyncHttpxClient),
    )


def anthropic_client(policy: Policy | SyncPolicy) -> AsyncAnthropic:
    """A client of Anthropic's SDK, for Messages; `async with` closes it."""
    with _installed("anthropic"):
        from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient
    return AsyncAnthropic(
        base_url=policy.base_url,
        api_key=policy.api_key,
        timeout=TIMEOUT_SECONDS,
        http_client=sharing_client(DefaultAsyncHttpxClient),
    )


def agents_sdk_model(policy: Policy | SyncPolicy) -> Model:
    """A model of OpenAI's Agents SDK over Responses, its default API. Switches the SDK's tracing off, which would send
    every run to OpenAI."""
    with _installed("openai-agents"):
        from agents import OpenAIResponsesModel, set_tracing_disabled
    set_tracing_disabled(True)
    return OpenAIResponsesModel(policy.model, openai_client(policy))


def agents_sdk_chat_model(policy: Policy | SyncPolicy) -> Model:
    """The same over Chat Completions."""
    with _installed("openai-agents"):
        from agents import OpenAIChatCompletionsModel, set_tracing_disabled
    set_tracing_disabled(True)
    return OpenAIChatCompletionsModel(policy.model, openai_client(policy))


def langchain_model(policy: Policy | SyncPolicy) -> ChatOpenAI:
    """A chat model of LangChain and LangGraph, whatever global cache is set."""
    with _installed("langchain-openai"):
        from langchain_openai import ChatOpenAI
    return ChatOpenAI(
        model=policy.model,
        base_url=policy.base_url,
        api_key=policy.api_key,  # type: ignore[arg-type]
        timeout=TIMEOUT_SECONDS,
        stream_chunk_timeout=None,
        cache=False,
    )


def smolagents_model(policy: Policy | SyncPolicy) -> OpenAIModel:
    """A model of smolagents, which is free to call a tool or not: the framework's own wish is to force one."""
    with _installed("smolagents[openai]"):
        from smolagents import OpenAIModel
    return OpenAIModel(
        policy.model,
        api_base=policy.base_url,
        api_key=policy.api_key,
        client_kwargs={"timeout": TIMEOUT_SECONDS},
        tool_choice="auto",
    )


def pydantic_ai_model(policy: Policy | SyncPolicy) -> OpenAIChatModel:
    """A model of Pydantic AI. Its output tools are asked for, not forced."""
    with _installed("pydantic-ai-slim[openai]"):
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.profiles import ModelProfile
        from pydantic_ai.providers.openai import OpenAIProvider
    return OpenAIChatModel(
        policy.model,
        provider=OpenAIProvider(openai_client=openai_client(policy)),
        profile=ModelProfile(supports_forced_tool_choice=False),
    )


def autogen_client(policy: Policy | SyncPolicy) -> OpenAIChatCompletionClient:
    """A model client of AutoGen; its `close` closes it."""
    with _installed("autogen-ext[openai]"):
        from autogen_core.models import ModelFamily, ModelInfo
        from autogen_ext.models.openai import OpenAIChatCompletionClient
        from openai import DefaultAsyncHttpxClient
    return OpenAIChatCompletionClient(
        model=policy.model,
        base_url=policy.base_url,
        api_key=policy.api_key,
        timeout=TIMEOUT_SECONDS,
        http_client=sharing_client(DefaultAsyncHttpxClient),
        model_info=ModelInfo(
            vision=False,
            function_calling=True,
            json_output=True,
            structured_output=True,
            family=ModelFamily.UNKNOWN,
        ),
    )


def dspy_lm(policy: Policy | SyncPolicy) -> dspy.LM:
    """A language model of DSPy, without DSPy's cache: it would give all episodes of a task the first one's answers."""
    with _installed("dspy"):
        import dspy
    return dspy.LM(
        f"openai/{policy.model}",
        api_base=policy.base_url,
        api_key=policy.api_key,
        timeout=TIMEOUT_SECONDS,
        cache=False,
    )


def litellm_arguments(policy: Policy | SyncPolicy) -> dict[str, Any]:
    """Arguments for LiteLLM's `completion` and `acompletion`, and for frameworks that hand them on."""
    return {
        "model": f"openai/{policy.model}",
        "api_base": policy.base_url,
        "api_key": policy.api_key,
        "timeout": TIMEOUT_SECONDS,
        "caching": False,
    }


def mini_swe_model(policy: Policy | SyncPolicy, **config: Any) -> LitellmModel:
    """A model of mini-swe-agent; `config` as the framework's own, such as `observation_template`."""
    with _installed("mini-swe-agent"):
        from minisweagent.models.litellm_model import LitellmModel
    arguments = litellm_arguments(policy)
    return LitellmModel(
        model_name=arguments.pop("model"), model_kwargs=arguments, cost_tracking="ignore_errors", **config
    )


@contextmanager
def _installed(requirement: str) -> Iterator[None]:
    """Says what to install where an import fails."""
    try:
        yield
    except ImportError as error:
        raise AgentRLError(f"this agent's framework is not installed: pip install '{requirement}' ({error})") from error
