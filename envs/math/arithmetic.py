"""Arithmetic questions with one verifiable answer, the calculator that solves them, and the grading of replies.

Problems are `a + b`, `a - b` and `a * b` with operands of two or three digits, put into words in sixteen ways
an operator. They are made, not stored: a split, a count and a seed always give the same list.
"""

from __future__ import annotations

import ast
import operator as operators
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal, get_args

Split = Literal["train", "test", "test_paraphrase"]

SYSTEM_PROMPT = "Solve the problem. You may call a tool first. Put the final answer in \\boxed{}."
"""What the policy is told; the tool lines follow it, see `agentrl.record.messages.with_compact_tools`."""

CALCULATOR_SPEC: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
"""`calculator(expression: string)` as an OpenAI tool specification; `calculate` is what it runs."""

MAX_EXPRESSION_LENGTH = 128
"""Longest expression `calculate` reads, in characters."""

MAX_MAGNITUDE = 10**15
"""Largest absolute value `calculate` accepts, for literals, intermediate values and the result."""

DECIMAL_PLACES = 6
"""`calculate` rounds results that are not whole numbers to this many decimals."""

HELD_OUT_ONE_IN = 10
"""One pair of operands in so many belongs to the test splits and is never trained on."""

# The last four wordings of each operator are word problems. Operands of a subtraction come larger first.
_WORDINGS: dict[str, tuple[str, ...]] = {
    "+": (
        "What is {a} + {b}?",
        "Compute {a} + {b}.",
        "Calculate {a} plus {b}.",
        "Add {a} and {b}.",
        "{a} + {b} = ?",
        "Find the sum of {a} and {b}.",
        "What do you get when you add {b} to {a}?",
        "How much is {a} plus {b}?",
        "Please work out {a} + {b}.",
        "Evaluate {a} + {b}.",
        "I need the total of {a} and {b}.",
        "Tell me the result of {a} + {b}.",
        "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
        "A train carries {a} boxes of {things} and {b} more are loaded. How many boxes are on the train?",
        "A shop sold {a} {things} on Monday and {b} on Tuesday. How many did it sell in total?",
        "{name} walked {a} meters and then another {b} meters. How far did {name} walk?",
    ),
    "-": (
        "What is {a} - {b}?",
        "Compute {a} - {b}.",
        "Calculate {a} minus {b}.",
        "Subtract {b} from {a}.",
        "{a} - {b} = ?",
        "Find the difference between {a} and {b}.",
        "What do you get when you take {b} from {a}?",
        "How much is {a} minus {b}?",
        "Please work out {a} - {b}.",
        "Evaluate {a} - {b}.",
        "I need {a} less {b}.",
        "Tell me the result of {a} - {b}.",
        "{name} has {a} {things} and gives away {b} of them. How many {things} are left?",
        "A train carries {a} boxes of {things} and {b} are unloaded. How many boxes are still on the train?",
        "A shop had {a} {things} and sold {b} of them. How many {things} remain?",
        "{name} must walk {a} meters and has walked {b}. How many meters are left?",
    ),
    "*": (
        "What is {a} * {b}?",
        "Compute {a} * {b}.",
        "Calculate {a} times {b}.",
        "Multiply {a} by {b}.",
        "{a} * {b} = ?",
        "Find the product of {a} and {b}.",
        "What do you get when you multiply {a} and {b}?",
        "How much is {a} times {b}?",
        "Please work out {a} * {b}.",
        "Evaluate {a} * {b}.",
        "I need the product {a} * {b}.",
        "Tell me the result of {a} * {b}.",
        "{name} has {a} bags with {b} {things} each. How many {things} does {name} have?",
        "A train carries {a} boxes with {b} {things} each. How many {things} are on the train?",
        "A shop sells {a} {things} at {b} dollars each. How many dollars does it take in?",
        "{name} walks {a} meters every day for {b} days. How far does {name} walk?",
    ),
}

_PARAPHRASES: dict[str, tuple[str, ...]] = {
    "+": (
        "Can you work out what {a} and {b} make in total?",
        "Result of adding {a} and {b}?",
        "Please find {a} plus {b}.",
        "{name} sold {a} {things} and then {b} more. How many {things} did {name} sell?",
    ),
    "-": (
        "Can you work out what is left of {a} less {b}?",
        "Result of {a} minus {b}?",
        "Please find {a} - {b}.",
        "{name} had {a} {things} and sold {b}. How many {things} does {name} still have?",
    ),
    "*": (
        "Can you work out the product of {a} and {b}?",
        "Result of multiplying {a} by {b}?",
        "Please find {a} times {b}.",
        "{name} buys {a} boxes with {b} {things} each. How many {things} does {name} get?",
    ),
}

_NAMES = (  # noqa: SIM905
    "Aisha Alexander Amara Andrew Anna Ben Carlos Charlotte Chen Daniel David Elena Elizabeth Emma Fatima "
    "Frank George Grace Hannah Henry Ibrahim Isabella James Jasmine Joseph Julia Kevin Laura Leo Lucy "
    "Marcus Maria Matthew Mia Mohammed Nadia Nicholas Olivia Oscar Patrick Priya Rachel Robert Samuel "
    "Sofia Theodore Victor Yuki"
).split()

