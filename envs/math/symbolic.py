r"""Equality of mathematical answers, by math-verify made exact. For worker processes: any call may take for ever.

math-verify knows LaTeX, units, sets, intervals, matrices and relations. Its last step, whether two expressions are the
same, rounds to floats and takes what is small for zero, so that 1/2004! equals 1/2006!. Here that step is exact;
decimals alone are compared as rounded values (see `plain.py`).

Nothing here prints an expression: writing out a number can take longer than computing it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, grader, parse, verify
from sympy import Basic, Expr, Float, MatrixBase, Rational, UnevaluatedExpr
from sympy.matrices.expressions.matexpr import MatrixExpr

from agentrl.envs.math.plain import MAX_DIGITS, Number, canonical, equal_numbers, parse_number

_BOX_ONLY = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
_DIGITS = 40
_AGREEMENT = Fraction(1, 10**30)
"""Constants that differ by more than this share are different; below it algebra decides."""

# math-verify adds numbers that merely stand side by side ("4 2" is 6) and multiplies parts of a version number.
_SIDE_BY_SIDE = re.compile(r"[0-9.](?:\s|~|\\[,;:! ]|\\q?quad)+[0-9.]|[0-9]*\.[0-9]+\.[0-9]")
_MIXED_NUMBER = re.compile(r"([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)")


class UnreadableAnswer(ValueError):
    """No mathematical object can be read from a text."""


@lru_cache(maxsize=64)
def read(text: str) -> Basic | MatrixBase:
    """The mathematical object that an answer says; mostly unevaluated.

    Raises:
        UnreadableAnswer: none can be read.
    """
    text = _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", text)
    if _SIDE_BY_SIDE.search(canonical(text)) or text.count("{") != text.count("}"):
        raise UnreadableAnswer
    found = parse(
        f"\\boxed{{{text}}}",
        _BOX_ONLY,
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]  # None: the caller kills the process
    )
    if not found or not isinstance(found[0], (Basic, MatrixBase)):
        raise UnreadableAnswer
    return found[0]


def judge_math(gold: str, answer: str) -> Iterator[dict[str, Any]]:
    """Whether an answer equals the gold answer, in the two parts that `judge_worker` speaks of."""
    try:
        expected = read_gold(gold)
    except UnreadableAnswer:
        yield {"failed": "it can't be read as mathematics"}
        return
    yield {"ready": True}
    try:
        found = read(answer)
    except UnreadableAnswer:
        yield {"outcome": "different", "detail": "the answer can't be read as mathematics"}
        return
    same = verify(expected, found, timeout_seconds=None, raise_on_error=True)
    yield {"outcome": "equal" if same else "different"}


def read_gold(text: str) -> Basic | MatrixBase:
    """A gold answer, evaluated once as a comparison would, so that a hopeless one is found out.

    Raises:
        UnreadableAnswer: none can be read, or it has no value.
    """
    gold = read(text)
    if isinstance(gold, Expr) and _evaluated(gold).has(sympy.nan, sympy.zoo):
        raise UnreadableAnswer
    return gold


def _same_expression(a: Any, b: Any, *_: Any) -> bool:
    """Takes the place of math-verify's numeric comparison."""
    matrices = [isinstance(side, (MatrixBase, MatrixExpr)) for side in (a, b)]
    if any(matrices):
        return all(matrices) and _same_matrix(a.doit(), b.doit())
    if not (isinstance(a, Expr) and isinstance(b, Expr)):
        return bool(a == b)
    a_percent, b_percent = grader.get_pct_val(a), grader.get_pct_val(b)
    if a_percent is not None and b_percent is None and _same_value(a_percent, b):
        return True
    if b_percent is not None and a_percent is None and _same_value(a, b_percent):
        return True
    return _same_value(a, b)


def _same_matrix(a: Any, b: Any) -> bool:
    if a.shape != b.shape:
        return False
    return all(_same_expression(x, y) for x, y in zip(sympy.flatten(a), sympy.flatten(b), strict=True))


def _same_value(a: Expr, b: Expr) -> bool:
    a_number, b_number = _number(a), _number(b)
    a, b = _evaluated(a), _evaluated(b)
    if a.has(sympy.nan, sympy.zoo) or b.has(sympy.nan, sympy.zoo):
        return False
    if a == b:
        return True
    if a.is_infinite or b.is_infinite:
        return False
    a_number, b_number = a_number or _number(a), b_number or _number(b)
    if a_number is not None and b_number is not None:
        return equal_numbers(a_number, b_number)
    if a.free_symbols or b.free_symbols:
        return _is_zero(a - b) is True
    for number, other in ((a_number, b), (b_number, a)):
        if number is not None and number.places:
            value = _real_value(other)
            return value is not None and equal_numbers(number, Number(value))
    return _same_constant(a, b)


def _evaluated(expression: Expr) -> Expr:
    """The value, decimals taken for the exact fractions they say."""
    exact: Any = expression.xreplace({number: Rational(str(number)) for number in expression.atoms(Float)})
    if isinstance(exact, UnevaluatedExpr):
        exact = exact.args[0]
    return exact.doit()


def _number(expression: Expr) -> Number | None:
    if isinstance(expression, Float):
        text = str(expression)
        return parse_number(text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text)
    if isinstance(expression, Rational):
        return Number(Fraction(int(expression.p), int(expression.q)))
    return None


def _real_value(constant: Expr) -> Fraction | None:
    """A real constant to `_DIGITS` digits; None if it is not real or too large to write out."""
    value = constant.evalf(_DIGITS)
    if not isinstance(value, Float) or not value.is_finite or abs(sympy.log(abs(value), 10)) > MAX_DIGITS:
        return None
    return Fraction(str(value))


def _same_constant(a: Expr, b: Expr) -> bool:
    gap, scale = abs((a - b).evalf(_DIGITS)), abs(a.evalf(_DIGITS)) + abs(b.evalf(_DIGITS))
    known = gap.is_Float and scale.is_Float
    if known and gap > scale * Rational(_AGREEMENT.numerator, _AGREEMENT.denominator):
        return False
    zero = _is_zero(a - b)
    return bool(known) if zero is None else zero


def _is_zero(difference: Expr) -> bool | None:
    """None: it can't be told."""
    simple = sympy.simplify(difference)
    return simple.equals(0) if simple.is_zero is None else bool(simple.is_zero)


def _same_solutions(gold: Any, answer: Any, *precision: Any) -> bool:
    """Math-verify's comparison by solving, which calls two equations without solutions the same."""
    if not sympy.solve(gold, gold.free_symbols) or not sympy.solve(answer, answer.free_symbols):
        return False
    return _compare_by_solving(gold, answer, *precision)


def _make_exact() -> None:
    """Puts the exact comparison into math-verify. A version without these names is not the one this is written for."""
    for name, replacement in (
        ("sympy_numeric_eq", _same_expression),
        ("sympy_symbolic_eq", lambda a, b: False),  # the comparison above has the last word
        ("sympy_solve_and_compare", _same_solutions),
    ):
        if not hasattr(grader, name):
            raise ImportError(f"math_verify.grader has no {name}: install math-verify>=0.9,<0.10")
        setattr(grader, name, replacement)


_compare_by_solving = grader.sympy_solve_and_compare
_make_exact()
# It warns that no timeout is set, and writes the texts it can't read.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)
