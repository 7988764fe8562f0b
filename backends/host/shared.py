"""Shares the code of equal segments: the layers of a model differ in the names of their values only.

A later process finds it on disk, by a digest of the segment, the compiler and this package's sources.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from graphc.backends.fusion.op_kernels import is_ours
from graphc.backends.host import object_files
from graphc.backends.host.compiler import compiler
from graphc.backends.host.language import LanguageError
from graphc.backends.host.segment import compile_segment
from graphc.backends.host.segment_code import SegmentCode
from graphc.cache_folder import sources_digest

KEPT = 64
"""Segments whose parts are kept for their equals."""

LONGEST = 1 << 20
"""Bytes of a segment that is kept, in this process and on disk, constants included."""


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """The parts of a segment, and the names by which they know its values and nodes.

    Attributes:
        segment: parts of the first of all equal segments.
        values: name in this segment → name in the parts.
        nodes: name in the parts → name in this segment.
    """

    segment: SegmentCode
    values: Mapping[str, str]
    nodes: Mapping[str, str]


def shared_segment(model: onnx.ModelProto, least: int, *, varying: bool = False) -> SharedSegment:
    """The parts of a segment, which equal segments of this process share.

    Args:
        model: the segment.
        least: elements that the largest kernel takes at least.
        varying: whether feeds have many shapes; see :meth:`~graphc.backends.host.compiler.Compiler.compile`.

    Raises:
        LanguageError: nothing of it can be compiled, or it is too little.
    """
    plain, values, nodes = _renamed(model)
    text = plain.SerializeToString(deterministic=True)
    code = (_kept if len(text) <= LONGEST else _made)(text, least, varying)
    if code is None:
        raise LanguageError("nothing of it can be compiled, or it is too little")
    return SharedSegment(code, values, nodes)


def _made(text: bytes, least: int, varying: bool) -> SegmentCode | None:
    model = onnx.ModelProto.FromString(text)
    versions = f"{sys.version} {onnx.__version__} {ir.__version__} {np.__version__} {sources_digest().hex()}"
    name = compiler().name_of("s", versions, f"{least}{varying}", hashlib.sha256(text).hexdigest())
    keeps = len(text) <= LONGEST and bool(sources_digest()) and is_ours(model)
    held = object_files.read_cached(f"{name}.json") if keeps else None
    if held == _NOTHING:
        return None
    found = SegmentCode.from_bytes(held) if held is not None else None
    if found is None:
        try:
            found = compile_segment(model, least, varying=varying)
        except LanguageError:
            found = None
        if keeps:
            object_files.write_cached(f"{name}.json", _NOTHING if found is None else found.to_bytes())
    return found


_NOTHING = b"{}"
"""Kept for a segment in which nothing can be compiled."""

_kept = functools.lru_cache(maxsize=KEPT)(_made)


def _renamed(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, str], dict[str, str]]:
    """The model with values and nodes called by their numbers; value → its number, number → node."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    graph, values, nodes = found.graph, {"": ""}, dict[str, str]()

    def number(name: str) -> str:
        return values.setdefault(name, f"v{len(values)}")

    for held in (*graph.input, *graph.initializer):
        held.name = number(held.name)
    for k, node in enumerate(graph.node):
        if any(a.HasField("g") or a.graphs for a in node.attribute):
            raise LanguageError("control flow")
        nodes[f"n{k}"] = node.name
        node.name = f"n{k}"
        del node.metadata_props[:]
        node.doc_string = ""
        node.input[:] = [number(name) for name in node.input]
        node.output[:] = [number(name) for name in node.output]
    for held in graph.output:
        held.name = number(held.name)
    return found, values, nodes
