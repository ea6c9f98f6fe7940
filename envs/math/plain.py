r"""Answers that need no algebra system: plain numbers, words, and the same text on both sides. All of it is exact.

Most answers are of this kind, and judging them takes microseconds and bounded memory, so it is done on the spot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 1000
"""Longest text read as a plain number, and largest power of ten."""

_LEAST_DIGITS = 6
"""So many significant digits make a decimal a rounded value: 0.333333 is 1/3, and 0.33 is not."""

_FLOAT_PLACES, _FLOAT_NOISE = 12, Fraction(1, 10**12)
"""A decimal with so many places may be the output of floating point: it is equal up to this relative error."""

_DELETED = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\!|\\displaystyle|\\\$|\$|\\\(|\\\)|\\\[|\\\]")
_FRACTION_COMMAND = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_SEPARATOR = r"(?:,|\{,\}|\\,|\\ )"
_THOUSANDS = re.compile(rf"(?<![0-9.,])[1-9][0-9]{{0,2}}(?:{_SEPARATOR}[0-9]{{3}})+(?![0-9,])")
_BRACKETS = re.compile(r"[(\[]|\\\{")  # (1,234) is a pair, and 1,234 a number
_LONE_SPACE = re.compile(r"(?<![0-9A-Za-z.}])\s+|\s+(?![0-9A-Za-z.\\{(])")
_MINUS = str.maketrans({"−": "-", "–": "-", "\u00a0": " "})

_NUMBER = re.compile(
    r"""(?P<sign>[+-]?)
    (?:
        (?P<whole>[0-9]*)(?:\.(?P<places>[0-9]*)(?:\\overline\{(?P<repeated>[0-9]+)\})?)?
        (?:[eE](?P<exponent>[+-]?[0-9]{1,4})|\s*(?:\\times|\\cdot|\*|×)\s*10\^(?:\{(?P<braced>[+-]?[0-9]{1,4})\}|(?P<bare>[0-9])))?
      | (?:(?P<mixed>[0-9]+)\s*(?:\s|(?=\\)))?
        (?:(?P<over>[0-9]+)\s*/\s*(?P<under>[0-9]+)|\\frac\s*(?:\{(?P<top>-?[0-9]+)\}|(?P<top1>[0-9]))\s*(?:\{(?P<bottom>[0-9]+)\}|(?P<bottom1>[0-9])))
    )
    \s*(?P<percent>\\?%)?""",
    re.VERBOSE,
)
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox)\{([^{}\\]*)\}")
_WORDS = re.compile(r"\(?[^\W\d_]+(?:[ '\-,][ ]?[^\W\d_]+)*\)?\.?")
_LEAST_LETTERS = 4
"""A bare run of letters is a word from this length on; `xy` is a product."""


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value as it was written.

    Attributes:
        places: digits after the point; 0 for whole numbers and fractions.
        digits: significant digits, from the first that is not zero.
        percent: whether a percent sign followed; `value` is the number before it.
    """

    value: Fraction
    places: int = 0
    digits: int = 0
    percent: bool = False


def canonical(text: str) -> str:
    r"""The same answer without what only sets type: `$`, `\left`, `\dfrac`, thousands commas, spaces, a last period."""
    text = _DELETED.sub("", text.translate(_MINUS))
    text = _FRACTION_COMMAND.sub(r"\\frac", text)
    if not _BRACKETS.search(text):
        text = _THOUSANDS.sub(lambda match: re.sub(_SEPARATOR, "", match[0]), text)
    text = _LONE_SPACE.sub("", re.sub(r"\s+", " ", text.strip()))
    return text.removesuffix(".").strip()


def quick_verdict(gold: str, answer: str) -> bool | None:
    """Whether two answers are equal, where that can be told without algebra; None where it can't."""
    gold, answer = canonical(gold), canonical(answer)
    if gold == answer:
        return bool(gold)
    gold_words, answer_words = words(gold), words(answer)
    if gold_words is not None:
        return gold_words == (answer_words or answer.casefold())
    gold_number, answer_number = parse_number(gold), parse_number(answer)
    if gold_number is not None and answer_number is not None:
        return equal_numbers(gold_number, answer_number)
    return None


def words(text: str) -> str | None:
    r"""The text of an answer in words, such as `\text{Friday}`, in one spelling; None if it is anything else."""
    marked = _TEXT_COMMAND.fullmatch(text) is not None
    plain = _TEXT_COMMAND.sub(r"\1", text).strip()
    letters = max((len(run) for run in re.findall(r"[^\W\d_]+", plain)), default=0)
    if not _WORDS.fullmatch(plain) or not (marked or letters >= _LEAST_LETTERS):
        return None
    return plain.removesuffix(".").strip("() ").casefold()


def parse_number(text: str) -> Number | None:
    r"""The number a canonical text says, such as `-12`, `0.5`, `3/4`, `\frac{3}{4}`, `1.5e-7` or `50\%`; else None."""
    match = _NUMBER.fullmatch(text) if len(text) <= MAX_DIGITS else None
    if match is None:
        return None
    part = match.groupdict()
    sign, percent = -1 if part["sign"] == "-" else 1, part["percent"] is not None
    above, below = part["over"] or part["top"] or part["top1"], part["under"] or part["bottom"] or part["bottom1"]
    if above is not None and below is not None:
        if int(below) == 0:
            return None
        return Number(sign * (int(part["mixed"] or 0) + Fraction(int(above), int(below))), percent=percent)
    whole, places, repeated = part["whole"] or "", part["places"] or "", part["repeated"]
    exponent = int(part["exponent"] or part["braced"] or part["bare"] or 0)
    if not (whole or places or repeated) or abs(exponent) > MAX_DIGITS:
        return None
    value = Fraction(int(whole + places or 0), 10 ** len(places))
    if repeated is not None:
        value += Fraction(int(repeated), 10 ** len(places) * (10 ** len(repeated) - 1))
        return Number(sign * value * Fraction(10) ** exponent, percent=percent)
    after = max(0, len(places) - exponent)
    return Number(sign * value * Fraction(10) ** exponent, after, len((whole + places).lstrip("0")), percent)


def equal_numbers(gold: Number, answer: Number) -> bool:
    """Whether two numbers are equal: exactly, or as one rounded to the decimals of the other.

    A percentage stands for the number before its sign as well as for the hundredth of it.
    """
    if gold.percent == answer.percent:
        return _close(gold, answer)
    number, percentage = (gold, answer) if answer.percent else (answer, gold)
    hundredth = Number(percentage.value / 100, percentage.places + 2 if percentage.places else 0, percentage.digits)
    return _close(number, percentage) or _close(number, hundredth)


def _close(a: Number, b: Number) -> bool:
    return a.value == b.value or _rounds_to(a.value, b) or _rounds_to(b.value, a)


def _rounds_to(exact: Fraction, decimal: Number) -> bool:
    """Whether `decimal` is `exact` rounded or cut off at its last digit, or with an error of floating point."""
    if decimal.places == 0 or decimal.digits < _LEAST_DIGITS:
        return False
    unit = Fraction(1, 10**decimal.places)
    gap = abs(exact - decimal.value)
    if gap <= unit / 2 or (gap < unit and abs(decimal.value) < abs(exact)):
        return True
    return decimal.places >= _FLOAT_PLACES and gap <= _FLOAT_NOISE * abs(exact)
