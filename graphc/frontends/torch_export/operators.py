"""ONNX forms of PyTorch's operators that its exporter lacks, or writes down with another meaning (seen in 2.13).

Wrong there: ``squeeze`` of an axis that is longer than one, which PyTorch leaves alone; the mean of ``scatter_reduce``; the
``divisor_override`` of average pools; indices of 32 bits. Without a form there: running products, running extrema,
order statistics, deviations, distances and others of :func:`translations`.

Gradients follow from the forms. They are those of PyTorch, except that places where a function has a kink may count otherwise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import onnx_ir as ir

from graphc.frontends.torch_export.forms import BOOL, INT64, axis_of, fixed_length, like, opset, own, typed
from graphc.frontends.torch_export.special import log_add_exp


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Entries of the ``custom_translation_table`` of ``torch.onnx.export``."""
    import torch
    from onnxscript import BOOL as LOGICAL
    from onnxscript import INT32 as I32
    from onnxscript import INT64 as I
    from onnxscript.function_libs.torch_lib.tensor_typing import TFloat as X
    from onnxscript.function_libs.torch_lib.tensor_typing import TReal, TTensor

    aten = torch.ops.aten
    R: Any = TReal
    lists, numbers, maybe = Sequence[int], {"dim": int, "keepdim": bool}, int | None
    indices = Sequence[Optional[Union[I32, I, LOGICAL]]]  # noqa: UP007, UP045 (the exporter takes no other form)
    put = {"x": TReal, "indices": indices, "values": TReal, "accumulate": bool}
    pool: dict[str, Any] = {"x": X, "kernel_size": lists, "stride": lists, "padding": lists}
    pool |= {"ceil_mode": bool, "count_include_pad": bool, "divisor_override": maybe}
    resized = {"x": X, "output_size": Optional[I], "align_corners": bool, "scale_factors": Optional[lists]}  # noqa: UP045
    placed = {"layout": str, "device": str, "pin_memory": bool}
    spread: dict[str, Any] = {"x": X, "dim": Sequence[int] | None, "correction": float | None, "keepdim": bool}
    table: list[tuple[Any, Callable[..., Any], dict[str, Any]]] = [
        (aten.squeeze.dim, _squeeze, {"x": TTensor, "dims": int, "return": TTensor}),
        (aten.squeeze.dims, _squeeze, {"x": TTensor, "dims": lists, "return": TTensor}),
        (aten.copy.default, _copy, {"x": TTensor, "source": TTensor, "non_blocking": bool, "return": TTensor}),
        (aten.index_put.default, _index_put, put),
        (aten._unsafe_index_put.default, _index_put, put),
        (
            aten.scatter_reduce.two,
            _scatter_reduce,
            {"x": TReal, "dim": int, "index": I, "src": TReal, "reduce": str, "include_self": bool},
        ),
        (aten.avg_pool2d.default, _average_pool, pool),
        (aten.avg_pool3d.default, _average_pool, pool),
        (aten.adaptive_max_pool2d.default, _adaptive_max_pool, {"x": X, "output_size": lists}),
        (aten.upsample_linear1d.vec, _linear_upsampling, resized),
        (aten.upsample_bilinear2d.vec, _linear_upsampling, resized),
        (aten.upsample_trilinear3d.vec, _linear_upsampling, resized),
        (aten.cumprod.default, _cumprod, {"x": X, "dim": int, "dtype": maybe}),
        (aten.logcumsumexp.default, _log_cumsum_exp, {"x": X, "dim": int}),
        (aten.cummax.default, _running_extreme("Greater", -math.inf), {"x": X, "dim": int}),
        (aten.cummin.default, _running_extreme("Less", math.inf), {"x": X, "dim": int}),
        (aten.kthvalue.default, _kth_value, {"x": X, "k": int, **numbers}),
        (
            aten.sort.stable,
            _stable_sort,
            {"x": TReal, "stable": Optional[bool], "dim": int, "descending": bool, "return": TReal},  # noqa: UP045
        ),
        (aten.median.dim, _median, {"x": X, **numbers}),
        (aten.median.default, _median_of_all, {"x": X}),
        (aten.searchsorted.Tensor, _search_sorted, {"ends": X, "x": X, "out_int32": bool, "right": bool, "side": str | None}),
        (aten.std.correction, _standard_deviation, spread),
        (aten.std_mean.correction, _standard_deviation_and_mean, spread),
        (aten.einsum.default, _einsum, {"equation": str, "tensors": Sequence[R], "path": Optional[int], "return": R}),  # noqa: UP045
        (aten.randperm.default, _permutation, {"n": I, "dtype": int, **placed, "return": I}),
        (
            torch.ops.prims.uniform.default,
            _uniform,
            {"shape": I, "low": float, "high": float, "dtype": int, "device": str, "stride": lists},
        ),
        (
            aten.linalg_vector_norm.default,
            _vector_norm,
            {"x": X, "ord": float, "dim": Sequence[int] | None, "keepdim": bool, "dtype": int},
        ),
        (aten._pdist_forward.default, _pdist, {"x": X, "p": float}),
        (aten._cdist_forward.default, _cdist, {"x": X, "y": X, "p": float, "compute_mode": maybe}),
    ]
    return {operator: typed(function, {"return": X} | kinds) for operator, function, kinds in table}


