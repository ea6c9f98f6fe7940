"""Evaluation of texts that a model wrote, without running them as programs; in place of `eval` and sympy's parser.

What can be written here may still take any time and memory: the caller sets limits.
"""

from __future__ import annotations

import ast
import re
import sys
from typing import Any

import sympy
from sympy.parsing import sympy_parser

_MAX_LENGTH = 2000
"""Longest expression that is read, in characters."""

_LITERAL_NODES = (
    *(ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load),
    *(ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator),
)
# No attributes, no text, no subscripts: neither `x.real` nor `__class__` can be written.
_EXPRESSION = re.compile(r"(?!.*__)(?!.*\.\s*[A-Za-z_])[0-9A-Za-z_+\-*/^(),.\s]*", re.DOTALL)

# Nothing but mathematics has a name: all others become symbols, and the builtins are out of reach. `Integral` has none,
# so that the integral asked for, left as it is, is no answer.
_NAMES: dict[str, Any] = {
    "__builtins__": {},
    **{name: each for name, each in vars(sympy).items() if isinstance(each, type) and issubclass(each, sympy.Function)},
    **{name: getattr(sympy, name) for name in ("Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow")},
    **{name: getattr(sympy, name) for name in ("sqrt", "cbrt", "root", "pi", "E", "I", "oo", "zoo", "nan")},
    "abs": sympy.Abs,
}

_parse_expr = sympy_parser.parse_expr


def evaluate(text: str) -> Any:
    """The value of a Python literal or of arithmetic with literals.

    Raises:
        SyntaxError: it is something else.
    """
    tree = ast.parse(text.strip(), mode="eval")
    if not all(isinstance(node, _LITERAL_NODES) for node in ast.walk(tree)):
        raise SyntaxError("neither a literal nor arithmetic")
    return eval(compile(tree, "<answer>", "eval"), {"__builtins__": {}})


def parse_expression(text: str, local_dict: dict[str, Any] | None = None, **options: Any) -> Any:
    """`sympy.parse_expr` for arithmetic, symbols and mathematical functions.

    Raises:
        SyntaxError: it is something else, or too long.
    """
    if len(text) > _MAX_LENGTH or not _EXPRESSION.fullmatch(text):
        raise SyntaxError("no plain mathematical expression")
    return _parse_expr(text, local_dict, **{**options, "global_dict": dict(_NAMES)})


def guard(package: str) -> None:
    """Puts the two in place of `eval` and sympy's parser: in the modules of a package, and where sympy reads texts."""
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(f"{package}."):
            names = vars(module)
            names.update({key: parse_expression for key, value in names.items() if value is _parse_expr})
            names["eval"] = evaluate
    setattr(sympy, "parse_expr", parse_expression)  # noqa: B010  # to a type checker it is another function
    setattr(sympy_parser, "parse_expr", parse_expression)  # noqa: B010  # here `sympify` finds it
