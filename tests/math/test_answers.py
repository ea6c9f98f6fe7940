"""Where the final answer stands, and what can be judged on the spot."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.envs.math.answers import AnswerFormat, final_answer, gold_answer
from agentrl.envs.math.plain import canonical, parse_number, quick_verdict
from agentrl.record import EnvError


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{408}", "408"),
        ("First \\boxed{1}, no: \\boxed{ 2 }.", "2"),
        ("\\boxed{\\frac{1}{2}} is a half", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\left\\{ x \\right.}", "\\left\\{ x \\right."),
        ("\\boxed {7}", "7"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{}", None),
        ("\\boxed{ }", None),
        ("The answer is \\boxed{1}. But wait, actually \\boxed{", None),
        ("\\boxed{1} and then \\boxed{2", None),
        ("\\boxed{1} and then \\boxed{{2}", None),
        ("\\boxed{1} and then \\boxed 2", None),
        ("\\boxed{1} and then \\boxed{2\\}", None),
        ("\\boxed{" + "1" * 3000 + "}", None),
        ("408", None),
        ("#### 408", None),
        ("", None),
    ],
)
def test_the_last_complete_box_is_the_answer(text: str, answer: str | None) -> None:
    assert final_answer(text, "boxed") == answer


@pytest.mark.parametrize(
    ("text", "answer_format", "answer"),
    [
        ("so\n#### 42", "gsm8k", "42"),
        ("#### 1\n#### 2 \nbye", "gsm8k", "2"),
        ("so\n####42", "auto", "42"),
        ("#### \n42", "gsm8k", None),
        ("#### 42\n####", "gsm8k", "42"),
        ("  #### 42\r\n", "gsm8k", "42"),
        ("so it is #### 42", "gsm8k", "42"),
        ("first #### Step 1, then", "gsm8k", None),
        ("##### Step 1", "auto", None),
        ("\\boxed{42}", "gsm8k", None),
        ("\\boxed{1} #### 2", "auto", "1"),
        ("#### 2 \\boxed{1", "auto", None),
        ("42", "auto", None),
    ],
)
def test_the_format_says_where_to_look(text: str, answer_format: AnswerFormat, answer: str | None) -> None:
    assert final_answer(text, answer_format) == answer


@pytest.mark.parametrize(
    ("given_answer", "gold"),
    [
        ("48+24 = <<48+24=72>>72 clips.\n#### 72", "72"),
        ("...\n#### 1,234", "1,234"),
        ("We get $\\boxed{\\frac{3}{4}}$ of it.", "\\frac{3}{4}"),
        ("#### Step 1\n1 + 1 = 2\n#### Step 2\nSo it is $\\boxed{2}$.", "2"),
        ("It is \\boxed{1} + 1.\n#### 2\n", "2"),
        ("#### 2\nas was asked", "2"),
        (" 5 ", "5"),
        (72, "72"),
        (0.5, "0.5"),
    ],
)
def test_gold_answers(given_answer: object, gold: str) -> None:
    assert gold_answer(given_answer) == gold


@pytest.mark.parametrize(
    "given_answer", [None, "", "  ", "so\n#### ", "so #### one", "#### 2\n\\boxed{1", "\\boxed{1", "x" * 5000]
)
def test_no_gold_answer_is_a_failure_of_the_machinery(given_answer: object) -> None:
    with pytest.raises(EnvError, match=r"no gold answer .*data\.answer_key"):
        gold_answer(given_answer)


EQUAL = [
    ("72", "72."),
    ("1,234", "$1234"),
    ("1234", "1{,}234"),
    ("1234567", "\\$1,234,567.00"),
    ("0.5", "\\frac12"),
    ("-0.5", "-\\dfrac{1}{2}"),
    ("3/2", "1 1/2"),
    ("3\\frac{1}{2}", "7/2"),
    ("1/3", "0.333333"),
    ("2/3", "0.666667"),
    ("2/3", "0.666666"),
    ("1/3", "0.\\overline{3}"),
    ("0.3", "0.30000000000000004"),
    ("50\\%", "0.5"),
    ("50\\%", "50"),
    ("1500", "1.5 \\times 10^{3}"),
    ("1e-7", "0.0000001"),
    ("-3", "\u22123"),
    ("\\text{Friday}", "friday"),
    ("\\text{(A)}", "A"),
    ("\\left(1, 2\\right)", "(1,2)"),
]
DIFFERENT = [
    ("72", "73"),
    ("1/3", "0.3333"),
    ("2/3", "0.666665"),
    ("1234567", "1234567.4"),
    ("12345678901.0", "12345678902"),
    ("1e-7", "2e-7"),
    ("0.0000001", "0.0000002"),
    ("0.1", "0.1000001"),
    ("1", "1 1/2"),
    ("Friday", "Firday"),
    ("\\text{Friday}", "Monday"),
    ("1", "0.99999"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal_at_once(gold: str, answer: str) -> None:
    assert quick_verdict(gold, answer) is True


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different_at_once(gold: str, answer: str) -> None:
    assert quick_verdict(gold, answer) is False


@pytest.mark.parametrize(
    ("gold", "answer"), [("6", "4 2"), ("42", "4 2"), ("x", "y"), ("2^{99}", "2^{98}"), ("1", "1/0")]
)
def test_the_rest_is_left_to_algebra(gold: str, answer: str) -> None:
    assert quick_verdict(gold, answer) is None


def test_a_pair_is_not_a_number_with_thousands() -> None:
    assert canonical("(1,234)") == "(1,234)"
    assert canonical("[0,100]") == "[0,100]"
    assert canonical("0,100") == "0,100"


@given(st.fractions(), st.fractions())
def test_fractions_are_compared_exactly(a: Fraction, b: Fraction) -> None:
    assert quick_verdict(str(a), f"\\frac{{{b.numerator}}}{{{b.denominator}}}") is (a == b)


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=4))
def test_decimals_have_one_value_however_they_are_written(number: object) -> None:
    parsed = parse_number(canonical(f"{number}"))
    assert parsed is not None and parsed.value == Fraction(str(number))
    assert quick_verdict(str(number), f"${number:,}.") is True


@given(st.text(max_size=300), st.text(alphabet="0123456789.,{}\\$^-+/ %eE\n", max_size=300))
def test_no_text_is_too_much(any_text: str, numeric: str) -> None:
    for text in (any_text, numeric):
        assert quick_verdict("42", text) in (True, False, None)
        final_answer(text)


@pytest.mark.parametrize(
    "text",
    ["9" * 2000, "1," * 900, "{" * 2000, "a b " * 500, "\\text{" * 300, "1/" * 900, "a'" * 900, "0." + "3" * 1900],
)
def test_long_texts_take_no_time(text: str) -> None:
    began = time.perf_counter()
    quick_verdict("42", text)
    quick_verdict("Friday", text)
    assert time.perf_counter() - began < 0.2


def test_long_replies_take_no_time() -> None:
    began = time.perf_counter()
    for reply in ("\\boxed{" + "{" * 1_000_000, "\\boxed{1} " * 100_000, "#### x" * 100_000, "####\n" * 200_000):
        final_answer(reply)
    assert time.perf_counter() - began < 0.5