# Shapes and indices ------------------------------------------------------------------------------------------------------


def _squeeze(x: Any, dims: int | Sequence[int]) -> Any:
    """An axis that is not known to have length one has another: the exporter gives free lengths to those of two and more."""
    op = opset()
    if x.shape is None:
        return op.Squeeze(x, [dims] if isinstance(dims, int) else list(dims))
    wanted = {axis_of(x, d) for d in ([dims] if isinstance(dims, int) else dims)}
    axes = [k for k in sorted(wanted) if k < len(x.shape) and x.shape[k] == 1]
    return op.Squeeze(x, axes) if axes else op.Identity(x)


def _copy(x: Any, source: Any, non_blocking: bool = False) -> Any:
    """``x.copy_(source)`` repeats the source over the axes of x, which the exporter forgets."""
    op = opset()
    known = x.shape is not None and source.shape is not None and list(x.shape) == list(source.shape)
    made = op.CastLike(source, x)
    return made if known else op.Expand(made, op.Shape(x))


def _index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    from onnxscript.function_libs.torch_lib.ops import core

    chosen = [k for k, index in enumerate(indices) if index is not None]
    shaped = all(v.shape is not None for v in (x, values, *(indices[k] for k in chosen)))
    if len(chosen) == 1 and indices[chosen[0]].dtype == BOOL and shaped and all(size == 1 for size in values.shape):
        return _put_where(x, indices[chosen[0]], chosen[0], values, accumulate)
    if chosen == [0] and indices[0].dtype == BOOL and x.shape is not None and indices[0].shape is not None:
        return _put_rows(x, indices[0], values, accumulate)
    return core.aten_index_put(x, [_widened(index) for index in indices], values, accumulate)


def _put_where(x: Any, mask: Any, axis: int, value: Any, accumulate: bool) -> Any:
    """``x[:, mask] = value``: the exporter's form makes a list of the places, whose length nobody knows before."""
    op = opset()
    if trailing := len(x.shape) - axis - len(mask.shape):
        mask = op.Unsqueeze(mask, [len(mask.shape) + k for k in range(trailing)])
    value = op.CastLike(op.Reshape(value, [1]), x)
    return op.Where(mask, op.Add(x, value) if accumulate else value, x)


def _put_rows(x: Any, mask: Any, values: Any, accumulate: bool) -> Any:
    """``x[mask] = values``, a value for each place: of a row's places, the exporter's form lists every element."""
    op, rank = opset(), len(mask.shape)
    places = op.Transpose(op.NonZero(mask), perm=[1, 0])
    row = op.Slice(op.Shape(x), [rank], [len(x.shape)], [0])
    chosen = op.Expand(op.CastLike(values, x), op.Concat(op.Slice(op.Shape(places), [0], [1], [0]), row, axis=0))
    return op.ScatterND(x, places, chosen, reduction="add" if accumulate else "none")


def _widened(index: Any) -> Any:
    if index is None or index.dtype in (None, INT64, BOOL):
        return index
    wide = opset().Cast(index, to=INT64)
    wide.shape = index.shape  # the caller looks at it
    return wide


def _scatter_reduce(x: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True) -> Any:
    from onnxscript.function_libs.torch_lib.ops import core

    op = opset()
    if reduce != "mean" or len(x.shape) == 0:
        return core.aten_scatter_reduce(x, dim, index, src, reduce, include_self)
    one, zeros = like(1.0, x), op.Mul(x, like(0.0, x))
    ones = op.Expand(one, op.Shape(src))
    taken = op.ScatterElements(zeros, index, ones, axis=dim, reduction="add")
    if include_self:
        return op.Div(op.ScatterElements(x, index, src, axis=dim, reduction="add"), op.Add(taken, one))
    touched = op.Greater(taken, like(0.0, x))
    sums = op.ScatterElements(op.Where(touched, zeros, x), index, src, axis=dim, reduction="add")
    return op.Div(sums, op.Where(touched, taken, one))


