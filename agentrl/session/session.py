"""The conversation layer: an episode's model calls, recorded as they really happened."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import xxhash

from agentrl.record import (
    Completion,
    ContextOverflow,
    EngineError,
    EpisodeClosed,
    Message,
    MessageGraph,
    Node,
    Reply,
    ToolSpec,
)
from agentrl.record.messages import normalise_messages
from agentrl.record.protocols import GenerateRequest, GenerateResult
from agentrl.session.chat_format import ChatFormat


class Generator(Protocol):
    """Whatever samples tokens: an engine, or the router in front of several."""

    async def generate(self, request: GenerateRequest) -> GenerateResult: ...


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """How an episode samples; from the config, the same for all of them.

    Attributes:
        temperature: 0 is greedy.
        max_prompt_length, max_response_length: tokens of one turn.
        max_model_len: tokens of prompt and response together.
    """

    temperature: float
    max_prompt_length: int
    max_response_length: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A turn, with the history that led to it and the reply itself."""

    history: list[Message]
    tools: list[ToolSpec]
    prompt_ids: list[int]
    node: Node


class Session:
    """The policy of one episode (`sdk.Policy`): renders, samples, records.

    What was sampled is never encoded again: the next prompt is built on the very tokens of the last turn where the
    model's template allows it, and rendered from nothing where it does not; the graph then forks.

    Args:
        seed: of the run; each request's own seed derives from it and the request's id.
        min_version: the policy version at admission; no older weights may answer.
    """

    def __init__(
        self,
        episode_id: str,
        chat_format: ChatFormat,
        generator: Generator,
        limits: SamplingLimits,
        *,
        seed: int = 0,
        min_version: int = 0,
    ) -> None:
        self.episode_id = episode_id
        self.graph = MessageGraph()
        self._format = chat_format
        self._generator = generator
        self._limits = limits
        self._seed = seed
        self._min_version = min_version
        self._recorded: list[_Recorded] = []
        self._requests = 0
        self._closed = False

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSpec] | None = None,
        *,
        max_tokens: int | None = None,
    ) -> Reply:
        history, tools = normalise_messages(messages), list(tools or ())
        prompt_ids = self._prompt(history, tools)
        node = await self._sample(prompt_ids, max_tokens)
        sampled = node.token_ids.tolist()
        parsed = self._format.parse(prompt_ids, sampled)
        finish_reason: Literal["stop", "tool_calls", "length"] = "stop"
        if node.finish_reason == "length":
            finish_reason = "length"
        elif parsed.tool_calls:
            finish_reason = "tool_calls"
        reply = Reply(
            parsed.text,
            parsed.reasoning,
            parsed.tool_calls,
            finish_reason,
            self.graph.turns.index(node),
            parsed.invalid_tool_calls,
        )
        self._recorded.append(_Recorded([*history, *normalise_messages([reply.message])], tools, prompt_ids, node))
        return reply

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int | None = None) -> Completion:
        node = await self._sample(list(token_ids), max_tokens)
        assert node.logprobs is not None
        return Completion(
            node.token_ids.tolist(),
            node.logprobs.tolist(),
            "length" if node.finish_reason == "length" else "stop",
            self.graph.turns.index(node),
        )

    def reward(self, value: float, turn: int | None = None) -> None:
        turns = self.graph.turns
        index = len(turns) - 1 if turn is None else turn
        if not 0 <= index < len(turns):
            raise ValueError(f"there is no turn {turn}: the episode has {len(turns)} turns, counted from 0")
        if not math.isfinite(value):
            raise ValueError(f"a turn's reward must be finite, but is {value}")
        turns[index].reward = float(value)

    def close(self) -> None:
        """Ends the episode: later calls raise `EpisodeClosed`."""
        self._closed = True

    def _prompt(self, history: list[Message], tools: list[ToolSpec]) -> list[int]:
        last = self._last_turn_of(history, tools)
        if last is not None:
            new = history[len(last.history) :]
            reasoned = any("reasoning_content" in message for message in last.history)
            sampled = last.node.token_ids.tolist()
            bridged = self._format.bridge(last.prompt_ids, sampled, new, tools, reasoned=reasoned)
            if bridged is not None:
                return bridged
        return self._format.render(history, tools)

    def _last_turn_of(self, history: list[Message], tools: list[ToolSpec]) -> _Recorded | None:
        """The recorded turn that `history` continues with the same tools: the longest one, the latest of equals."""
        found: _Recorded | None = None
        for recorded in self._recorded:
            size = len(recorded.history)
            longer = found is None or size >= len(found.history)
            continued = size < len(history) and recorded.tools == tools
            if longer and continued and all(map(_same, recorded.history, history)):
                found = recorded
        return found

    async def _sample(self, prompt_ids: list[int], max_tokens: int | None) -> Node:
        self._check_open()
        limits = self._limits
        if not prompt_ids:
            raise ValueError("the prompt is empty: pass at least one token id")
        room = limits.max_model_len - len(prompt_ids)
        if len(prompt_ids) > limits.max_prompt_length or room < 1:
            raise ContextOverflow(
                f"the prompt has {len(prompt_ids)} tokens; data.max_prompt_length is {limits.max_prompt_length}, "
                f"rollout.max_model_len {limits.max_model_len}"
            )
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}: ask for at least 1")
        request_id = f"{self.episode_id}:{self._requests}"
        self._requests += 1
        result = await self._generator.generate(
            GenerateRequest(
                request_id=request_id,
                token_ids=np.asarray(prompt_ids, np.int32),
                max_tokens=min(limits.max_response_length, room, max_tokens or room),
                temperature=limits.temperature,
                stop_token_ids=self._format.stop_token_ids,
                seed=xxhash.xxh3_64_intdigest(request_id.encode(), seed=self._seed) & 0x7FFF_FFFF_FFFF_FFFF,
                min_version=self._min_version,
            )
        )
        self._check_open()
        if result.finish_reason == "abort" or not len(result.token_ids):
            raise EngineError(f"request {request_id} was aborted by its engine after {len(result.token_ids)} tokens")
        return self.graph.add_turn(
            prompt_ids,
            result.token_ids,
            result.logprobs,
            result.versions,
            temperature=limits.temperature,
            finish_reason=result.finish_reason,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise EpisodeClosed(f"episode {self.episode_id} has ended: its policy can't be used any more")


def _same(one: Message, other: Message) -> bool:
    """Whether two messages are the same turn of a conversation, whatever a client did to white space and ids."""
    return _key(one) == _key(other)


def _key(message: Message) -> tuple[Any, ...]:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["role"], message["content"].strip(), message.get("reasoning_content", "").strip(), calls
