r"""Where the final answer stands: in a model's reply, and in what a data set gives as the gold answer.

The last word counts: the last `\boxed{...}`, or the last line that starts with `####` and goes on with an answer, or
that ends with `####` and a number. A last box that is not closed is no answer, whatever stood in an earlier one.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from agentrl.record import EnvError

AnswerFormat = Literal["auto", "boxed", "gsm8k"]

MAX_ANSWER_LENGTH = 2000
"""Longest answer that is read, in characters. A box that is not closed within them counts as not closed."""

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace, \{, opens nothing
_MARK = "####"
_MARKED_LINE = re.compile(r"[ \t]*####(?!#)(.*\S)")
_MARKED_NUMBER = re.compile(r"(?<!#)####[ \t]*([-+]?\$?\d[\d,]*(?:\.\d+)?%?)[ \t.]*$")


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`; None without a box, or if the last is not closed."""
    start = text.rfind("\\boxed")
    opening = _BOX.match(text, start) if start >= 0 else None
    if opening is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, opening.end(), opening.end() + MAX_ANSWER_LENGTH):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[opening.end() : brace.start()]
    return None


def last_marked(text: str) -> str | None:
    """What follows `####` in the last line that starts with it and has more to say, or that ends with it and a number;
    None if there is none."""
    for line in reversed(text.split("\n")):
        if marked := _MARKED_LINE.match(line) or _MARKED_NUMBER.search(line):
            return marked[1].strip()[:MAX_ANSWER_LENGTH]
    return None


def final_answer(text: str, answer_format: AnswerFormat = "auto") -> str | None:
    r"""The final answer of a model's reply; None if it gives none.

    Args:
        answer_format: `boxed` reads `\boxed{}`, `gsm8k` the line with `####`, `auto` the box where one was begun and
            else that line.
    """
    boxed = answer_format == "boxed" or (answer_format == "auto" and "\\boxed" in text)
    answer = last_box(text) if boxed else last_marked(text)
    return (answer or "").strip() or None


def gold_answer(answer: Any) -> str:
    r"""The final answer in a data set's answer: a GSM8K rationale (`#### 72`), a solution with a `\boxed{}`, or itself.

    A line with `####` outdoes a box only as the last line; elsewhere it may be a heading.

    Raises:
        EnvError: there is none, or it is longer than `MAX_ANSWER_LENGTH`.
    """
    text = "" if answer is None else str(answer)
    last_line = text.rstrip().rpartition("\n")[2]
    if "\\boxed" in text and last_marked(last_line) is None:
        gold = last_box(text)
    elif _MARK in text:
        gold = last_marked(text)
    else:
        gold = text
    gold = (gold or "").strip()
    if not gold or len(gold) > MAX_ANSWER_LENGTH:
        raise EnvError(
            f"no gold answer can be read from {text[:200]!r} ({len(text)} characters): set data.answer_key to a column "
            "with a plain answer, a solution with a \\boxed{} answer, or a rationale that ends in a line `#### answer`"
        )
    return gold