# Pools -------------------------------------------------------------------------------------------------------------------


def _average_pool(
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    from onnxscript.function_libs.torch_lib.ops import nn

    op, axes = opset(), len(kernel_size) if not isinstance(kernel_size, int) else 0
    pool = nn.aten_avg_pool3d if axes == 3 else nn.aten_avg_pool2d
    if divisor_override is None:
        return pool(x, kernel_size, stride, padding, ceil_mode, count_include_pad)
    if ceil_mode:
        raise NotImplementedError("an average pool with ceil_mode and divisor_override has no translation: leave one out")
    means = pool(x, kernel_size, stride, padding, False, True)
    taps = math.prod(kernel_size) if axes > 1 else kernel_size[0] ** (len(x.shape) - 2)
    return op.Mul(means, like(taps / divisor_override, x))


def _adaptive_max_pool(x: Any, output_size: Sequence[int]) -> Any:
    """The largest element of each window, first along its rows, and its place in the plane."""
    op, rank = opset(), len(x.shape)
    width, axes = fixed_length(x, -1, "adaptive_max_pool2d"), (rank - 2, rank - 1)
    lengths = [fixed_length(x, axis, "adaptive_max_pool2d") for axis in axes]
    values, places = x, []
    for axis, length, wanted in zip(axes, lengths, output_size, strict=True):
        windows = [(k * length // wanted, -(-(k + 1) * length // wanted)) for k in range(wanted)]
        parts = [op.Slice(values, [a], [b], [axis]) for a, b in windows]
        found = [
            op.Add(op.ArgMax(part, axis=axis), op.Constant(value_int=a)) for part, (a, _) in zip(parts, windows, strict=True)
        ]
        values = op.Concat(*(op.ReduceMax(part, [axis], keepdims=1) for part in parts), axis=axis)
        places.append(op.Concat(*found, axis=axis))
    rows = op.GatherElements(places[0], places[1], axis=rank - 1)
    return values, op.Add(op.Mul(rows, op.Constant(value_int=width)), places[1])


# Along an axis -----------------------------------------------------------------------------------------------------------


def _linear_upsampling(x: Any, output_size: Any, align_corners: bool, scale_factors: Sequence[float] | None) -> Any:
    """The exporter writes that of lines as gathers of both neighbours, and has another place for a result of size one."""
    op = opset()
    places = {"mode": "linear", "coordinate_transformation_mode": "align_corners" if align_corners else "half_pixel"}
    if scale_factors is not None:
        return op.Resize(x, None, op.Constant(value_floats=[1.0, 1.0, *scale_factors]), **places)
    sizes = op.Concat(op.Shape(x, start=0, end=2), op.Cast(output_size, to=INT64), axis=0)
    return op.Resize(x, None, None, sizes, **places)


def _shifted(x: Any, by: int, axis: int, fill: Any) -> Any:
    """x moved by ``by`` places along an axis; ``fill``, of one element, comes in."""
    op = opset()
    head = op.Slice(x, [0], [-by], [axis])
    start = op.Slice(x, [0], [by], [axis])
    return op.Concat(op.Expand(fill, op.Shape(start)), head, axis=axis)


def _cumprod(x: Any, dim: int, dtype: int | None = None) -> Any:
    """A product of all elements up to each, which ONNX has in later opsets alone."""
    op = opset()
    x = x if dtype is None or dtype < 0 else op.Cast(x, to=dtype)
    if len(x.shape) == 0:
        return op.Identity(x)
    return own("RunningProduct", "x", "y", "axis")(x, axis=axis_of(x, dim))


def _log_cumsum_exp(x: Any, dim: int) -> Any:
    """The exporter takes the maximum of the line off, which leaves nothing of small numbers in front of it; so do lines of a
    free length here.
    """
    from onnxscript.function_libs.torch_lib.ops import core

    op = opset()
    if len(x.shape) == 0:
        return op.Identity(x)
    axis, by = axis_of(x, dim), 1
    length, y = x.shape[axis], x
    if not isinstance(length, int):
        return core.aten_logcumsumexp(x, dim)
    while by < length:
        y = log_add_exp(y, _shifted(y, by, axis, like(-1e30, x)))
        by *= 2
    return op.Identity(y)


def _running_extreme(comparison: str, worst: float) -> Callable[..., Any]:
    def extreme(x: Any, dim: int) -> Any:
        op = opset()
        axis, by = axis_of(x, dim), 1
        length, rank = fixed_length(x, axis, "cummax and cummin"), len(x.shape)
        lengths = [length if k == axis else 1 for k in range(rank)]
        places = op.Reshape(op.Constant(value_ints=list(range(length))), lengths)
        y, at = x, op.Expand(places, op.Shape(x))
        while by < length:
            before, place = _shifted(y, by, axis, like(worst, x)), _shifted(at, by, axis, op.Constant(value_int=0))
            better = getattr(op, comparison)(before, y)
            y, at = op.Where(better, before, y), op.Where(better, place, at)
            by *= 2
        return op.Identity(y), op.Identity(at)

    return extreme


def _smallest(x: Any, k: Any, axis: int) -> tuple[Any, Any]:
    """The k-th smallest elements and their places, of length one along an axis; k is a tensor of one element."""
    op = opset()
    last = op.Sub(k, op.Constant(value_ints=[1]))
    values, places = op.TopK(x, k, axis=axis, largest=0, sorted=1)
    return op.Gather(values, last, axis=axis), op.Gather(places, last, axis=axis)


def _stable_sort(x: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """Of equal elements TopK takes the first one first."""
    from onnxscript.function_libs.torch_lib.ops import core

    return core.aten_sort(x, dim, descending)


def _kth_value(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    op, axis = opset(), axis_of(x, dim)
    found = _smallest(x, op.Constant(value_ints=[k]), axis)
    return tuple(part if keepdim else op.Squeeze(part, [axis]) for part in found)


def _middle(length: Any) -> Any:
    """Of a number of elements, as a tensor of one: the lower of two, as in PyTorch."""
    op = opset()
    return op.Div(op.Add(length, op.Constant(value_ints=[1])), op.Constant(value_ints=[2]))


def _median(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
    op, axis = opset(), axis_of(x, dim)
    found = _smallest(x, _middle(op.Shape(x, start=axis, end=axis + 1)), axis)
    return tuple(part if keepdim else op.Squeeze(part, [axis]) for part in found)


def _median_of_all(x: Any) -> Any:
    op = opset()
    value, _ = _smallest(op.Reshape(x, [-1]), _middle(op.Reshape(op.Size(x), [1])), 0)
    return op.Squeeze(value, [0])


def _search_sorted(
    ends: Any, x: Any, out_int32: bool = False, right: bool = False, side: str | None = None, sorter: Any = None
) -> Any:
    """How many of the ends lie before each element."""
    op = opset()
    if sorter is not None:
        raise NotImplementedError("searchsorted with a sorter has no translation: sort the ends")
    after = right or side == "right"
    rows = ends if len(ends.shape) == 1 else op.Unsqueeze(ends, [-2])
    before = (op.LessOrEqual if after else op.Less)(rows, op.Unsqueeze(x, [-1]))
    return op.ReduceSum(op.Cast(before, to=6 if out_int32 else INT64), [-1], keepdims=0)


# Deviations -------------------------------------------------------------------------------------------------------------


def _standard_deviation(x: Any, dim: Any = None, correction: float | None = None, keepdim: bool = False) -> Any:
    return _standard_deviation_and_mean(x, dim, correction, keepdim)[0]


def _standard_deviation_and_mean(
    x: Any, dim: Any = None, correction: float | None = None, keepdim: bool = False
) -> tuple[Any, Any]:
    """By the norm of the differences, whose gradient is 0 where all are 0; that of a variance's root is infinite there."""
    op = opset()
    axes = [axis_of(x, d) for d in dim] if dim else list(range(len(x.shape)))
    mean = op.ReduceMean(x, axes, keepdims=1)
    norm = op.ReduceL2(op.Sub(x, mean), axes, keepdims=int(keepdim))
    count = op.CastLike(op.Div(op.Size(x), op.Size(norm)), x)
    spread = op.Div(norm, op.Sqrt(op.Sub(count, like(1.0 if correction is None else correction, x))))
    return spread, mean if keepdim else op.Squeeze(mean, axes)


# Random numbers ----------------------------------------------------------------------------------------------------------


def _uniform(shape: Any, low: float, high: float, dtype: int = 1, device: str = "", stride: Sequence[int] = ()) -> Any:
    del device, stride
    op = opset()
    return op.RandomUniformLike(op.Expand(op.Constant(value_float=0.0), shape), low=low, high=high, dtype=dtype)


def _permutation(n: Any, dtype: int = INT64, layout: str = "", device: str = "", pin_memory: bool = False) -> Any:
    """The order of as many random numbers."""
    del layout, device, pin_memory
    op = opset()
    count = op.Reshape(n, op.Constant(value_ints=[-1]))
    return op.Cast(op.TopK(op.RandomUniformLike(op.Expand(op.Constant(value_float=0.0), count)), count, axis=0)[1], to=dtype)


# Products ----------------------------------------------------------------------------------------------------------------


def _einsum(equation: str, tensors: Any, path: Any = None) -> Any:
    """Operands of several types, such as positions times frequencies, take their common one; ONNX's Einsum has one type."""
    import torch

    op = opset()
    if len({x.dtype for x in tensors}) > 1:
        types = {"FLOAT": torch.float32, "DOUBLE": torch.float64}
        types |= {kind.name: getattr(torch, kind.name.lower()) for kind in ir.DataType if hasattr(torch, kind.name.lower())}
        common = functools.reduce(torch.promote_types, (types[x.dtype.name] for x in tensors))
        name = next(name for name, dtype in types.items() if dtype is common)
        tensors = [op.Cast(x, to=ir.DataType[name].value) for x in tensors]
    return op.Einsum(*tensors, equation=equation)


# Distances ---------------------------------------------------------------------------------------------------------------


def _norm(differences: Any, p: float) -> Any:
    """Of the last axis."""
    op = opset()
    if p == 2:
        return op.ReduceL2(differences, [-1], keepdims=0)
    sizes = op.Abs(differences)
    if p == 0:
        return op.ReduceSum(op.Sign(sizes), [-1], keepdims=0)
    if p == 1:
        return op.ReduceSum(sizes, [-1], keepdims=0)
    if p == math.inf:
        return op.ReduceMax(sizes, [-1], keepdims=0)
    return _root_of_powers(sizes, p, [-1], 0)


def _root_of_powers(sizes: Any, p: float, axes: Any, keepdims: int) -> Any:
    """(Σ sizeᵖ)^(1/p); where all sizes are 0, its slope is 0 too."""
    op, zero, one = opset(), like(0.0, sizes), like(1.0, sizes)
    powers = op.Pow(sizes, like(p, sizes))
    if 0 < p < 1:
        none = op.Equal(sizes, zero)
        powers = op.Where(none, zero, op.Pow(op.Where(none, one, sizes), like(p, sizes)))
    sums = op.ReduceSum(powers, axes, keepdims=keepdims)
    empty = op.Equal(sums, zero)
    return op.Where(empty, zero, op.Pow(op.Where(empty, one, sums), like(1 / p, sizes)))


def _vector_norm(x: Any, ord: float = 2.0, dim: Any = None, keepdim: bool = False, dtype: int = -1) -> Any:
    from onnxscript.function_libs.torch_lib.ops import linalg

    if ord <= 0 or ord in (1, 2) or math.isinf(ord):
        return linalg.aten_linalg_vector_norm(x, ord, dim, keepdim, dtype)
    op = opset()
    x = x if dtype is None or dtype < 0 else op.Cast(x, to=dtype)
    if dim is None:
        return _root_of_powers(op.Reshape(op.Abs(x), [-1]), ord, [0], 0)
    return _root_of_powers(op.Abs(x), ord, op.Reshape(dim, [-1]), int(keepdim))


def _pdist(x: Any, p: float = 2.0) -> Any:
    """Of the pairs i < j of rows."""
    op, rows = opset(), fixed_length(x, 0, "pdist")
    pairs = [(i, j) for i in range(rows) for j in range(i + 1, rows)]
    first, second = (op.Gather(x, op.Constant(value_ints=[pair[k] for pair in pairs]), axis=0) for k in (0, 1))
    return _norm(op.Sub(first, second), p)


def _cdist(x: Any, y: Any, p: float = 2.0, compute_mode: int | None = None) -> Any:
    del compute_mode
    op = opset()
    return _norm(op.Sub(op.Unsqueeze(x, [-2]), op.Unsqueeze(y, [-3])), p)
