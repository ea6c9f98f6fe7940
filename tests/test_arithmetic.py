"""Arithmetic problems, the calculator and the grading of answers."""

import re
import time

import pytest

from agentrl.envs.math.arithmetic import (
    MAX_EXPRESSION_LENGTH,
    MAX_MAGNITUDE,
    Split,
    boxed_answer,
    calculate,
    generate_problems,
    is_held_out,
    score_answer,
)

SPLITS: tuple[Split, ...] = ("train", "test", "test_paraphrase")


def operands(expression: str) -> tuple[str, frozenset[str]]:
    """The operator and the two numbers, in no order."""
    a, operator, b = expression.split()
    return operator, frozenset((a, b))


@pytest.mark.parametrize("split", SPLITS)
def test_problems_are_determined_by_split_count_and_seed(split: Split) -> None:
    problems = generate_problems(split, 200, seed=3)
    assert problems == generate_problems(split, 200, seed=3)
    assert problems[:50] == generate_problems(split, 50, seed=3)
    assert problems != generate_problems(split, 200, seed=4)


def test_the_held_out_pairs_never_move() -> None:
    """The split is part of what the committed weights were trained on, so it may not depend on the machine."""
    assert [a for a in range(10, 100) if is_held_out(a, "+", 57)] == [12, 16, 18, 33, 34, 44, 62, 69, 81]
    assert generate_problems("test", 1, seed=0)[0].expression == "62 * 558"


def test_no_pair_of_operands_is_both_trained_and_tested() -> None:
    trained = {operands(problem.expression) for problem in generate_problems("train", 5000, seed=0)}
    for split in SPLITS[1:]:
        tested = {operands(problem.expression) for problem in generate_problems(split, 1000, seed=1)}
        assert len(tested) > 900
        assert not trained & tested


def test_paraphrases_are_worded_as_training_never_is() -> None:
    def wordings(split: Split, count: int) -> set[str]:
        return {re.sub(r"\d+", "#", problem.question) for problem in generate_problems(split, count, seed=0)}

    assert wordings("test", 20) & wordings("train", 5000)
    assert not wordings("test_paraphrase", 500) & wordings("train", 5000)


@pytest.mark.parametrize("split", SPLITS)
def test_problems_state_their_operands_and_the_right_answer(split: Split) -> None:
    problems = generate_problems(split, 600, seed=0)
    for problem in problems:
        a, operator, b = problem.expression.split()
        assert operator == problem.operator
        assert a in problem.question and b in problem.question
        assert {len(a), len(b)} <= {2, 3}
        assert problem.answer == str({"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operator])
        assert int(problem.answer) >= 0
    for operator in "+-*":
        assert 150 < sum(problem.operator == operator for problem in problems) < 250


def test_unknown_split_and_negative_count_are_errors() -> None:
    with pytest.raises(ValueError, match="use one of train, test, test_paraphrase"):
        generate_problems("validation", 1, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass zero or more"):
        generate_problems("train", -1, 0)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12 * 34", "408"),
        ("  7-10 ", "-3"),
        ("12 * (3 + 4) / 8", "10.5"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.333333"),
        ("1 / 3 * 3", "1"),
        ("6 / 3", "2"),
        ("-(-5)", "5"),
        (f"{MAX_MAGNITUDE}", "1000000000000000"),
    ],
)
def test_calculator(expression: str, result: str) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("9**9**9", "only numbers"),
        ("7 // 2", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("1e9", "only numbers"),
        ("1, 2", "only numbers"),
        ("1 < 2", "only numbers"),
        ("", "only numbers"),
        ("12 +", "not an arithmetic expression"),
        ("12 34", "not an arithmetic expression"),
        ("(" * 60 + "1", "not an arithmetic expression"),
        ("1 / (2 - 2)", "division by zero"),
        (f"{MAX_MAGNITUDE} + 1", "larger than"),
        ("999999999 * 999999999 / 999999999", "larger than"),
        ("1" * (MAX_EXPRESSION_LENGTH + 1), "use at most"),
    ],
)
def test_calculator_refuses_with_a_reason(expression: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calculate(expression)


def test_calculator_takes_no_time_on_the_deepest_expression() -> None:
    started = time.perf_counter()
    assert calculate("1/(" * 31 + "1" + ")" * 31) == "1"
    assert time.perf_counter() - started < 0.1


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        ("\\boxed{408}", "408"),
        ("First \\boxed{1}, no: \\boxed{2}.", "2"),
        ("\\boxed{\\frac{1}{2}} is a half", "\\frac{1}{2}"),
        ("\\boxed{}", ""),
        ("The answer is \\boxed{1}. But wait, actually \\boxed{", None),
        ("\\boxed{1} and then \\boxed{{2}", None),
        ("\\boxed 3", None),
        ("408", None),
        ("", None),
    ],
)
def test_boxed_answer(text: str, boxed: str | None) -> None:
    assert boxed_answer(text) == boxed


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("\\boxed{408}", "408", 1.0),
        ("\\boxed{ 1,234,567 }", "1234567", 1.0),
        ("\\boxed{-3}", "-3", 1.0),
        ("\\boxed{1,23}", "123", 0.0),
        ("\\boxed{0408}", "408", 0.0),
        ("\\boxed{409}", "408", 0.0),
        ("408", "408", 0.0),
        ("\\boxed{408} or \\boxed{", "408", 0.0),
    ],
)
def test_score_answer(text: str, answer: str, score: float) -> None:
    assert score_answer(text, answer) == score
