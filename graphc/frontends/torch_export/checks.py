"""Checks of data in a module's code, which a capture passes: it has no values, and the graph that it makes has no exceptions.

    assert torch.isfinite(x).all()               True
    if (x < 0).any(): raise ValueError(…)        False

What the condition is follows from the bytecode: of the two ways from it, one ends in ``raise``.
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

_LIBRARIES = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))
"""How the files of PyTorch and of this package begin."""

_PASSED_BY = frozenset({"TO_BOOL", "COMPARE_OP", "CALL", "PRECALL", "NOP", "EXTENDED_ARG", "CACHE"})
"""Instructions that make a truth value of a value, or nothing, before a jump reads it."""

_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RERAISE", "YIELD_VALUE", "FOR_ITER"})


class Checks(list[str]):
    """The places of the checks that a capture has passed, as file:line."""

    def passed(self, frame: FrameType | None) -> bool | None:
        """The truth value that the code in ``frame`` must get for its check to pass; None: it is no check."""
        value = None if frame is None else passing(frame.f_code, frame.f_lasti)
        if value is not None:
            self.note()
        return value

    def of_tensor(self) -> bool | None:
        """:meth:`passed` for the code that asks a tensor for its truth value; each mode that hears of it adds a frame."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_name == "__torch_function__":
            frame = frame.f_back
        return self.passed(frame)

    def note(self) -> None:
        """Add the place in the module's code that is under way."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
            frame = frame.f_back
        if frame is not None and (place := f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}") not in self:
            self.append(place)

    @contextmanager
    def of_numbers(self) -> Iterator[None]:
        """Pass the checks of a module's own code that compare numbers which ``item()`` has taken from tensors."""
        plain = torch.SymBool.__bool__

        def truth(number: torch.SymBool) -> bool:
            frame = sys._getframe(1)  # PyTorch compares such numbers too, in operators, and takes an error for an answer
            own = not frame.f_code.co_filename.startswith(_LIBRARIES)
            value = self.passed(frame) if own and free_unbacked_symbols(number) else None
            return plain(number) if value is None else value  # type: ignore[no-untyped-call]

        torch.SymBool.__bool__ = truth  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.SymBool.__bool__ = plain  # type: ignore[method-assign]


def passing(code: CodeType, at: int) -> bool | None:
    """The truth value of what the instruction at the offset ``at`` tests that does not lead to ``raise``, if the other does."""
    instructions = list(dis.get_instructions(code))
    places = {instruction.offset: k for k, instruction in enumerate(instructions)}
    if at not in places:  # a call is under way, and nothing is tested
        return None
    raises = [_raises(instructions, places, places[at], value) for value in (False, True)]
    return None if None in raises or raises[0] == raises[1] else bool(raises[0])


def _raises(instructions: Sequence[dis.Instruction], places: Mapping[int, int], start: int, value: bool) -> bool | None:
    """Whether code goes straight to ``raise`` if what it tests at ``start`` is ``value``; None: no jump follows the test."""
    for k in range(start, len(instructions)):
        name = instructions[k].opname
        if name == "UNARY_NOT":
            value = not value
        elif name.startswith("POP_JUMP") and name.endswith(("IF_TRUE", "IF_FALSE")):
            jumps = name.endswith("TRUE") == value
            return _ends_in_raise(instructions[places[instructions[k].argval] if jumps else k + 1 :])
        elif name not in _PASSED_BY:
            return None
    return None


def _ends_in_raise(instructions: Sequence[dis.Instruction]) -> bool:
    for instruction in instructions:
        if instruction.opname == "RAISE_VARARGS":
            return True
        if instruction.opname in _ENDS or "JUMP" in instruction.opname:
            return False
    return False
