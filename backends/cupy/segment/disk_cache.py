"""Caches compiled segments on disk: their calls, kernel texts and aliases.

    key = digest of: this package's sources, versions of its dependencies, the options of the compilation, the segment

So a segment that is found is never out of date. A file begins with a digest of the rest: a damaged file is ignored, and a file
that cannot be written is skipped. Segments with bodies, and those that involve a plugin, are compiled every time.

A cached segment has what :class:`.bind.BoundSegment` and ``predict/cost_model`` need: of the graph, only the library nodes.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphc.backends.cupy.libraries.gemm import PRODUCT
from graphc.backends.cupy.libraries.registry import LibraryOp
from graphc.backends.cupy.segment.program import KernelCall, NodeCall, Segment
from graphc.backends.fusion.op_kernels import OP_KERNELS, is_ours
from graphc.cache_folder import sources_digest
from graphc.ir.facts import constant, shape_of

PLAIN = frozenset(
    {ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.STRING}
    | {ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRINGS}
)

DIGEST = hashlib.sha256().digest_size


class SegmentCache:
    """The segments of one folder.

    Args:
        folder: created on first use.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, model: onnx.ModelProto, options: str, compile: Callable[[], Segment]) -> Segment:
        """The segment of ``model``, from disk or from ``compile``.

        Args:
            options: every other setting that affects what ``compile`` returns.
        """
        sources = _sources() if is_ours(model) else b""
        if not sources:
            return compile()
        text = model.SerializeToString(deterministic=True)
        path = self.folder / f"{hashlib.sha256(b'|'.join((sources, options.encode(), text))).hexdigest()}.segment"
        found = _read(path)
        if found is None:
            found = compile()
            _write(path, found)
        return found


@functools.cache
def _sources() -> bytes:
    """Digest of this package's sources and of its dependencies' versions; empty if there are no sources."""
    found = sources_digest()
    versions = f"{sys.version} {onnx.__version__} {ir.__version__} {np.__version__}"
    return hashlib.sha256(found + versions.encode()).digest() if found else b""


def _read(path: Path) -> Segment | None:
    try:
        held = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(held[DIGEST:]).digest() != held[:DIGEST]:
        return None
    return _Reader(held[DIGEST:]).segment()


def _write(path: Path, segment: Segment) -> None:
    try:
        held = _Writer(segment).bytes()
    except _NotKeptError:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}.tmp")
        partial.write_bytes(hashlib.sha256(held).digest() + held)
        partial.replace(path)
    except OSError:
        return  # the kernel cache uses the same folder and warns


class _NotKeptError(Exception):
    """The segment holds something that cannot be stored."""


class _Writer(pickle.Pickler):
    """Serializes a segment: values and nodes go into tables, and everything else refers to them by index."""

    def __init__(self, segment: Segment) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, protocol=5)
        self._values: dict[ir.Value, int] = {}
        self._segment = segment

    def bytes(self) -> bytes:
        segment = self._segment
        if not all(isinstance(call, KernelCall | NodeCall) for call in segment.calls):
            raise _NotKeptError
        calls: list[tuple[Any, ...]] = []
        for call in segment.calls:
            if isinstance(call, KernelCall):
                calls.append((call,))
            elif isinstance(call, NodeCall):
                calls.append((_described(call.node), call.library))
        ends = list(segment.graph.inputs), list(segment.graph.outputs)
        self.dump((ends, calls, list(segment.aliases.items())))
        body = self._buffer.getvalue()
        head = pickle.dumps([_described_value(v) for v in self._values], protocol=5)
        return len(head).to_bytes(8, "little") + head + body

    def persistent_id(self, item: Any) -> Any:
        if isinstance(item, ir.Value):
            return self._values.setdefault(item, len(self._values))
        if isinstance(item, LibraryOp):
            return item.op, OP_KERNELS[item.op].libraries.index(item)
        if isinstance(item, ir.Node | ir.Graph):
            raise _NotKeptError
        return None


def _described(node: ir.Node) -> tuple[Any, ...]:
    attributes = []
    for attr in node.attributes.values():
        if attr.type == ir.AttributeType.TENSOR:
            attributes.append((attr.name, int(attr.type), np.array(attr.as_tensor().numpy())))
        elif attr.type in PLAIN:
            attributes.append((attr.name, int(attr.type), attr.value))
        else:
            raise _NotKeptError
    return (
        (node.domain, node.op_type, node.name),
        attributes,
        list(node.inputs),
        list(node.outputs),
        node.meta.get(PRODUCT),
    )


def _described_value(value: ir.Value) -> tuple[Any, ...]:
    known = constant(value)
    if known is None and value.const_value is not None:
        known = value.const_value.numpy()
    if value.dtype is None:
        return value.name, None, None, None
    return value.name, int(value.dtype), shape_of(value), None if known is None else np.array(known)


class _Reader(pickle.Unpickler):
    """Reads a segment that :class:`_Writer` wrote."""

    def __init__(self, held: bytes) -> None:
        size = int.from_bytes(held[:8], "little")
        self._values = [_value(*described) for described in pickle.loads(held[8 : 8 + size])]
        super().__init__(io.BytesIO(held[8 + size :]))

    def segment(self) -> Segment:
        (inputs, outputs), calls, aliases = self.load()
        found = [call[0] if len(call) == 1 else NodeCall(_node(*call[0]), call[1]) for call in calls]
        graph = ir.Graph(inputs, outputs, nodes=[call.node for call in found if isinstance(call, NodeCall)], name="segment")
        return Segment(graph, found, dict(aliases))

    def persistent_load(self, key: Any) -> Any:
        if isinstance(key, int):
            return self._values[key]
        op, index = key
        return OP_KERNELS[op].libraries[index]


def _value(name: str | None, dtype: int | None, shape: tuple[int, ...] | None, known: Any) -> ir.Value:
    if dtype is None or shape is None:
        return ir.Value(name=name)
    held = None if known is None else ir.Tensor(known, dtype=ir.DataType(dtype), name=name)
    return ir.Value(name=name, type=ir.TensorType(ir.DataType(dtype)), shape=ir.Shape(shape), const_value=held)


def _node(
    names: tuple[str, str, str | None],
    attributes: list[tuple[str, int, Any]],
    inputs: list[ir.Value | None],
    outputs: list[ir.Value],
    product: Any,
) -> ir.Node:
    domain, op_type, name = names
    made = []
    for key, kind, value in attributes:
        tensor = kind == ir.AttributeType.TENSOR
        made.append(ir.Attr(key, ir.AttributeType(kind), ir.Tensor(value) if tensor else value))
    node = ir.Node(domain, op_type, inputs, made, outputs=outputs, name=name)
    if product is not None:
        node.meta[PRODUCT] = product
    return node
