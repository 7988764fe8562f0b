"""Parses the text of generated kernels: declarations, assignments and expressions of C, blocks and loops.

    const float t3 = (t1 * t2);          Declare("float", "t3", Binary("*", Name("t1"), Name("t2")))
    y0[(r0 * 256 + c1)] = t3;            Assign(Index(Name("y0"), …), Name("t3"))
    EACH(v) { … }                        Loop("EACH", …)

The generator writes few forms (:mod:`graphc.backends.fusion.generator`), so that the language is a small part of C.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


class LanguageError(ValueError):
    """Text that is not of this language."""


@dataclass(frozen=True, slots=True)
class Name:
    """A variable, an array or a constant."""

    text: str


@dataclass(frozen=True, slots=True)
class Number:
    """A literal; ``kind`` is its C type."""

    text: str
    kind: str


@dataclass(frozen=True, slots=True)
class Unary:
    """``-x``, ``!x`` or ``~x``."""

    sign: str
    value: Expression


@dataclass(frozen=True, slots=True)
class Binary:
    """``a sign b``."""

    sign: str
    left: Expression
    right: Expression


@dataclass(frozen=True, slots=True)
class Conditional:
    """``test ? yes : no``."""

    test: Expression
    yes: Expression
    no: Expression


@dataclass(frozen=True, slots=True)
class Convert:
    """``(kind)value``."""

    kind: str
    value: Expression


@dataclass(frozen=True, slots=True)
class Index:
    """``array[at]``."""

    array: str
    at: Expression


@dataclass(frozen=True, slots=True)
class Call:
    """``function(arguments)``; ``types`` are the arguments of a template."""

    function: str
    arguments: tuple[Expression, ...]
    types: tuple[str, ...] = ()


Expression = Name | Number | Unary | Binary | Conditional | Convert | Index | Call


@dataclass(frozen=True, slots=True)
class Declare:
    """``kind name = value;`` or, with ``count``, ``kind name[count];``."""

    kind: str
    name: str
    value: Expression | None
    count: str | None = None


@dataclass(frozen=True, slots=True)
class Assign:
    """``target = value;``."""

    target: Name | Index
    value: Expression


@dataclass(frozen=True, slots=True)
class Do:
    """A call for its effect."""

    call: Call


@dataclass(frozen=True, slots=True)
class Block:
    """A loop or a condition over statements: ``FOR_ROWS``, ``FOR_COLUMNS``, ``EACH``, ``FIRST_LANE`` …"""

    kind: str
    body: tuple[Statement, ...]


Statement = Declare | Assign | Do | Block

_TOKEN = re.compile(
    r"\s*(?:(?P<number>0[xX][0-9a-fA-F]+[uUlL]*|(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?[fFuUlL]*)"
    r"|(?P<name>[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*)|(?P<sign><<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>!~?:()\[\]{};,=&|^.]))"
)

_TYPE_WORDS = frozenset({"const", "unsigned", "signed", "int", "long", "short", "char", "float", "double", "bool", "INDEX"})

_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", "<=", ">", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
"""Binary operators, those that bind least first."""

_BLOCKS = re.compile(r"FOR_\w+|ROW_CHUNK|EACH")


def parse(text: str) -> tuple[Statement, ...]:
    """Parse statements.

    Raises:
        LanguageError: text of another form.
    """
    parser = _Parser(_tokens(text))
    found = parser.statements()
    if parser.here:
        raise LanguageError(f"unexpected {parser.here!r}")
    return found


def _tokens(text: str) -> list[str]:
    found, place = [], 0
    text = text.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise LanguageError(f"cannot read {text[place : place + 40]!r}")
        found.append(match[0].strip())
        place = match.end()
    return found


class _Parser:
    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens, self._place = tokens, 0

    @property
    def here(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _ahead(self, by: int) -> str:
        return self._tokens[self._place + by] if self._place + by < len(self._tokens) else ""

    def _take(self, wanted: str | None = None) -> str:
        found = self.here
        if wanted is not None and found != wanted:
            raise LanguageError(f"expected {wanted!r}, found {found!r}")
        self._place += 1
        return found

    def statements(self) -> tuple[Statement, ...]:
        found: list[Statement] = []
        while self.here and self.here != "}":
            found += self._statement()
        return tuple(found)

    def _statement(self) -> list[Statement]:
        if self.here == ";":
            self._take()
            return []
        if self.here == "{":
            return list(self._body())
        if _BLOCKS.fullmatch(self.here):
            kind = self._take()
            self._skip_arguments()
            return [Block(kind, self._body())]
        if self.here == "if":
            self._take()
            self._skip_arguments()
            return [Block("FIRST_LANE", self._body())]
        if self.here in _TYPE_WORDS:
            return self._declarations()
        value = self._postfix()
        if isinstance(value, Call):
            self._take(";")
            return [Do(value)]
        if not isinstance(value, Name | Index):
            raise LanguageError(f"cannot assign to {value}")
        self._take("=")
        result = self.expression()
        self._take(";")
        return [Assign(value, result)]

    def _body(self) -> tuple[Statement, ...]:
        if self.here != "{":
            return tuple(self._statement())
        self._take("{")
        found = self.statements()
        self._take("}")
        return found

    def _skip_arguments(self) -> None:
        self._take("(")
        while self._take() != ")":
            pass

    def _type(self) -> str:
        words = []
        while self.here in _TYPE_WORDS:
            words.append(self._take())
        return " ".join(word for word in words if word != "const")

    def _declarations(self) -> list[Statement]:
        kind, found = self._type(), list[Statement]()
        while True:
            name, count, value = self._take(), None, None
            if self.here == "[":
                self._take()
                count = self._take()
                self._take("]")
            if self.here == "=":
                self._take()
                value = self.expression()
            found.append(Declare(kind, name, value, count))
            if self._take() == ";":
                return found

    # Expressions ------------------------------------------------------------------------------------------------------

    def expression(self) -> Expression:
        test = self._binary(0)
        if self.here != "?":
            return test
        self._take()
        yes = self.expression()
        self._take(":")
        return Conditional(test, yes, self.expression())

    def _binary(self, level: int) -> Expression:
        if level == len(_LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while self.here in _LEVELS[level]:
            sign = self._take()
            left = Binary(sign, left, self._binary(level + 1))
        return left

    def _unary(self) -> Expression:
        if self.here in ("-", "!", "~"):
            return Unary(self._take(), self._unary())
        if self.here == "(" and self._ahead(1) in _TYPE_WORDS:
            self._take()
            kind = self._type()
            self._take(")")
            return Convert(kind, self._unary())
        return self._postfix()

    def _postfix(self) -> Expression:
        if self.here == "(":
            self._take()
            found = self.expression()
            self._take(")")
            return found
        token = self._take()
        if token[:1].isdigit() or token[:1] == ".":
            return Number(token, _kind_of(token))
        if not re.fullmatch(r"[\w:]+", token):
            raise LanguageError(f"unexpected {token!r}")
        types: tuple[str, ...] = ()
        if self.here == "<" and re.fullmatch(
            r"(whole_power|floor_mod|same_bits|reduce_lanes|reduce_across|philox_words)", token
        ):
            types = self._template()
        if self.here == "(":
            return Call(token, self._arguments(), types)
        if self.here == "[":
            self._take()
            at = self.expression()
            self._take("]")
            return Index(token, at)
        return Name(token)

    def _template(self) -> tuple[str, ...]:
        self._take("<")
        found, words = [], list[str]()
        while True:
            token = self._take()
            if token in (",", ">"):
                found.append(" ".join(words))
                words = []
                if token == ">":
                    return tuple(found)
            else:
                words.append(token)

    def _arguments(self) -> tuple[Expression, ...]:
        self._take("(")
        found = []
        while self.here != ")":
            found.append(self.expression())
            if self.here == ",":
                self._take()
        self._take(")")
        return tuple(found)


def _kind_of(token: str) -> str:
    low = token.lower()
    if not low.startswith("0x") and ("." in low or "e" in low or low.endswith("f")):
        return "float" if low.endswith("f") else "double"
    unsigned, long = "u" in low, low.rstrip("u").endswith("l")
    return f"{'unsigned ' if unsigned else ''}{'long long' if long else 'int'}"
