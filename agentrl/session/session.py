"""The conversation layer: an episode's model calls, recorded as they really happened."""

from __future__ import annotations

import asyncio
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
from agentrl.record.messages import MessageError, normalise_messages
from agentrl.record.protocols import GenerateRequest, GenerateResult
from agentrl.session.calls import ChatAnswer, ChatCall, Door, Verdict
from agentrl.session.chat_format import ChatFormat
from agentrl.session.known_turns import KnownTurns
from agentrl.session.readable_calls import readable
from agentrl.session.strict import call_id
from agentrl.session.turns import ParsedTurn, SampledTurn

LARGEST_REWARD = 1e30
"""Far within float32, in which the trainer adds rewards up."""


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
        door: where it can be used over HTTP.

    Attributes:
        limits: how it samples.
        overflowed: whether a prompt outgrew the context, even if the agent went on from there.
        last_failure: why the last call failed; None if it did not.
        verdict: what was said of the episode over HTTP; `judged` is set then.
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
        door: Door | None = None,
    ) -> None:
        self.episode_id = episode_id
        self._key = episode_id if attempt == 1 else f"{episode_id}~{attempt}"
        self.graph = MessageGraph()
        self._format = chat_format
        self._generator = generator
        self.limits = limits
        self._seed = seed
        self._min_version = min_version
        self._one_version = one_version
        self._versions: set[int] = set()
        self._door = door
        self._key_given = ""
        self.overflowed = False
        self.last_failure: Exception | None = None
        self.verdict: Verdict | None = None
        self.judged = asyncio.Event()
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
        return (await self.answer(ChatCall(messages, tools or (), max_tokens=max_tokens, stop=stop))).reply

    async def answer(self, call: ChatCall, nodes: list[Node] | None = None) -> ChatAnswer:
        """One turn; `chat` with all that a client over HTTP may ask for.

        Args:
            nodes: takes every turn that is recorded on the way, also if no answer comes of it.

        Raises:
            MessageError: the messages can't be rendered, or the model can't be made to call a tool.
            GuideError: no engine can follow the schema.
            ContextOverflow, EngineError, EpisodeClosed: as `sdk.Policy.chat`.
        """
        try:
            nodes = [] if nodes is None else nodes
            self._check_length(call)
            if call.stop and (call.json_schema or call.tool_choice == "required"):
                raise MessageError(
                    "stop: what is sampled by a schema ends with its value: leave stop or the schema out", field="stop"
                )
            if call.tool_choice == "required":
                return await self._forced_call(call, nodes)
            if not call.json_schema:
                return await self._turn(call, nodes)
            if _shown_tools(call):
                # Whether to call a tool is the model's own decision; only what it says is held to the schema.
                free = await self._turn(replace(call, json_schema=""), nodes)
                if free.reply.tool_calls:
                    return free
                free.node.trained = False
            return await self._turn(call, nodes)
        except Exception as error:
            self.last_failure = error
            raise

    def count_tokens(self, call: ChatCall) -> int:
        """Tokens of the prompt that a call would make.

        Raises:
            MessageError: the messages can't be rendered.
        """
        return len(self._prompt(normalise_messages(call.messages), _shown_tools(call), call.hides_reasoning)[1])

    def _check_length(self, call: ChatCall) -> None:
        """Refuses what can't fit before it is tokenised, which takes seconds for megabytes."""
        said = (message.get("content") for message in call.messages if isinstance(message, Mapping))
        letters = sum(len(content.strip()) for content in said if isinstance(content, str))
        if letters > self.limits.max_prompt_length * self._format.longest_token:
            self.overflowed = True
            raise ContextOverflow(
                f"the messages have {letters} characters; data.max_prompt_length is {self.limits.max_prompt_length}, "
                f"which is {self.limits.max_prompt_length * self._format.longest_token} characters at the most"
            )

    async def _turn(self, call: ChatCall, nodes: list[Node]) -> ChatAnswer:
        tools = _shown_tools(call)
        seen = normalise_messages(call.messages)
        history, prompt_ids = self._prompt(seen, tools, call.hides_reasoning)
        stop = () if call.json_schema else self._stop(call.stop)
        ends = self._call_ends() if call.one_call and tools and not call.json_schema else ()
        node = await self._sample(prompt_ids, call.max_tokens, (*stop, *ends), call.json_schema)
        nodes.append(node)
        sampled = node.token_ids.tolist()
        parsed = self._format.parse(prompt_ids, sampled, tools)
        ended_by = ""
        if node.finish_reason == "stop" and sampled[-1] not in self._format.stop_token_ids:
            ended_by = self._ended_by(sampled, stop)
            parsed = parsed.before(stop)
        if call.json_schema:
            parsed = ParsedTurn(self._format.decode(sampled).strip(), "")
        elif call.tool_choice == "none" and (parsed.tool_calls or parsed.invalid_tool_calls):
            written = ParsedTurn(self._as_written(sampled), parsed.reasoning)
            parsed = written.before(stop) if ended_by else written
        elif call.one_call:
            parsed = replace(parsed, tool_calls=parsed.tool_calls[:1])
        answer = self._answer(parsed, node, len(prompt_ids), ended_by)
        (message,) = normalise_messages([answer.reply.message])
        (shown,) = normalise_messages([answer.message])
        turn = SampledTurn(history, message, prompt_ids, sampled)
        self._known.add(turn, tools, [*seen, shown], hides_reasoning=call.hides_reasoning)
        return answer

    async def _forced_call(self, call: ChatCall, nodes: list[Node]) -> ChatAnswer:
        """A turn that is one tool call: what comes before its JSON stands in the prompt."""
        tools = [tool for tool in call.tools if call.tool_name in ("", tool.get("function", tool).get("name"))]
        if not tools:
            raise MessageError(
                f"tool_choice: names the tool {call.tool_name!r}, which tools does not hold"
                if call.tool_name
                else "tool_choice: asks for a tool call, but tools is empty",
                field="tool_choice",
            )
        frame = self._format.call_frame
        if frame is None:
            raise MessageError(
                "tool_choice: this model does not write tool calls as JSON, so none can be forced: use auto",
                field="tool_choice",
            )
        schema = frame.schema(tools)
        name = tools[0].get("function", tools[0])["name"]
        _, prompt_ids = self._prompt(normalise_messages(call.messages), list(call.tools), call.hides_reasoning)
        prompt_ids = [*prompt_ids, *self._format.encode(frame.start(name))]
        node = await self._sample(prompt_ids, call.max_tokens, (), schema)
        nodes.append(node)
        text = self._format.decode(node.token_ids.tolist())
        made = frame.read(text, name) if node.finish_reason == "stop" else None
        parsed = ParsedTurn("", "", *(((made,), ()) if made else ((), (frame.start(name) + text,))))
        return self._answer(parsed, node, len(prompt_ids), "")

    def _answer(self, parsed: ParsedTurn, node: Node, prompt_tokens: int, ended_by: str) -> ChatAnswer:
        parsed = readable(parsed)
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
        text = "\n".join(part for part in (parsed.text, *parsed.invalid_tool_calls) if part)
        self.last_failure = None
        return ChatAnswer(reply, text, prompt_tokens, node, ended_by)

    def _call_ends(self) -> tuple[str, ...]:
        """The text that closes a tool call, where the model has a mark for that."""
        frame = self._format.call_frame
        mark = frame.after.strip().partition("\n")[0] if frame is not None else ""
        return (mark,) if mark.startswith(("<", "[")) and len(mark) > 1 else ()

    def _ended_by(self, sampled: list[int], stop: Sequence[str]) -> str:
        text = self._format.decode(sampled)
        return next((ending for ending in stop if ending in text), "")

    def _as_written(self, sampled: list[int]) -> str:
        return self._format.decode(sampled).rpartition("</think>")[2].strip()

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
        if not abs(value) <= LARGEST_REWARD:
            raise ValueError(f"a turn's reward must be finite, and at most {LARGEST_REWARD:g}, but is {value}")
        turns[index].reward = float(value)

    @property
    def base_url(self) -> str:
        return self._open_door()[0].base_url

    @property
    def api_key(self) -> str:
        return self._open_door()[1]

    @property
    def model(self) -> str:
        return self._open_door()[0].model

    def judge(self, verdict: Verdict) -> None:
        """Somebody outside says what the episode is worth; the last word counts."""
        self.verdict = verdict
        self.judged.set()

    def token_texts(self, node: Node) -> list[str]:
        """What each token of a turn says by itself; bytes that are no whole character are replaced."""
        return [self._format.tokenizer.decode([token]) for token in node.token_ids.tolist()]

    @property
    def used_over_http(self) -> bool:
        """Whether an agent asked for its key."""
        return bool(self._key_given)

    def close(self) -> None:
        """Ends the episode: later calls raise `EpisodeClosed`, and the door is closed."""
        if self._door is not None and self._key_given:
            self._door.dismiss(self)
        self._closed = True

    def _open_door(self) -> tuple[Door, str]:
        self._check_open()
        if self._door is None:
            raise RuntimeError("this session has no gateway: base_url, api_key and model are those of a run's episodes")
        self._key_given = self._key_given or self._door.admit(self)
        return self._door, self._key_given

    def _prompt(
        self, history: list[Message], tools: list[ToolSpec], hides_reasoning: bool
    ) -> tuple[list[Message], list[int]]:
        """The next prompt, and the history it stands for: the turns in it are as they were recorded."""
        turn = self._known.continued_by(history, tools, hides_reasoning=hides_reasoning)
        if turn is not None:
            new = history[len(turn.history) + 1 :]
            bridged = self._format.bridge(turn, new, tools)
            if bridged is not None:
                return [*turn.history, turn.message, *new], bridged
        return history, self._format.render(history, tools)

    def _stop(self, asked: Sequence[str] | None) -> tuple[str, ...]:
        texts = (*self.limits.stop, *([asked] if isinstance(asked, str) else asked or ()))
        if not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"stop is {asked!r}: use texts of at least one character")
        return tuple(dict.fromkeys(texts))

    async def _sample(
        self, prompt_ids: list[int], max_tokens: int | None, stop: tuple[str, ...], json_schema: str = ""
    ) -> Node:
        self._check_open()
        limits = self.limits
        if not prompt_ids:
            raise ValueError("the prompt is empty: pass at least one token id")
        self._check_versions()
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
                json_schema=json_schema,
            )
        )
        self._check_open()
        if result.finish_reason == "abort" or not len(result.token_ids):
            raise EngineError(f"request {request_id} was aborted by its engine after {len(result.token_ids)} tokens")
        self._versions.update(result.versions.tolist())
        self._check_versions()
        return self.graph.add_turn(
            prompt_ids,
            result.token_ids,
            result.logprobs,
            result.versions,
            temperature=limits.temperature,
            finish_reason=result.finish_reason,
            trained=not json_schema,
        )

    def _check_versions(self) -> None:
        if self._one_version and len(self._versions) > 1:
            versions = ", ".join(map(str, sorted(self._versions)))
            raise EngineError(f"the weights changed within the episode (policy versions {versions})")

    def _check_open(self) -> None:
        if self._closed:
            raise EpisodeClosed(f"episode {self.episode_id} has ended: its policy can't be used any more")


def _shown_tools(call: ChatCall) -> list[ToolSpec]:
    """The tools that the model is told of."""
    return [] if call.tool_choice == "none" else list(call.tools)
