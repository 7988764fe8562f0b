"""Evaluates the sizes that a file writes as arithmetic: ``2*N``, ``past + 1``, ``(s0 - 1)//2 + 1``, ``Max(1, N)``."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

_LONGEST = 200
"""Characters; nothing that an exporter writes is longer."""

_NAME = re.compile(r"[^\d\W][\w.\-]*")

_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}

_FUNCTIONS: Mapping[str, Callable[..., Fraction]] = {
    "max": max,
    "min": min,
    "mod": operator.mod,
    "floor": lambda a: Fraction(math.floor(a)),
    "ceil": lambda a: Fraction(math.ceil(a)),
    "ceiling": lambda a: Fraction(math.ceil(a)),
    "floordiv": lambda a, b: Fraction(a // b),
    "cleandiv": operator.truediv,
}


def is_name(text: str) -> bool:
    """Whether a size is one symbol, not arithmetic over symbols."""
    return _NAME.fullmatch(text) is not None


def symbols(text: str) -> list[str]:
    """The names in a size, functions included."""
    return _NAME.findall(text)


def evaluate(text: str, sizes: Mapping[str, int]) -> int | None:
    """The value of a size; None where a name has no size, or the text is no arithmetic that gives a whole number.

    A hyphen inside a word belongs to the name, as in ``seq-len``; a minus has a space on either side.
    """
    if text in sizes:
        return sizes[text]
    if len(text) > _LONGEST:
        return None
    names: dict[str, Fraction] = {}

    def stand_in(match: re.Match[str]) -> str:
        word = match[0]
        if word in sizes:
            names[f"v{len(names)}"] = Fraction(sizes[word])
            return f" v{len(names) - 1} "
        return word.lower()

    try:
        found = _value(ast.parse(_NAME.sub(stand_in, text).strip(), mode="eval").body, names)
    except (SyntaxError, ValueError, TypeError, KeyError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return int(found) if found.denominator == 1 else None


def _value(node: ast.expr, names: Mapping[str, Fraction]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.Name(id=name):
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names)
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_value(left, names), _value(right, names))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return _FUNCTIONS[name](*(_value(argument, names) for argument in arguments))
    raise ValueError("not the arithmetic of a size")
