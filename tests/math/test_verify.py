"""Equality of mathematical answers, judged by real worker processes."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentrl.envs.math import Outcome, Verdict, Verifier
from agentrl.record import EnvError
from tests.support.asynchrony import asynchronous

EQUAL = [
    ("\\frac{1}{3}", "\\frac{2}{6}"),
    ("1/2^{99}", "\\frac{1}{2^{99}}"),
    ("2^{10}", "1024"),
    ("120", "5!"),
    ("x^2+2x+1", "(x+1)^2"),
    ("\\sqrt{3+2\\sqrt2}", "1+\\sqrt2"),
    ("\\frac{\\sqrt2}{2}", "0.5\\sqrt2"),
    ("\\pi", "3.14159"),
    ("\\pi", "3.141592653589793"),
    ("\\ln 2", "0.693147"),
    ("\\{1,2\\}", "2, 1"),
    ("(-\\infty,3)\\cup(5,\\infty)", "(5,\\infty)\\cup(-\\infty,3)"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}"),
    ("x=5", "5"),
    ("5", "x = 5"),
    ("x+y=3", "2x+2y=6"),
    ("x>3", "3<x"),
    ("x \\in [1,2]", "[1,2]"),
    ("18", "18\\text{ dollars}"),
    ("90", "90^\\circ"),
    ("\\frac{100}{3}\\%", "33.3333"),
    ("55", "\\sum_{i=1}^{10} i"),
]
DIFFERENT = [
    ("1/2004!", "1/2006!"),
    ("1/2004!+1", "1/2006!+1"),
    ("1/2^99", "1/2^98"),
    ("0", "1/2^{999}"),
    ("0", "10^{-30}"),
    ("10^{-7}", "2 \\cdot 10^{-7}"),
    ("e^{-1000}", "e^{-1001}"),
    ("\\sqrt{2}", "\\sqrt{2}+10^{-100}"),
    ("\\sqrt{2}/2^{200}", "\\sqrt{2}/2^{201}"),
    ("\\frac{x}{2004!}", "\\frac{x}{2006!}"),
    ("x^2+2x+1", "(x+1)^2+10^{-20}"),
    ("(1/2^{99},1)", "(1/2^{98},1)"),
    ("\\{1/2^{99}\\}", "\\{1/2^{98}\\}"),
    ("[0,1/2004!]", "[0,1/2006!]"),
    ("\\begin{pmatrix}1&1/2^{99}\\end{pmatrix}", "\\begin{pmatrix}1&1/2^{98}\\end{pmatrix}"),
    ("x=1/2^{99}", "x=1/2^{98}"),
    ("x<1/2^{99}", "x<1/2^{98}"),
    ("x^2=-1", "x^2=-2"),
    ("\\pi", "3.14"),
    ("\\pi", "\\frac{22}{7}"),
    ("\\sqrt{2}", "1.41422"),
    ("[0,1)", "[0,1]"),
    ("(1,2)", "(1,2,3)"),
    ("x>3", "x \\ge 3"),
    ("x=5", "x=6"),
    ("\\infty", "-\\infty"),
    ("6", "4 2"),
    ("12", "5\\quad 7"),
    ("3.75", "12.5.3"),
    ("1", "1/0"),
    ("5", "\\frac{"),
    ("5", "five"),
    ("5", "\U0001f389"),
    ("5", "\ud800"),
    ("5", "\x00"),
]


@asynchronous
async def test_equal_answers() -> None:
    verifier = Verifier()
    verdicts = await asyncio.gather(*(verifier.verify(gold, answer) for gold, answer in EQUAL))
    assert [pair for pair, verdict in zip(EQUAL, verdicts, strict=True) if verdict != Verdict(Outcome.EQUAL, 1.0)] == []


@asynchronous
async def test_different_answers() -> None:
    verifier = Verifier()
    verdicts = await asyncio.gather(*(verifier.verify(gold, answer) for gold, answer in DIFFERENT))
    wrong = [(p, v) for p, v in zip(DIFFERENT, verdicts, strict=True) if (v.outcome, v.score) != ("different", 0.0)]
    assert wrong == []


@asynchronous
async def test_no_answer() -> None:
    assert await Verifier().verify("5", None) == Verdict(Outcome.NO_ANSWER)
    assert await Verifier().verify("5", "") == Verdict(Outcome.NO_ANSWER)


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ("\\frac{", "can't be read as mathematics"),
        ("\\frac{1}{0}", "can't be read as mathematics"),
        ("9999999!", "can't be evaluated in 0.5 s"),
        ("x" * 3000, "has 3000 characters"),
    ],
)
def test_a_gold_answer_that_nobody_can_judge_is_a_failure_of_the_machinery(gold: str, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        asyncio.run(Verifier(0.5).verify(gold, "5"))


@asynchronous
async def test_the_same_text_is_equal_whatever_it_means() -> None:
    for text in ("9999999!", "\\frac{", "3^{1500000000}"):
        assert (await Verifier(0.5).verify(text, text)).outcome is Outcome.EQUAL


@asynchronous
async def test_two_hundred_at_once() -> None:
    verifier = Verifier()
    verdicts = await asyncio.gather(*(verifier.verify(f"x+{i}", f"{i}+x+0") for i in range(200)))
    assert {verdict.outcome for verdict in verdicts} == {Outcome.EQUAL}


def test_any_thread_and_loop() -> None:
    def in_a_loop_of_its_own(i: int) -> float:
        assert threading.current_thread() is not threading.main_thread()
        return asyncio.run(Verifier().verify(f"\\sqrt{{{i}}}", f"{i}^{{1/2}}")).score

    with ThreadPoolExecutor(8) as executor:
        assert list(executor.map(in_a_loop_of_its_own, range(2, 34))) == [1.0] * 32


def test_a_limit_must_be_positive() -> None:
    with pytest.raises(ValueError, match="use more than 0"):
        Verifier(0)
