"""Answers are evaluated, and never run as programs."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
import sympy
from reasoning_gym.factory import DATASETS

from agentrl.envs.math import ReasoningGymEnv, reasoning_gym_tasks
from agentrl.envs.math.evaluation import evaluate, parse_expression
from agentrl.record import Reply, Task
from agentrl.sdk import Reward, Transcript
from tests.support.asynchrony import asynchronous

GUARDED = {
    "eval": {"binary_matrix", "bitwise_arithmetic", "n_queens", "number_sorting", "spiral_matrix", "string_insertion"},
    "parse_expr": {
        *("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"),
    },
}
"""What evaluates texts, and the data sets whose scoring reaches it. All of it is guarded."""

EVALUATORS = {
    *("eval", "exec", "__import__", "import_module", "getattr", "system", "popen", "subprocess", "pickle", "yaml"),
    *("parse_expr", "sympify", "S", "nsimplify", "parse_latex", "parse_mathematica", "lambdify", "literal_eval"),
}


def names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def reached_by_scoring(dataset: type) -> set[str]:
    """The names that `score_answer` uses, and the functions and classes of its package that it may call."""
    reached: set[str] = set()
    seen: set[FunctionType] = set()
    waiting: list[Any] = [dataset.score_answer]  # pyright: ignore[reportAttributeAccessIssue]
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        for name in names_in(function.__code__):
            called = function.__globals__.get(name)
            ours = getattr(called, "__module__", "").startswith("reasoning_gym")
            if not ours:
                reached.add(name)
            waiting += [called if ours else None, getattr(dataset, name, None)]
            waiting += list(vars(called).values()) if ours and isinstance(called, type) else []
    return reached


def test_all_that_scores_by_evaluation_is_known() -> None:
    """A new use of `eval` and the like in reasoning-gym is to be looked at."""
    found: dict[str, set[str]] = {}
    for name, (dataset, _) in DATASETS.items():
        for evaluator in reached_by_scoring(dataset) & EVALUATORS:
            found.setdefault(evaluator, set()).add(name)
    assert found == GUARDED


PAYLOADS = [
    "__import__('pathlib').Path({path!r}).touch()",
    "[__import__('pathlib').Path({path!r}).touch()]",
    "[*map(__import__('pathlib').Path.touch, [__import__('pathlib').Path({path!r})])]",
    "exec(chr(105)+{characters})",
    "(lambda: open({path!r}, 'w'))()",
]


def payloads(path: Path) -> list[str]:
    program = f"mport pathlib; pathlib.Path({str(path)!r}).touch()"
    characters = "+".join(f"chr({ord(character)})" for character in program)
    return [payload.format(path=str(path), characters=characters) for payload in PAYLOADS]


async def score(task: Task, answer: str) -> Reward:
    reply = Reply(f"<answer>{answer}</answer>", "", (), "stop", 0)
    return await ReasoningGymEnv().score(Transcript(task, [], [reply], truncated=False))


@pytest.mark.parametrize("dataset", sorted(set.union(*GUARDED.values())))
def test_an_answer_does_not_run(dataset: str, tmp_path: Path) -> None:
    # With several monomials, its questions depend on how the process hashes.
    config = {"min_degree": 1, "max_degree": 1} if dataset == "polynomial_multiplication" else {}
    (task,) = reasoning_gym_tasks(dataset, size=1, seed=3, **config)
    assert asyncio.run(score(task, str(task.answer))).value == 1.0
    for payload in payloads(tmp_path / "touched"):
        assert asyncio.run(score(task, payload)).value < 0.1
    assert list(tmp_path.iterdir()) == []


@asynchronous
async def test_answers_in_other_words_still_count() -> None:
    (spiral,) = reasoning_gym_tasks("spiral_matrix", size=1, seed=3)
    assert (await score(spiral, str(str(spiral.answer).split()).replace("'", ""))).value == 0.1
    (integral,) = reasoning_gym_tasks("simple_integration", size=1, seed=3)
    assert (await score(integral, f"7 + ({integral.answer})")).value == 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" [[1, -2], ['a', None]]", [[1, -2], ["a", None]]),
        ("(0x1f + 2) << 3", 264),
        ("{1: (True, 2.5)}", {1: (1, 2.5)}),
    ],
)
def test_literals_and_arithmetic(text: str, value: object) -> None:
    assert evaluate(text) == value


@pytest.mark.parametrize("text", ["x", "abs(1)", "''.join", "[i for i in (1, 2)]", "f'{1}'", "(lambda: 1)()", "[1][0]"])
def test_other_python_is_refused(text: str) -> None:
    with pytest.raises(SyntaxError):
        evaluate(text)


def test_expressions() -> None:
    x, c = sympy.symbols("x C")
    assert (
        parse_expression("sin(x)**2/2 + sqrt(x) - 0.5*C", {"x": x}) == sympy.sin(x) ** 2 / 2 + sympy.sqrt(x) - 0.5 * c
    )
    assert parse_expression("exec(x) + open", {"x": x}) == sympy.Function("exec")(x) + sympy.Symbol("open")
    assert parse_expression("Integral(x, x)") == sympy.Function("Integral")(x, x)  # and not the integral


@pytest.mark.parametrize(
    "text",
    ["x.real", "x . real", "(1).\nreal", "__import__", "'x'", '"x"', "x[0]", "x=1", "x;y", "é", "1+" * 2000 + "1"],
)
def test_other_expressions_are_refused(text: str) -> None:
    with pytest.raises(SyntaxError, match="no plain"):
        parse_expression(text)
