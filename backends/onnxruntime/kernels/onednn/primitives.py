"""Convolutions and matrix products of oneDNN, built before the first step.

A :class:`Primitive` is built once, over fixed addresses, and costs a few microseconds of Python a run.
"""

from __future__ import annotations

import ctypes
import functools
import re
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from graphc.backend import Pool
from graphc.backends.host.calls import NativeCall, loaded
from graphc.backends.host.compiler import compiler
from graphc.backends.host.processor import copies_to_bfloat16
from graphc.backends.onnxruntime.kernels.common.scratch import scratchpad_of
from graphc.backends.onnxruntime.kernels.onednn.binding import Handle, OneDNN, OneDnnError
from graphc.backends.onnxruntime.vectors.functions import LANES
from graphc.device import Run

# values of the C enumerations in dnnl_types.h
_BFLOAT16_TYPE, _FLOAT32, _ANY_LAYOUT = 2, 3, 1
_FORWARD_TRAINING, _DIRECT = 64, 1
_SRC_LAYOUT, _WEIGHTS_LAYOUT, _DST_LAYOUT = 129, 131, 133
_DIFF_SRC_LAYOUT, _DIFF_WEIGHTS_LAYOUT, _DIFF_DST_LAYOUT = 130, 132, 134
_SRC, _DST, _WEIGHTS, _BIAS = 1, 17, 33, 41
_DIFF_SRC, _DIFF_DST, _DIFF_WEIGHTS = 129, 145, 161
_SCRATCHPAD, _SCRATCHPAD_LAYOUT = 80, 136
_SUM, _PRODUCT = 0x1FFF0, 0x1FFF1
_POST_OP, _OPERAND = 32768, 2

_DESTROYERS = (
    (r"dnnl_memory_desc_create\w*", "dnnl_memory_desc_destroy"),
    (r"dnnl_\w+_primitive_desc_create", "dnnl_primitive_desc_destroy"),
    (r"dnnl_primitive_create", "dnnl_primitive_destroy"),
    (r"dnnl_memory_create", "dnnl_memory_destroy"),
    (r"dnnl_primitive_attr_create", "dnnl_primitive_attr_destroy"),
    (r"dnnl_post_ops_create", "dnnl_post_ops_destroy"),
)

_Dims = ctypes.c_int64 * 12


class _Argument(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("memory", ctypes.c_void_p))


_PRIMITIVES = f"""
define void @{{name}}(ptr %call) {{{{
  {loaded("call", "", "ptr get", "ptr set", "ptr execute", "i32 threads", "i64 count")}
  %primitives = getelementptr i64, ptr %call, i64 6
  %before = call i32 %get()
  call void %set(i32 %threads)
  br label %work
work:
  %i = phi i64 [ 0, %0 ], [ %next, %work ]
  %at = mul i64 %i, 4
  %one = getelementptr i64, ptr %primitives, i64 %at
  {loaded("one", "ptr primitive", "ptr stream", "i32 number", "ptr arguments")}
  %status = call i32 %execute(ptr %primitive, ptr %stream, i32 %number, ptr %arguments)
  %wide = sext i32 %status to i64
  %known = load i64, ptr %call
  %all = or i64 %known, %wide
  store i64 %all, ptr %call
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %count
  br i1 %more, label %work, label %end
end:
  call void %set(i32 %before)
  ret void
}}}}
"""
"""Runs primitives: status, three functions (threads in use, use threads, execute), threads, count, and four words for each."""


@functools.cache
def _primitives_runner() -> int:
    return compiler().address_of("primitives", lambda name: _PRIMITIVES.format(name=name))


ROWS_PAY = LANES == 16
"""Whether products scale and shift each row in less time than a sweep behind them: for AVX2 they take up to twice as long."""


