"""ONNX forms of PyTorch's operators on complex numbers that its exporter lacks (seen in 2.13).

A complex tensor is a real one with a last axis of two, the real and the imaginary part. Neural operators (FNO) need them: they
multiply some frequencies by complex weights and put them among zeros. ``custom_translation_table`` takes forms of real operands
only, so :func:`register` adds these to the library that the exporter reads, once in a process; a form that is there stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

from graphc.frontends.torch_export.forms import like, opset, typed

PARTS = {14: 1, 15: 11}
"""ONNX's numbers of the complex types → those of their parts, float32 and float64."""


def holds_complex(captured: Any) -> bool:
    """Whether a captured program computes with complex numbers."""
    values = (node.meta.get("val") for node in captured.graph.nodes)
    return any(getattr(value, "is_complex", bool)() for value in values)


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Entries of the ``custom_translation_table`` for what makes complex numbers of none."""
    import torch
    from onnxscript import INT64
    from onnxscript.function_libs.torch_lib.tensor_typing import TTensor

    aten = torch.ops.aten
    kinds: dict[str, Any] = {"dtype": int, "layout": str, "device": str, "pin_memory": bool, "return": TTensor}
    return {
        aten.full.default: typed(_full, {"size": INT64, "fill_value": TTensor, **kinds}),
        aten.zeros.default: typed(_zeros, {"size": Sequence[INT64], **kinds}),
        aten.new_zeros.default: typed(_new_zeros, {"x": TTensor, "size": INT64, **kinds}),
    }


@functools.cache
def register() -> None:
    """Add the forms to the library of PyTorch's exporter. One thread exports at a time."""
    from onnxscript import INT64 as I
    from onnxscript.function_libs.torch_lib.registration import default_registry, torch_op
    from onnxscript.function_libs.torch_lib.tensor_typing import TFloat

    X: Any = TFloat
    one, size = {"x": X, "dim": int}, Sequence[I]
    table: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "aten::alias": (_same, {"x": X}),
        "aten::detach": (_same, {"x": X}),
        "aten::unsqueeze": (_unsqueeze, one),
        "aten::expand": (_expand, {"x": X, "size": size, "implicit": bool}),
        "aten::select.int": (_select, {**one, "index": I}),
        "aten::slice_scatter": (
            _slice_scatter,
            {"x": X, "source": X, "dim": int, "start": Optional[I], "end": Optional[I], "step": I},  # noqa: UP045
        ),
        "aten::select_scatter": (_select_scatter, {"x": X, "source": X, "dim": int, "index": int}),
        "aten::copy": (_copy, {"x": X, "source": X, "non_blocking": bool}),
        "aten::pad": (_pad, {"x": X, "pad": size, "mode": str, "value": Optional[float]}),  # noqa: UP045
        "aten::constant_pad_nd": (_constant_pad, {"x": X, "pad": size, "value": float}),
        "aten::mm": (_product, {"x": X, "y": X}),
        "aten::bmm": (_product, {"x": X, "y": X}),
        "aten::einsum": (_einsum, {"equation": str, "tensors": Sequence[X], "path": Optional[int]}),  # noqa: UP045
        "aten::mul.Scalar": (_scale, {"x": X, "factor": X}),
        "aten::zeros_like": (
            _zeros_like,
            {"x": X, "dtype": int, "layout": str, "device": str, "pin_memory": bool, "memory_format": str},
        ),
        "aten::exp": (_exp, {"x": X}),
        "aten::tanh": (_tanh, {"x": X}),
    }
    for name, (function, kinds) in table.items():
        if name not in default_registry or not default_registry[name].complex:
            torch_op(name, trace_only=True, complex=True)(typed(function, {"return": X} | kinds))


def _axis(x: Any, dim: int, more: int = 0) -> int:
    """An axis from the front; from the back, the two parts do not count."""
    return int(dim % (len(x.shape) - 1 + more))


def _parts(x: Any) -> tuple[Any, Any]:
    op = opset()
    real, imaginary = op.Split(x, num_outputs=2, axis=-1)
    last = op.Constant(value_ints=[-1])
    return op.Squeeze(real, last), op.Squeeze(imaginary, last)


def _joined(real: Any, imaginary: Any) -> Any:
    op, last = opset(), opset().Constant(value_ints=[-1])
    return op.Concat(op.Unsqueeze(real, last), op.Unsqueeze(imaginary, last), axis=-1)


def _same(x):  # type: ignore[no-untyped-def]
    return opset().Identity(x)


def _unsqueeze(x, dim):  # type: ignore[no-untyped-def]
    return opset().Unsqueeze(x, opset().Constant(value_ints=[_axis(x, dim, 1)]))


def _expand(x, size, implicit=False):  # type: ignore[no-untyped-def]
    from onnxscript.function_libs.torch_lib.ops import common

    return opset().Expand(x, common.merge_dims([*(1 if isinstance(n, int) and n == -1 else n for n in size), 2]))


def _select(x, dim, index):  # type: ignore[no-untyped-def]
    return opset().Gather(x, index, axis=_axis(x, dim))


def _slice_scatter(x, source, dim=0, start=None, end=None, step=1):  # type: ignore[no-untyped-def]
    from onnxscript.function_libs.torch_lib.ops import core

    return core.aten_slice_scatter(x, source, _axis(x, dim), start, end, step)


