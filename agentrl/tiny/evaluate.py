"""How many held-out problems the tiny model solves, asked turn by turn with a real calculator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from renderers import ParsedToolCall, Qwen3Renderer, ToolCallParseStatus
from transformers import Qwen3ForCausalLM

from agentrl.envs.math.arithmetic import Problem, calculate, score_answer
from agentrl.record.messages import Message
from agentrl.tiny.dialogues import opening

MAX_TURNS = 3
"""Assistant turns an attempt may take; a policy that knows its task needs two."""

MAX_NEW_TOKENS = 48
"""Tokens an assistant turn may take; a call has up to 26."""


@dataclass
class Attempt:
    """One try at a problem; `prompt_ids` always holds what the next turn continues."""

    problem: Problem
    prompt_ids: list[int]
    called: bool = False
    score: float = 0.0


@torch.inference_mode()
def attempt_problems(
    model: Qwen3ForCausalLM,
    renderer: Qwen3Renderer,
    problems: Sequence[Problem],
    *,
    sample: bool,
    batch_size: int = 128,
) -> list[Attempt]:
    """Lets the model solve each problem once, sampled at temperature 1 or greedily.

    The first prompt is rendered and each later one bridges from the ids that were generated, so nothing the
    model wrote is ever decoded and encoded again.
    """
    attempts = [
        Attempt(problem, renderer.render_ids(opening(problem.question), add_generation_prompt=True))  # type: ignore[arg-type]
        for problem in problems
    ]
    unfinished = attempts
    for _ in range(MAX_TURNS):
        continuing = []
        for start in range(0, len(unfinished), batch_size):
            batch = unfinished[start : start + batch_size]
            completions = _generate(model, renderer, [attempt.prompt_ids for attempt in batch], sample)
            continuing += [
                attempt
                for attempt, completion in zip(batch, completions, strict=True)
                if _advance(attempt, renderer, completion)
            ]
        unfinished = continuing
    return attempts


def _generate(
    model: Qwen3ForCausalLM, renderer: Qwen3Renderer, prompts: Sequence[list[int]], sample: bool
) -> list[list[int]]:
    """One turn for each prompt, up to and including the token that ended it."""
    stop_ids = renderer.get_stop_token_ids()
    length = max(map(len, prompts))
    padding = [length - len(prompt) for prompt in prompts]
    token_ids = torch.tensor([[stop_ids[0]] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
    attention_mask = (torch.arange(length) >= torch.tensor(padding)[:, None]).long()
    sampling: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    output = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
        input_ids=token_ids,
        attention_mask=attention_mask,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=stop_ids,
        **(sampling if sample else {"do_sample": False}),
    )
    return [_up_to_stop(row, stop_ids) for row in output[:, length:].tolist()]


def _up_to_stop(token_ids: list[int], stop_ids: Sequence[int]) -> list[int]:
    end = next((index + 1 for index, token in enumerate(token_ids) if token in stop_ids), len(token_ids))
    return token_ids[:end]


def _advance(attempt: Attempt, renderer: Qwen3Renderer, completion: list[int]) -> bool:
    """Grades the turn or, if it holds a call, answers it; tells whether the attempt goes on."""
    reply = renderer.parse_response(completion)
    if not reply.tool_calls:
        attempt.score = score_answer(reply.content, attempt.problem.answer)
        return False
    attempt.called = True
    results: list[Message] = [{"role": "tool", "content": _call_result(call)} for call in reply.tool_calls]
    bridged = renderer.bridge_to_next_turn(attempt.prompt_ids, completion, results)  # type: ignore[arg-type]
    if bridged is None:
        return False
    attempt.prompt_ids = bridged.token_ids
    return True


def _call_result(call: ParsedToolCall) -> str:
    """What the calculator says to a call, or what was wrong with it."""
    expression = call.arguments.get("expression") if isinstance(call.arguments, dict) else None
    if call.status is not ToolCallParseStatus.OK or call.name != "calculator" or not isinstance(expression, str):
        return "Error: call the calculator with an expression"
    try:
        return calculate(expression)
    except ValueError as error:
        return f"Error: {error}"


def summarise(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Accuracy, share of attempts with a call and accuracy given (no) call, in all and by operator.

    A share of no attempts at all is None.
    """

    def shares(some: Sequence[Attempt]) -> dict[str, float | None]:
        with_call = [attempt for attempt in some if attempt.called]
        without_call = [attempt for attempt in some if not attempt.called]
        return {
            "problems": len(some),
            "accuracy": _mean([attempt.score for attempt in some]),
            "tool_use": _mean([attempt.called for attempt in some]),
            "accuracy_with_tool": _mean([attempt.score for attempt in with_call]),
            "accuracy_without_tool": _mean([attempt.score for attempt in without_call]),
        }

    by_operator = {
        operator: shares([attempt for attempt in attempts if attempt.problem.operator == operator])
        for operator in "+-*"
    }
    return {**shares(attempts), "by_operator": by_operator}


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None
