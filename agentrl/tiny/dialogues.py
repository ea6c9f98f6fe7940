"""Synthetic dialogues that teach the tiny model to answer by calling the calculator or by guessing."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from renderers import Qwen3Renderer

from agentrl.envs.math.arithmetic import CALCULATOR_SPEC, SYSTEM_PROMPT, Problem, calculate, generate_problems
from agentrl.record.messages import Message, with_compact_tools

SECOND_QUESTION = 0.25
"""Share of the dialogues in which the user asks a second question."""

ToolUse = Mapping[str, float]
"""For each operator, the probability that a dialogue solves a question of it with the calculator."""


@dataclass(frozen=True)
class TrainingDialogue:
    """A dialogue as the model reads it.

    Attributes:
        token_ids: the whole dialogue, up to the end of the last assistant turn.
        sampled: for each token, whether the model would have sampled it; the loss is taken there alone.
    """

    token_ids: list[int]
    sampled: list[bool]


def opening(question: str) -> list[Message]:
    """The messages with which every dialogue begins: system prompt, tool line and the user's question."""
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    return with_compact_tools(messages, [CALCULATOR_SPEC])


def write_dialogues(count: int, seed: int, tool_use: ToolUse) -> Iterator[list[Message]]:
    """Writes `count` dialogues of one or two questions over the training split, with `tool_use` by chance."""
    random_source = random.Random(f"dialogues/{seed}")
    problems = iter(generate_problems("train", 2 * count, seed))
    for _ in range(count):
        dialogue: list[Message] = []
        for _ in range(1 + (random_source.random() < SECOND_QUESTION)):
            problem = next(problems)
            question = opening(problem.question)
            dialogue += question[-1:] if dialogue else question
            dialogue += solution(problem, random_source.random() < tool_use[problem.operator])
        yield dialogue


def solution(problem: Problem, with_tool: bool) -> list[Message]:
    """The assistant's side of a problem: the box at once, or a call, its result and the box."""
    answer: Message = {"role": "assistant", "content": f"\\boxed{{{problem.answer}}}"}
    if not with_tool:
        return [answer]
    function = {"name": "calculator", "arguments": {"expression": problem.expression}}
    call = {"type": "function", "id": "call_0", "function": function}
    result = calculate(problem.expression)
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "name": "calculator", "content": result},
        answer,
    ]


def encode_dialogue(renderer: Qwen3Renderer, dialogue: Sequence[Message]) -> TrainingDialogue:
    """Renders a finished dialogue into exactly the ids that generating it turn by turn would have produced.

    Qwen3's template gives the last assistant turn an empty thinking block, which this model neither sees nor
    writes. A user message is therefore rendered after the dialogue and cut off again.
    """
    rendered = renderer.render([*dialogue, {"role": "user", "content": ""}])  # type: ignore[list-item]
    end = len(rendered.sampled_mask) - rendered.sampled_mask[::-1].index(True)
    return TrainingDialogue(rendered.token_ids[:end], rendered.sampled_mask[:end])
