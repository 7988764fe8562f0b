"""What the ONNX forms of PyTorch's operators are written with."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir import DOMAIN

INT64, BOOL, FLOAT64 = 7, 9, 11


def typed(function: Callable[..., Any], kinds: dict[str, Any]) -> Callable[..., Any]:
    """A copy of ``function`` that says what its operands are: the exporter reads it from annotations that are types."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = kinds
    return copy


def opset() -> Any:
    """The builders of ONNX operators that the exporter records."""
    from onnxscript import opset20

    return opset20  # its annotations allow no lists, which the exporter turns into constants


def own(kind: str, inputs: str, outputs: str, *whole: str) -> Any:
    """The builder of an op of graphc's own, of operands and results of one float type.

    Args:
        whole: its attributes, whole numbers.
    """
    from onnx.defs import OpSchema
    from onnxscript.values import Op, Opset

    kinds = [("T", [f"tensor({name})" for name in ("float", "double", "float16", "bfloat16")], "")]
    operands, results = ([OpSchema.FormalParameter(name, "T") for name in names.split()] for names in (inputs, outputs))
    attributes = [OpSchema.Attribute(name, OpSchema.AttrType.INT, "", required=False) for name in whole]
    schema = OpSchema(kind, DOMAIN, 1, doc="", inputs=operands, outputs=results, type_constraints=kinds, attributes=attributes)
    return Op(Opset(DOMAIN, 1), kind, schema)


def like(number: float, x: Any) -> Any:
    """A number of the type of ``x``."""
    op = opset()
    return op.CastLike(op.Constant(value=ir.tensor(np.float64(number))), x)


def fixed_length(x: Any, axis: int, operator: str) -> int:
    """The length of an axis.

    Raises:
        NotImplementedError: it is not known.
    """
    length = x.shape[axis]
    if not isinstance(length, int):
        raise NotImplementedError(f"{operator} along an axis of free length has no translation: fix the axis' length")
    return length


def axis_of(x: Any, dim: int) -> int:
    """An axis from the front."""
    return dim % max(1, len(x.shape))
