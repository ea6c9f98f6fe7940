"""The conversation layer: an episode's model calls, recorded as they really happened."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from agentrl.session.known_turns import KnownTurns
from agentrl.session.strict import call_id
from agentrl.session.turns import SampledTurn


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
        stop: texts that end a turn, besides those that an agent asks for.
        top_p, top_k: sample among the most likely tokens only; for episodes that only measure.
    """

    temperature: float
    max_prompt_length: int
    max_response_length: int
    max_model_len: int
    stop: tuple[str, ...] = ()
    top_p: float = 1.0
    top_k: int = -1


class Session:
    """The policy of one episode (`sdk.Policy`): renders, samples, records.

    What was sampled is never encoded again: the next prompt is built on the very tokens of the last turn where the
    model's template allows it, and rendered from nothing where it does not; the graph then forks.

    Args:
        seed: of the run; each request's own seed derives from it and the request's id.
        min_version: the policy version at admission; no older weights may answer.
        attempt: which time the episode is played, from 1. Each one has requests, and so random numbers, of its own.
        one_version: the weights must not change within the episode (no partial rollouts); should they, because its
            engine was lost, the episode is spoiled.

    Attributes:
        overflowed: whether a prompt outgrew the context, even if the agent went on from there.
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
        attempt: int = 1,
        one_version: bool = False,
    ) -> None:
        self.episode_id = episode_id
        self._key = episode_id if attempt == 1 else f"{episode_id}~{attempt}"
        self.graph = MessageGraph()
        self._format = chat_format
        self._generator = generator
        self._limits = limits
        self._seed = seed
        self._min_version = min_version
        self._one_version = one_version
        self._versions: set[int] = set()
        self.overflowed = False
        self._known = KnownTurns()
        self._requests = 0
        self._calls = 0
        self._closed = False

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSpec] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Reply:
        tools = list(tools or ())
        history, prompt_ids = self._prompt(normalise_messages(messages), tools)
        stop = self._stop(stop)
        node = await self._sample(prompt_ids, max_tokens, stop)
        sampled = node.token_ids.tolist()
        parsed = self._format.parse(prompt_ids, sampled, tools)
        if node.finish_reason == "stop" and sampled[-1] not in self._format.stop_token_ids:
            parsed = parsed.before(stop)
        calls = tuple(replace(c, id=c.id or call_id(self._calls + i)) for i, c in enumerate(parsed.tool_calls))
        self._calls += len(calls)
        finish_reason: Literal["stop", "tool_calls", "length"] = "stop"
        if node.finish_reason == "length":
            finish_reason = "length"
        elif calls:
            finish_reason = "tool_calls"
        reply = Reply(
            parsed.text,
            parsed.reasoning,
            calls,
            finish_reason,
            self.graph.turns.index(node),
            parsed.invalid_tool_calls,
        )
        (message,) = normalise_messages([reply.message])
        self._known.add(SampledTurn(history, message, prompt_ids, sampled), tools)
        return reply

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] | None = None
    ) -> Completion:
        node = await self._sample(list(token_ids), max_tokens, self._stop(stop))
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

    def _prompt(self, history: list[Message], tools: list[ToolSpec]) -> tuple[list[Message], list[int]]:
        """The next prompt, and the history it stands for: the turns in it are as they were recorded."""
        turn = self._known.continued_by(history, tools)
        if turn is not None:
            new = history[len(turn.history) + 1 :]
            bridged = self._format.bridge(turn, new, tools)
            if bridged is not None:
                return [*turn.history, turn.message, *new], bridged
        return history, self._format.render(history, tools)

    def _stop(self, asked: Sequence[str] | None) -> tuple[str, ...]:
        texts = (*self._limits.stop, *([asked] if isinstance(asked, str) else asked or ()))
        if not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"stop is {asked!r}: use texts of at least one character")
        return tuple(dict.fromkeys(texts))

    async def _sample(self, prompt_ids: list[int], max_tokens: int | None, stop: tuple[str, ...]) -> Node:
        self._check_open()
        limits = self._limits
        if not prompt_ids:
            raise ValueError("the prompt is empty: pass at least one token id")
        room = limits.max_model_len - len(prompt_ids)
        if len(prompt_ids) > limits.max_prompt_length or room < 1:
            self.overflowed = True
            raise ContextOverflow(
                f"the prompt has {len(prompt_ids)} tokens; data.max_prompt_length is {limits.max_prompt_length}, "
                f"rollout.max_model_len {limits.max_model_len}"
            )
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}: ask for at least 1")
        request_id = f"{self._key}:{self._requests}"
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
                stop=stop,
                top_p=limits.top_p,
                top_k=limits.top_k,
            )
        )
        self._check_open()
        if result.finish_reason == "abort" or not len(result.token_ids):
            raise EngineError(f"request {request_id} was aborted by its engine after {len(result.token_ids)} tokens")
        self._versions.update(result.versions.tolist())
        if self._one_version and len(self._versions) > 1:
            versions = ", ".join(map(str, sorted(self._versions)))
            raise EngineError(f"the weights changed within the episode (policy versions {versions})")
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