def _select_scatter(x, source, dim, index):  # type: ignore[no-untyped-def]
    from onnxscript.function_libs.torch_lib.ops import core

    return core.aten_select_scatter(x, source, _axis(x, dim), index)


def _copy(x, source, non_blocking=False):  # type: ignore[no-untyped-def]
    return opset().Expand(source, opset().Shape(x))


def _pad(x, pad, mode="constant", value=None):  # type: ignore[no-untyped-def]
    if mode != "constant":
        raise NotImplementedError(f"F.pad of complex numbers with mode={mode!r} has no translation: pad with zeros")
    return _constant_pad(x, pad, value or 0.0)  # type: ignore[no-untyped-call]


def _constant_pad(x, pad, value=0.0):  # type: ignore[no-untyped-def]
    if value:
        raise NotImplementedError(f"F.pad of complex numbers with value={value} has no translation: pad with zeros")
    before, after = list(pad[::2])[::-1], list(pad[1::2])[::-1]  # from the last axis on
    none = [0] * (len(x.shape) - 1 - len(before))
    return opset().Pad(x, opset().Constant(value_ints=[*none, *before, 0, *none, *after, 0]))


def _product(x, y):  # type: ignore[no-untyped-def]
    (a, b), (c, d), op = _parts(x), _parts(y), opset()
    return _joined(op.Sub(op.MatMul(a, c), op.MatMul(b, d)), op.Add(op.MatMul(a, d), op.MatMul(b, c)))


def _einsum(equation, tensors, path=None):  # type: ignore[no-untyped-def]
    """Of operands of which some may be real: their shapes have no axis more than the equation says."""
    op, terms = opset(), equation.split("->")[0].replace(" ", "").split(",")
    if "." in equation or "->" not in equation or len(terms) > 2:
        raise NotImplementedError(f"an einsum of complex numbers with the equation {equation!r} has no translation")
    split = [_parts(x) if len(x.shape) > len(term) else (x, None) for x, term in zip(tensors, terms, strict=True)]

    def of(*parts: Any) -> Any:
        return op.Einsum(*parts, equation=equation)

    if len(split) == 1:
        return _joined(of(split[0][0]), of(split[0][1]))
    (a, b), (c, d) = split
    if b is None:
        return _joined(of(a, c), of(a, d))
    if d is None:
        return _joined(of(a, c), of(b, c))
    return _joined(op.Sub(of(a, c), of(b, d)), op.Add(of(a, d), of(b, c)))


def _scale(x, factor):  # type: ignore[no-untyped-def]
    op = opset()
    if not isinstance(factor, complex):
        return op.Mul(x, op.CastLike(factor, x))
    (a, b), c, d = _parts(x), like(factor.real, x), like(factor.imag, x)
    return _joined(op.Sub(op.Mul(a, c), op.Mul(b, d)), op.Add(op.Mul(a, d), op.Mul(b, c)))


def _exp(x):  # type: ignore[no-untyped-def]
    (a, b), op = _parts(x), opset()
    size = op.Exp(a)
    return _joined(op.Mul(size, op.Cos(b)), op.Mul(size, op.Sin(b)))


def _tanh(x):  # type: ignore[no-untyped-def]
    """(u + iv) / (1 + iuv) for u = tanh a, v = tan b"""
    (a, b), op = _parts(x), opset()
    u, v, one = op.Tanh(a), op.Tan(b), like(1.0, x)
    uu, vv = op.Mul(u, u), op.Mul(v, v)
    below = op.Add(one, op.Mul(uu, vv))
    return _joined(op.Div(op.Mul(u, op.Add(one, vv)), below), op.Div(op.Mul(v, op.Sub(one, uu)), below))


def _full(size, fill_value, dtype=-1, layout="", device="", pin_memory=False):  # type: ignore[no-untyped-def]
    from onnxscript.function_libs.torch_lib.ops import core

    return _pairs(size, fill_value, PARTS[dtype]) if dtype in PARTS else core.aten_full(size, fill_value, dtype)


def _zeros(size, dtype=1, layout="", device="", pin_memory=False):  # type: ignore[no-untyped-def]
    from onnxscript.function_libs.torch_lib.ops import common, core

    if dtype in PARTS:
        return _pairs(common.merge_dims(size), opset().Constant(value_float=0.0), PARTS[dtype])
    return core.aten_zeros(size, dtype)


def _new_zeros(x, size, dtype=-1, layout="", device="", pin_memory=False):  # type: ignore[no-untyped-def]
    from onnxscript.function_libs.torch_lib.ops import core

    if dtype in PARTS:
        return _pairs(size, opset().Constant(value_float=0.0), PARTS[dtype])
    return core.aten_new_zeros(x, size, dtype)


def _pairs(size: Any, number: Any, kind: int) -> Any:
    """A complex tensor of this size, whose elements are a real number; ``kind``: type of its parts."""
    op = opset()
    real = op.Reshape(op.Cast(number, to=kind), op.Constant(value_ints=[1]))
    parts = op.Concat(real, op.CastLike(op.Constant(value_floats=[0.0]), real), axis=0)
    return op.Expand(parts, op.Concat(op.Cast(size, to=7), op.Constant(value_ints=[2]), axis=0))


def _zeros_like(x, dtype=-1, layout="", device="", pin_memory=False, memory_format=""):  # type: ignore[no-untyped-def]
    return opset().Expand(like(0.0, x), opset().Shape(x))
