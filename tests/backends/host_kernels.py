"""Running a compiled segment on the host: generated kernels through the system's C++ compiler, other nodes through numpy.

One thread plays every role of the device, so this tests what kernels compute, not how fast or in which order of sums.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphc.backend import BACKENDS
from graphc.backends.cupy.expressions import compute_type
from graphc.backends.cupy.segment import KernelCall, NodeCall, Segment, compile_segment
from graphc.backends.cupy.views import shape_of
from graphc.ir.facts import constant
from graphc.runtime.executor import segment_model
from graphc.steps import Step

HEAD = """#include <math.h>
#include <string.h>
#include <utility>
template <class... A, std::size_t... I>
static void call(void (*f)(A...), void** a, std::index_sequence<I...>) { f((A)a[I]...); }
"""


def run_segment(
    model: onnx.ModelProto, feeds: Mapping[str, Any], folder: Path, *, splits: int = 1
) -> tuple[dict[str, Any], Segment]:
    """Outputs by name, and the calls that made them; rows with over 3 columns are shared by ``splits`` blocks."""
    segment = compile_segment(model, device=False, splits=lambda rows, columns, _: splits if columns > 3 else 1)
    kernels = [call for call in segment.calls if isinstance(call, KernelCall)]
    functions = compile_kernels({call.name: call.text for call in kernels}, folder)
    memory = _Memory(segment, feeds)
    partials: list[Any] = []
    for call in segment.calls:
        if isinstance(call, NodeCall):
            memory.run_node(call.node)
            continue
        if call.parts > 1 and call.shape.splits > 1:
            partials = [_garbage(_dtype_of(d), (call.parts * call.source.rows,)) for d in call.source.partials]
        for value in call.source.operands[call.source.reads :]:
            memory.values[value] = _garbage(value.dtype.numpy(), shape_of(value))
        arrays = [memory[value] for value in call.source.operands] + (partials if call.source.partials else [])
        pointers = (ctypes.c_void_p * len(arrays))(*[a.ctypes.data for a in arrays])
        functions[call.name](pointers, ctypes.c_longlong(call.shape.blocks))
    return {v.name: memory[v] for v in segment.graph.outputs}, segment


def compile_kernels(texts: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Each kernel as a function (array of pointers, number of blocks)."""
    if not texts:
        return {}
    parts = [HEAD]
    for name, text in texts.items():
        body = text.replace("#include <math.h>", "").replace("#include <string.h>", "")
        head = text[text.rindex("KERNEL ") :]
        count = head[: head.index("{")].count(",") + 1
        loop = "for (BLOCK = 0; BLOCK < blocks; ++BLOCK)"
        start = f'extern "C" void run_{name}(void** a, long long blocks)'
        parts.append(
            f"namespace in_{name} {{\n{body}\n{start} {{ {loop} call({name}, a, std::make_index_sequence<{count}>()); }}\n}}"
        )
        parts += [f"#undef {line.split()[1].partition('(')[0]}" for line in text.splitlines() if line.startswith("#define")]
    source, library = folder / "kernels.cc", folder / f"kernels-{abs(hash(tuple(texts)))}.so"
    source.write_text("\n".join(parts))
    command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", "-o", str(library), str(source)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[:3000]
    loaded = ctypes.CDLL(str(library))
    return {name: getattr(loaded, f"run_{name}") for name in texts}


class _Memory:
    def __init__(self, segment: Segment, feeds: Mapping[str, Any]) -> None:
        self.segment = segment
        self.values: dict[ir.Value, Any] = {}
        for value in segment.graph.inputs:
            self.values[value] = np.ascontiguousarray(feeds[value.name or ""]).reshape(shape_of(value))

    def __getitem__(self, value: ir.Value) -> Any:
        if value not in self.values:
            if value in self.segment.aliases:
                self.values[value] = self[self.segment.aliases[value]].reshape(shape_of(value))
            else:
                known = constant(value)
                if known is None and value.const_value is not None:
                    known = value.const_value.numpy()
                assert known is not None, f"{value.name} is read before it is made"
                self.values[value] = np.ascontiguousarray(known).reshape(known.shape)
        return self.values[value]

    def run_node(self, node: ir.Node) -> None:
        read = [v for v in dict.fromkeys(node.inputs) if v is not None and constant(v) is None]
        step = Step("segment", node.op_type, [node], read, [o for o in node.outputs if o.name])
        results = BACKENDS["numpy"](threads=1).run_whole(segment_model(step), {v.name: self[v] for v in read})
        for out in step.outputs:
            self.values[out] = np.ascontiguousarray(results[out.name or ""]).reshape(np.shape(results[out.name or ""]))


def _dtype_of(dtype: ir.DataType) -> np.dtype[Any]:
    return np.dtype(np.float32) if compute_type(dtype) == "float" else np.dtype(dtype.numpy())


def _garbage(dtype: Any, shape: tuple[int, ...]) -> Any:
    """Memory in which what is never written shows."""
    dtype = np.dtype(dtype)
    return np.full(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, 0xCD, dtype=np.uint8).view(dtype).reshape(shape)