_THINGS = (  # noqa: SIM905
    "apples balloons baskets batteries blankets books bottles bricks buttons cakes candles carrots chairs "
    "cherries coins cookies cups diamonds doughnuts eggs envelopes feathers flowers forks glasses gloves "
    "hammers jackets keys kites ladders lamps lemons magazines marbles melons mirrors mushrooms napkins "
    "notebooks onions oranges paintings peaches pencils pillows plates postcards potatoes puzzles ribbons "
    "rulers sandwiches scarves shells shirts spoons stamps stickers strawberries sweaters tickets "
    "tomatoes towels toys umbrellas vases violins whistles"
).split()

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operators.add,
    ast.Sub: operators.sub,
    ast.Mult: operators.mul,
    ast.Div: operators.truediv,
}


@dataclass(frozen=True)
class Problem:
    """One question and its gold answer.

    Attributes:
        question: what the user asks, e.g. `"Add 12 and 34."`.
        answer: the whole number that is right, without separators, e.g. `"46"`.
        expression: what a calculator must be asked, e.g. `"12 + 34"`.
        operator: `"+"`, `"-"` or `"*"`.
    """

    question: str
    answer: str
    expression: str
    operator: str


def generate_problems(split: Split, count: int, seed: int) -> list[Problem]:
    """Draws `count` problems of a split; the same arguments give the same list on every machine.

    Operators are drawn uniformly, and so are the wordings. A pair of operands is either trained or tested,
    never both, in whichever order it is written: `train` never holds an expression of the two test splits.
    `test_paraphrase` also words its questions in ways that `train` never does.

    Raises:
        ValueError: unknown split or a negative count.
    """
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}: use one of {', '.join(get_args(Split))}")
    if count < 0:
        raise ValueError(f"count is {count}: pass zero or more")
    random_source = random.Random(f"arithmetic/{split}/{seed}")
    wordings = _PARAPHRASES if split == "test_paraphrase" else _WORDINGS
    problems: list[Problem] = []
    while len(problems) < count:
        operator = random_source.choice("+-*")
        a, b = _operand(random_source), _operand(random_source)
        if operator == "-" and a < b:
            a, b = b, a
        if is_held_out(a, operator, b) == (split != "train"):
            name, things = random_source.choice(_NAMES), random_source.choice(_THINGS)
            question = random_source.choice(wordings[operator]).format(a=a, b=b, name=name, things=things)
            expression = f"{a} {operator} {b}"
            problems.append(Problem(question, calculate(expression), expression, operator))
    return problems


def is_held_out(a: int, operator: str, b: int) -> bool:
    """Whether `a operator b` belongs to the test splits; the order of the operands makes no difference."""
    key = f"{min(a, b)} {operator} {max(a, b)}"
    return zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0


def _operand(random_source: random.Random) -> int:
    low, high = random_source.choice(((10, 99), (100, 999)))
    return random_source.randint(low, high)


def calculate(expression: str) -> str:
    """Evaluates + - * / and parentheses over whole and decimal numbers exactly; the result is in decimals.

    >>> calculate("12 * (3 + 4) / 8")
    '10.5'

    Raises:
        ValueError: the expression is too long, is not arithmetic, uses another operator, divides by zero or
            passes `MAX_MAGNITUDE`. The message is fit to be shown to a model as the result of its call.
    """
    text = expression.strip()
    if len(text) > MAX_EXPRESSION_LENGTH:
        raise ValueError(f"the expression has {len(text)} characters: use at most {MAX_EXPRESSION_LENGTH}")
    if not re.fullmatch(r"[0-9+\-*/(). ]+", text):
        raise ValueError("only numbers, + - * / and parentheses are allowed")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"not an arithmetic expression: {text}") from None
    try:
        return _decimal_text(_value(tree.body))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def _value(node: ast.expr) -> Fraction:
    """The exact value of an expression tree whose every part stays within `MAX_MAGNITUDE`."""
    match node:
        case ast.Constant(value=int() | float() as literal):
            value = Fraction(str(literal)) if abs(literal) <= MAX_MAGNITUDE else None
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            value = _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            value = _BINARY[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("only numbers, + - * / and parentheses are allowed")
    if value is None or abs(value) > MAX_MAGNITUDE:
        raise ValueError(f"a value is larger than {MAX_MAGNITUDE}")
    return value


def _decimal_text(value: Fraction) -> str:
    rounded = round(value, DECIMAL_PLACES)
    return f"{Decimal(rounded.numerator) / Decimal(rounded.denominator):f}"


def boxed_answer(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, braces balanced; None without a box or if the last is not closed."""
    marker = "\\boxed{"
    start = text.rfind(marker)
    if start < 0:
        return None
    start += len(marker)
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None


def score_answer(text: str, answer: str) -> float:
    """1.0 if the last box of `text` holds `answer`, spaces and thousands commas aside; otherwise 0.0."""
    boxed = boxed_answer(text)
    return float(boxed is not None and _plain_number(boxed) == _plain_number(answer))


def _plain_number(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", re.sub(r"\s", "", text))