class Primitive:
    """An operation over fixed float32 arrays, with copies to and from the layouts that oneDNN chose.

    Args:
        pool: whose threads run it, whose scratchpad it works in, and which says whether products may be of bfloat16.
    """

    def __init__(self, lib: OneDNN, arrays: Sequence[np.ndarray[Any, Any] | None], pool: Pool) -> None:
        self._lib, self._pool, self._threads, self._scratch = lib, pool, pool.threads, scratchpad_of(pool)
        self._attributes = lib.attributes[pool.bf16_products]
        self._alive: list[Any] = list(arrays)
        self._objects: list[tuple[str, Handle]] = []
        weakref.finalize(self, lib.destroy, self._objects)
        self._moves: list[tuple[Handle, int]] = []
        self._calls: list[tuple[Handle, Handle, int, int]] = []
        self._used = 0
        self._generation = -1

    def _create(self, function: str, *arguments: Any) -> Handle:
        """Create an object that is destroyed with this primitive."""
        handle = self._lib.create(function, *arguments)
        destroyer = next(d for pattern, d in _DESTROYERS if re.fullmatch(pattern, function))
        self._objects.append((destroyer, handle))
        return handle

    def _plain(self, shape: Sequence[int]) -> Handle:
        """Layout of a C-contiguous float32 array."""
        return self._strided(shape, [int(np.prod(shape[k + 1 :], dtype=np.int64)) for k in range(len(shape))])

    def _strided(self, shape: Sequence[int], strides: Sequence[int]) -> Handle:
        """Layout of a float32 array with the given strides, in elements."""
        return self._create("dnnl_memory_desc_create_with_strides", len(shape), _Dims(*shape), _FLOAT32, _Dims(*strides))

    def _free_choice(self, shape: Sequence[int], kind: int = _FLOAT32) -> Handle:
        """A layout that the primitive may choose, of elements of this type."""
        return self._create("dnnl_memory_desc_create_with_tag", len(shape), _Dims(*shape), kind, _ANY_LAYOUT)

    def _memory(self, layout: Handle, address: int | None) -> Handle:
        return self._create("dnnl_memory_create", layout, self._lib.engine, ctypes.c_void_p(address))

    def _scaled(
        self, scale: np.ndarray[Any, Any] | None, shift: np.ndarray[Any, Any] | None, vector: Sequence[int]
    ) -> tuple[Handle, list[tuple[int, Handle]]]:
        """Attributes of a primitive that multiplies its results by ``scale`` and adds ``shift``, and these as its operands.

        An activation would be no gain: a sweep over results that lie in the cache takes as long, and the library's ReLU makes 0
        of NaN, which hides that a run diverges.

        Args:
            vector: shape of both, of as many axes as the result.
        """
        lib = self._lib
        attributes, steps = self._create("dnnl_primitive_attr_create"), self._create("dnnl_post_ops_create")
        lib.set_modes(attributes, low=self._pool.bf16_products)
        operands: list[tuple[int, Handle]] = []
        for kind, array in ((_PRODUCT, scale), (_SUM, shift)):
            if array is not None:
                layout = self._plain(vector)
                lib.call("dnnl_post_ops_append_binary", steps, kind, layout)
                operands.append((_POST_OP * (len(operands) + 1) | _OPERAND, self._memory(layout, array.ctypes.data)))
                self._alive.append(array)
        lib.call("dnnl_primitive_attr_set_post_ops", attributes, steps)
        return attributes, operands

    def _scratch_memory(self, layout: Handle) -> Handle:
        memory = self._memory(layout, None)
        self._moves.append((memory, self._used))
        self._used += -(-int(self._lib.size(layout)) // 64) * 64
        return memory

    def _copy(self, source: Handle, source_memory: Handle, target: Handle, target_memory: Handle) -> None:
        lib = self._lib
        description = self._create(
            "dnnl_reorder_primitive_desc_create", source, lib.engine, target, lib.engine, self._attributes
        )
        self._call(description, [(_SRC, source_memory), (_DST, target_memory)])

    def _call(self, description: Handle, arguments: Sequence[tuple[int, Handle]]) -> None:
        """Make the primitive of ``description`` the next to run, with scratch of its own."""
        primitive = self._create("dnnl_primitive_create", description)
        needed = ctypes.c_void_p(self._lib.query(description, _SCRATCHPAD_LAYOUT, 0))
        if needed and self._lib.size(needed):
            arguments = [*arguments, (_SCRATCHPAD, self._scratch_memory(needed))]
        packed = (_Argument * len(arguments))(*(_Argument(role, memory.value) for role, memory in arguments))
        self._alive.append(packed)
        self._calls.append((primitive, self._lib.stream, len(arguments), ctypes.addressof(packed)))

    def runner(self) -> Run:
        """What runs the primitive and its layout copies, in the threads of the pool."""
        lib = self._lib
        # the number of threads is a setting of each thread, shared with other users of OpenMP in the process
        functions = [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (lib.threads_in_use, lib.use_threads, lib.execute)]
        words = [
            word
            for primitive, stream, count, arguments in self._calls
            for word in (primitive.value, stream.value, count, arguments)
        ]
        call = np.array([0, *functions, self._threads, len(self._calls), *words], dtype=np.int64)

        def check() -> None:
            status, call[0] = int(call[0]), 0
            raise OneDnnError(f"{type(self).__name__} failed with status {status}")

        return NativeCall(_primitives_runner(), call.ctypes.data, call[:1], check, self, call, prepare=self._place)

    def _place(self) -> None:
        """Tell the primitives where the scratchpad is, if it moved."""
        if self._generation == self._scratch.generation:
            return
        base = self._scratch.address
        for memory, offset in self._moves:
            self._lib.move(memory, base + offset)
        self._generation = self._scratch.generation


class ConvolutionPrimitive(Primitive):
    """One of the three primitives of a convolution over fixed float32 arrays.

    Args:
        kind: ``"forward"`` (y from x, w), ``"input"`` (x from w, y) or ``"weight"`` (w from x, y).
        x: N × C × in; ``w``: M × C/group × kernel; ``y``: N × M × out; C-contiguous; the third named is written.
        bias, scale: of the forward kind, scale · y + bias for each channel.
        blocked: let oneDNN choose layouts and copy to and from them; else it works on the arrays as they are.
        rounded: as ``blocked``, and the copies round what is read to bfloat16.

    Raises:
        OneDnnError: oneDNN has no implementation for these shapes.
    """

    def __init__(
        self,
        lib: OneDNN,
        kind: str,
        x: np.ndarray[Any, Any],
        w: np.ndarray[Any, Any],
        y: np.ndarray[Any, Any],
        bias: np.ndarray[Any, Any] | None = None,
        *,
        scale: np.ndarray[Any, Any] | None = None,
        group: int,
        strides: Sequence[int],
        dilations: Sequence[int],
        pads: Sequence[int],
        blocked: bool,
        rounded: bool = False,
        pool: Pool,
    ) -> None:
        super().__init__(lib, [x, w, y, bias], pool)
        taps = (group, w.shape[0] // group, *w.shape[1:]) if group > 1 else w.shape
        n = len(pads) // 2
        geometry = [_Dims(*strides), _Dims(*(d - 1 for d in dilations)), _Dims(*pads[:n]), _Dims(*pads[n:])]
        before = lib.threads_in_use()
        lib.use_threads(pool.threads)
        shapes, written = (x.shape, taps, y.shape), {"forward": 2, "input": 0, "weight": 1}[kind]
        if rounded:
            kinds = [_FLOAT32 if k == written else _BFLOAT16_TYPE for k in range(3)]
            src, weights, dst = map(self._free_choice, shapes, kinds)
        else:
            src, weights, dst = map(self._free_choice if blocked else self._plain, shapes)
        attributes, vectors = self._attributes, list[tuple[int, Handle]]()
        if scale is not None:
            attributes, vectors = self._scaled(scale, bias, (1, w.shape[0], *(1 for _ in range(n))))
            bias = None
        bias_layout = self._plain(bias.shape) if bias is not None else None
        given = (src, weights, bias_layout, dst)
        if rounded and kind != "forward":  # the forward primitive that a gradient asks for has results of its own
            low = [self._free_choice(shape, _BFLOAT16_TYPE) for shape in shapes]
            given = (low[0], low[1], bias_layout, low[2])
        forward = self._create(
            "dnnl_convolution_forward_primitive_desc_create",
            *(lib.engine, _FORWARD_TRAINING, _DIRECT, *given, *geometry, attributes),
        )
        if kind == "forward":
            chosen, roles = forward, ((_SRC, _SRC_LAYOUT), (_WEIGHTS, _WEIGHTS_LAYOUT), (_DST, _DST_LAYOUT))
        elif kind == "input":
            chosen = self._create(
                "dnnl_convolution_backward_data_primitive_desc_create",
                *(lib.engine, _DIRECT, src, weights, dst, *geometry, forward, self._attributes),
            )
            roles = (_DIFF_SRC, _DIFF_SRC_LAYOUT), (_WEIGHTS, _WEIGHTS_LAYOUT), (_DIFF_DST, _DIFF_DST_LAYOUT)
        else:
            chosen = self._create(
                "dnnl_convolution_backward_weights_primitive_desc_create",
                *(lib.engine, _DIRECT, src, weights, None, dst, *geometry, forward, self._attributes),
            )
            roles = (_SRC, _SRC_LAYOUT), (_DIFF_WEIGHTS, _DIFF_WEIGHTS_LAYOUT), (_DIFF_DST, _DIFF_DST_LAYOUT)
        arguments: list[tuple[int, Handle]] = []
        after: list[tuple[Handle, Handle, Handle, Handle]] = []
        for index, (array, shape, (role, query)) in enumerate(zip((x, w, y), shapes, roles, strict=True)):
            own, wanted = self._plain(shape), ctypes.c_void_p(lib.query(chosen, query, 0))
            memory = self._memory(own, array.ctypes.data)
            if not lib.equal(own, wanted):
                copy = self._scratch_memory(wanted)
                if index == written:
                    after.append((wanted, copy, own, memory))
                else:
                    self._copy(own, memory, wanted, copy)
                memory = copy
            arguments.append((role, memory))
        if bias is not None and bias_layout is not None:
            arguments.append((_BIAS, self._memory(bias_layout, bias.ctypes.data)))
        self._call(chosen, [*arguments, *vectors])
        for source, source_memory, target, target_memory in after:
            self._copy(source, source_memory, target, target_memory)
        self._scratch.reserve(self._used)
        lib.use_threads(before)


WORTH_ROUNDING = 100
"""Operands are copied to bfloat16 if the result has rows · columns ≥ ``WORTH_ROUNDING`` · (rows + columns).

The product of M × K by K × N saves time in proportion to M·N·K, and its copies take time in proportion to (M + N)·K: on two
Zen 5 cores, copying an element takes as long as a hundred multiplications save.
"""


class MatmulPrimitive(Primitive):
    """c = a·b + bias over fixed float32 matrices, or over as many of each.

    Where products may be of bfloat16, oneDNN rounds operands as it reads them on processors with AMX. On those with AVX512-BF16
    alone it does not: large operands are copied, and with these copies 1024 × 256 by 256 × 1024 takes 0.58 ms in place of 1.07.

    Args:
        a: M × K, ``b``: K × N, either of them possibly a transposed view; ``c``: M × N with contiguous rows; all of them
            possibly behind axes that count products, as many on each.
        bias: N elements, or None; for single matrices.
        scale, shift: M elements, or None: of each row of the products.

    Raises:
        OneDnnError: oneDNN has no implementation for these shapes.
    """

    def __init__(
        self,
        lib: OneDNN,
        a: np.ndarray[Any, Any],
        b: np.ndarray[Any, Any],
        c: np.ndarray[Any, Any],
        bias: np.ndarray[Any, Any] | None,
        *,
        scale: np.ndarray[Any, Any] | None = None,
        shift: np.ndarray[Any, Any] | None = None,
        pool: Pool,
    ) -> None:
        super().__init__(lib, [a, b, c, bias], pool)
        before = lib.threads_in_use()
        lib.use_threads(pool.threads)
        operands = [(_SRC, a), (_WEIGHTS, b), (_DST, c)]
        layouts = [self._strided(m.shape, [step // m.itemsize for step in m.strides]) for _, m in operands]
        row = self._plain((1, c.shape[1])) if bias is not None else None
        attributes, vectors = self._attributes, list[tuple[int, Handle]]()
        if scale is not None or shift is not None:
            attributes, vectors = self._scaled(scale, shift, (*(1 for _ in c.shape[:-2]), c.shape[-2], 1))
        rows, columns = c.shape[-2:]
        copied = pool.bf16_products and copies_to_bfloat16() and rows * columns >= WORTH_ROUNDING * (rows + columns)
        taken = [self._free_choice(m.shape, _BFLOAT16_TYPE) for m in (a, b)] if copied else layouts[:2]
        description = self._create(
            "dnnl_matmul_primitive_desc_create", lib.engine, taken[0], taken[1], row, layouts[2], attributes
        )
        arguments: list[tuple[int, Handle]] = []
        for (role, m), held, query in zip(operands, layouts, (_SRC_LAYOUT, _WEIGHTS_LAYOUT, None), strict=True):
            memory = self._memory(held, m.ctypes.data)
            if copied and query is not None:
                wanted = ctypes.c_void_p(lib.query(description, query, 0))
                copy = self._scratch_memory(wanted)
                self._copy(held, memory, wanted, copy)
                memory = copy
            arguments.append((role, memory))
        if bias is not None and row is not None:
            arguments.append((_BIAS, self._memory(row, bias.ctypes.data)))
        self._call(description, [*arguments, *vectors])
        self._scratch.reserve(self._used)
        lib.use_threads(before)
