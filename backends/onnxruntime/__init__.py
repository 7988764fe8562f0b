"""The CPU backend: onnxruntime runs the segments, native kernels what it lacks or does slowly.

Inputs and outputs are bound by pointer into planned buffers, so a run copies nothing and allocates none of our memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphc.backend import BACKENDS, Backend, Binding, SegmentPart, Whole, native_kernel
from graphc.device import Array, Arrays, Memory, Run, in_order
from graphc.errors import ExecutionError, MissingExtraError, UnsupportedOpError, UsageError
from graphc.gradient import key_of
from graphc.ir.declare import declaration_of
from graphc.ir.facts import dims, input_of, static_dims
from graphc.ir.infer import propagate
from graphc.ir.subgraphs import bodies
from graphc.plan import node_costs

try:
    import onnxruntime as ort

    from graphc.backends.host import segment as host
    from graphc.backends.host.calls import in_a_row, native_calls, with_check
    from graphc.backends.host.language import LanguageError
    from graphc.backends.host.processor import check_runs_here, multiplies_bfloat16
    from graphc.backends.host.shared import SharedSegment, shared_segment
    from graphc.backends.onnxruntime import kernels, recurrent  # noqa: F401 - registers its kernels
    from graphc.backends.onnxruntime.guards import guarded
    from graphc.backends.onnxruntime.kernels.common.scratch import scratchpad_of
    from graphc.backends.onnxruntime.kernels.common.written_rows import RowLedger
    from graphc.backends.onnxruntime.kernels.onednn.binding import library
    from graphc.backends.onnxruntime.kernels.products.linear import NARROWEST
    from graphc.backends.onnxruntime.kernels.rows.batch_normalization import FEW
    from graphc.backends.onnxruntime.memory import TeamMemory
    from graphc.backends.onnxruntime.packing import is_packed, pack, packed_like, unpack
    from graphc.backends.onnxruntime.pool import ThreadPool
    from graphc.backends.onnxruntime.vectors.pooling import LONGEST_STEP, MOST_TAPS, WINDOW_TAPS
except ImportError as error:  # pragma: no cover - depends on the installation
    raise MissingExtraError(f"the onnxruntime backend needs 'pip install graphc[cpu]' ({error})") from error


_log = logging.getLogger(__name__)

FUSED = frozenset(
    [
        "Gelu",
        "graphc::GeluGrad",
        "graphc::ReluGrad",
        "Softmax",
        "graphc::SoftmaxGrad",
        "LayerNormalization",
        "graphc::LayerNormalizationGrad",
    ]
)
"""Ops with a native kernel that a fused segment computes together with their neighbours."""

SEPARATE = 1 << 15
"""Neighbouring nodes that share no value of this many bytes become segments of their own, so that memory is free again sooner.

A fused segment costs no more than a kernel inside one.
"""

ALONE = 1 << 23
"""Cost of a node, in bytes (:mod:`graphc.plan.node_costs`), below which its session stays in the calling thread.

Such a node takes less than a millisecond. Every session has threads of its own, which sleep between its runs; to wake one
took up to 4 ms, a turn of the system's scheduler, on two cores.
"""

UNEVEN = ["MatMulScaleFusion"]
"""Graph optimisations whose results depend on where a segment ends; recomputed values must have the same bits."""


class OnnxRuntimeBackend(Backend):
    """onnxruntime's CPU provider plus native kernels.

    Args:
        threads: threads of this worker, for segments and kernels alike.
        spin: whether onnxruntime's threads busy-wait inside a run; False when workers share cores.
        fuse: compile arithmetic, norms and reductions between products to kernels (:mod:`graphc.backends.host`).
        fuse_small: compile them where they are too little to pay for the compilation too.
        bf16_products: let oneDNN round the operands of large products and convolutions to bfloat16 on processors that multiply
            it faster (AMX, AVX512-BF16, Arm's BF16); sums, and everything else, stay float32. On others nothing changes.
        pin: keep every thread of the team on a core of its own (:meth:`use_cores`).

    Raises:
        UsageError: ``bf16_products`` without oneDNN.
    """

    name = "onnxruntime"
    unknown_sizes = True
    # an Einsum that is no product before its sizes are known may be one afterwards
    rewrites = ",".join(
        (
            "rows,einsum,recurrent_layers",
            f"kept_taps{{taps={WINDOW_TAPS},row={MOST_TAPS},step={LONGEST_STEP}}}",
            f"permuted_products{{narrowest={NARROWEST}}}",
            "epilogues",
            f"norm_epilogues{{fewest={FEW}}}",
        )
    )

    def __init__(
        self,
        *,
        threads: int,
        spin: bool = True,
        fuse: bool = True,
        fuse_small: bool = False,
        bf16_products: bool = False,
        pin: bool = False,
    ) -> None:
        check_runs_here()
        if bf16_products and library() is None:
            raise UsageError("bf16_products needs oneDNN, which comes with 'pip install graphc[cpu]' on Linux")
        self.pool = ThreadPool(threads, bf16_products=bf16_products and multiplies_bfloat16())
        if multiplies_bfloat16() and library() is not None:
            self.faster_bfloat16 = "onnxruntime:bf16_products=true"
        self.memory: Memory = TeamMemory(self.pool)
        self._options = session_options(threads, spin)
        self._alone = session_options(1, spin=False)
        self._fuse, self._pins = fuse, pin
        self.separate = SEPARATE if fuse else None
        self._scratch = scratchpad_of(self.pool)
        self._prepared: dict[int, tuple[onnx.ModelProto, SharedSegment | None]] = {}
        self._least = 1 if fuse_small else host.LEAST
        self._ledger = RowLedger(threads)
        self._sessions: weakref.WeakValueDictionary[bytes, ort.InferenceSession] = weakref.WeakValueDictionary()

    def use_cores(self, cores: Sequence[int]) -> None:
        if self._pins:
            self.pool.pin(cores)

    def prefers_native(self, node: ir.Node) -> bool:
        if self._fuse and key_of(node.domain, node.op_type) in FUSED and host.pays(node, self._least):
            return False
        return native_kernel(self.name, node) is not None

    def holds(self, node: ir.Node) -> bool:
        return self._fuse and host.holds(node) and host.pays(node, self._least)

    def repeats(self, node: ir.Node) -> bool:
        return self._fuse and host.repeats(node)

    def prepare_segments(self, models: Sequence[onnx.ModelProto], *, varying: bool = False) -> None:
        # the compiler works on the kernels of one segment while the next is cut into kernels
        for model in models:
            with contextlib.suppress(Exception):  # bind_segment meets it again, and its caller names the nodes
                self._prepared[id(model)] = model, self._parts(model, varying=varying)

    def _parts(self, model: onnx.ModelProto, *, varying: bool = False) -> SharedSegment | None:
        """The parts of a segment; None: nothing in it is computed by a kernel."""
        if self._fuse:
            with contextlib.suppress(LanguageError):
                return shared_segment(model, self._least, varying=varying)
        return None

    def bind_segment(
        self, model: onnx.ModelProto, inputs: Arrays, outputs: Arrays, *, reusable_buffers: Sequence[Array] = ()
    ) -> Run:
        prepared = self._prepared.pop(id(model), None)
        found = self._parts(model) if prepared is None else prepared[1]
        if found is not None:
            given, wanted = (
                {found.values[name]: array for name, array in arrays.items() if name in found.values}
                for arrays in (inputs, outputs)
            )
            with contextlib.suppress(LanguageError):
                return found.segment.bind(given, wanted, self.pool, self.bind_session, self._scratch.take, found.nodes)
        return self.bind_session(host.in_standard_ops(model), inputs, outputs)

    def segment_parts(self, model: onnx.ModelProto) -> Sequence[SegmentPart]:
        found = self._parts(model)
        return () if found is None else tuple(found.segment.described(found.nodes))

    def bind_session(self, model: onnx.ModelProto, inputs: Arrays, outputs: Arrays) -> Run:
        """Bind a part of a segment that no kernel computes."""
        try:
            session = self._session(model)
        except MissingImplementationError as error:
            return reference(error).bind_segment(model, inputs, outputs)
        binding = session.io_binding()
        before: list[Run] = []
        after: list[Run] = []
        for name, array in inputs.items():
            held = array
            if is_packed(array.dtype):
                held = packed_like(array)
                before.append(functools.partial(pack, array, held))
            binding.bind_input(name, "cpu", 0, element_type(array), array.shape, held.ctypes.data)
        for name, array in outputs.items():
            held = array
            if is_packed(array.dtype):
                held = packed_like(array)
                after.append(functools.partial(unpack, held, array))
            binding.bind_output(name, "cpu", 0, element_type(array), array.shape, held.ctypes.data)

        def run() -> None:
            try:
                session.run_with_iobinding(binding)
            except Exception as error:
                raise failed(error) from error

        if not before and not after:
            return run

        def run_between() -> None:
            for convert in (*before, run, *after):
                convert()

        return run_between

    def bind_whole(self, model: onnx.ModelProto) -> Whole:
        try:
            session = self._session(model)
        except MissingImplementationError as error:
            return reference(error).bind_whole(model)
        names = [value.name for value in session.get_outputs()]
        wanted = {value.name for value in session.get_inputs()}  # unused inputs are not part of the session
        ops = _ops(model)

        def run(feeds: Mapping[str, Any]) -> dict[str, Any]:
            try:
                results = session.run(names, {name: feed for name, feed in feeds.items() if name in wanted})
            except Exception as error:
                raise UnsupportedOpError(f"onnxruntime cannot run {ops}: {error}") from error
            return dict(zip(names, results, strict=True))

        return run

    def _session(self, model: onnx.ModelProto) -> ort.InferenceSession:
        """The session of a segment; equal segments, which are bound to other arrays, share it."""
        text = model.SerializeToString(deterministic=True)
        key = hashlib.sha256(text).digest()
        found = self._sessions.get(key)
        if found is None:
            options = self._options if self.pool.threads > 1 and _is_worth_threads(model) else self._alone
            found = self._sessions[key] = make_session(model, options, [("CPUExecutionProvider", {})])
        return found

    def bind_kernel(
        self, node: ir.Node, inputs: Sequence[Array | None], outputs: Sequence[Array], aliases: Mapping[int, int]
    ) -> Run:
        kernel = native_kernel(self.name, node)
        assert kernel is not None
        declaration = declaration_of(node)
        if declaration is not None:
            attributes = declaration.attribute_values(node)
        else:
            attributes = {k: a.value for k, a in node.attributes.items()}
        rows = self._ledger.record(outputs[0]) if outputs else None
        return kernel.bind(Binding(node, inputs, outputs, attributes, self.pool, aliases, rows))

    def note_writers(self, alone: Sequence[Array], others: Sequence[Array]) -> None:
        self._ledger.note_writers(alone, others)

    def inplace(self, node: ir.Node) -> Mapping[int, int]:
        kernel = native_kernel(self.name, node)
        return kernel.inplace if kernel is not None else {}

    def joins(self, run: Run) -> bool:
        return native_calls(run) is not None

    def record(self, runs: Sequence[Run]) -> Run:
        return in_a_row([call for run in runs for call in native_calls(run) or ()])

    def bind_check(self, arrays: Sequence[Array], fail: Run) -> Run:
        found = np.zeros(1, dtype=np.int64)

        def check() -> None:
            if found[0]:
                found[0] = 0
                fail()

        runs: list[Run] = []
        for array in arrays:
            if kernels.is_tested(array):
                searches = kernels.bind_search(array, self._ledger.records(array), self.pool, found)
                runs += [with_check(search, found, check) for search in searches]
            else:
                runs.append(super().bind_check([array], fail))
        return in_order(runs)

    def remark(self) -> str:
        from graphc.backends.onnxruntime import ahead  # late: it imports every kernel, and runs as a module of its own

        return ahead.state()

    def close(self) -> None:
        self._ledger.clear()
        self.pool.close()


class MissingImplementationError(UnsupportedOpError):
    """onnxruntime has an op, but not for these element types."""


_MISSING = re.compile(r"NOT_IMPLEMENTED : (?:Could not find an implementation|Failed to find kernel) for (\w+)")


def reference(error: MissingImplementationError) -> Backend:
    """The backend that runs what onnxruntime has not implemented for an element type, such as Col2Im of float64: slowly."""
    _warn_once(f"{error}; the numpy backend computes it, slowly")
    return BACKENDS["numpy"](threads=1, spin=False)


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)


_FAILED = re.compile(r"while running (\w+) node\. Name:'([^']*)' Status Message: (.*)", re.DOTALL)
_SOURCE = re.compile(r"/\S*onnxruntime_src/.* was false\.\s*")
"""Where in onnxruntime's sources a check failed, which tells its developers something."""


def failed(error: Exception) -> ExecutionError:
    """What onnxruntime says about a node that failed while it ran."""
    text = str(error)
    found = _FAILED.search(text)
    if found is None:
        return ExecutionError(f"a segment failed in onnxruntime: {text.strip()}")
    op, name, reason = found.groups()
    return ExecutionError(f"{op} {name!r} failed: {_SOURCE.sub('', reason).strip()}", op=op, node=name)


def _is_worth_threads(model: onnx.ModelProto) -> bool:
    """Whether a node of a segment takes long enough for several threads, or may, since its shapes depend on data.

    Never with a ScatterND: its threads in onnxruntime do not wait for each other, so that where an index occurs twice,
    updates get lost, and which of two values stays differs from run to run (seen in 1.31). Its ScatterElements is right.
    """
    graph = ir.from_proto(model).graph
    if any(n.op_type == "ScatterND" for n in graph.all_nodes()):
        return False
    propagate(graph)
    return any(
        bodies(node) or any(static_dims(v) is None for v in node.outputs) or node_costs.seconds(node, batch=1) >= ALONE
        for node in graph
    )


def _mistaken(model: onnx.ModelProto) -> list[str]:
    """The graph optimisations that misread this segment (all seen in 1.31).

    ``MatmulTransposeFusion`` computes another product for Aᵀ·x with a vector x. The two ``TransposeOptimizer`` take what a Pad,
    a Resize or a CenterCropPad says of some ``axes`` for numbers of all axes.
    """
    graph = ir.from_proto(model).graph
    nodes = list(graph.all_nodes())
    kinds = {node.op_type for node in nodes}
    found = []
    if {"MatMul", "Transpose"} <= kinds:
        propagate(graph)
        ranks = [dims(input_of(node, 1)) for node in nodes if node.op_type == "MatMul"]
        if any(shape is None or len(shape) == 1 for shape in ranks):
            found.append("MatmulTransposeFusion")
    if "Transpose" in kinds and any(map(_names_axes, nodes)):
        found += ["TransposeOptimizer", *(f"TransposeOptimizer_{name}" for name in ort.get_available_providers())]
    return found


def _names_axes(node: ir.Node) -> bool:
    if node.op_type == "Pad":
        return len(node.inputs) > 3 and node.inputs[3] is not None
    return node.op_type in ("Resize", "CenterCropPad") and "axes" in node.attributes


def _ops(model: onnx.ModelProto) -> str:
    return ", ".join(sorted({node.op_type for node in model.graph.node}))


def element_type(array: Array) -> Any:
    """The element type for io_binding: a numpy type, or ONNX's number for a type that numpy lacks."""
    return array.dtype if array.dtype.isbuiltin == 1 else int(ir.DataType.from_numpy(array.dtype))


def make_session(
    model: onnx.ModelProto, options: ort.SessionOptions, providers: Sequence[tuple[str, Mapping[str, str]]]
) -> ort.InferenceSession:
    """Make a session for a segment, without onnxruntime's fallback to another device.

    A session on another device than the bound arrays would read arbitrary memory.

    Raises:
        UnsupportedOpError: onnxruntime cannot run it.
    """
    try:
        return ort.InferenceSession(
            guarded(model).SerializeToString(),
            sess_options=options,
            providers=list(providers),
            disabled_optimizers=[*UNEVEN, *_mistaken(model)],
            enable_fallback=False,
        )
    except Exception as error:
        missing = _MISSING.search(str(error))
        if missing is not None:
            raise MissingImplementationError(
                f"onnxruntime has not implemented {missing[1]} for an element type in a segment of {_ops(model)}"
            ) from error
        raise UnsupportedOpError(f"onnxruntime cannot run a segment of {_ops(model)}: {error}") from error


def session_options(threads: int, spin: bool) -> ort.SessionOptions:
    """Options of every session: ``threads`` in all, which do not wait busily between runs."""
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors are raised, so they need not be logged too
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin and threads > 1 else "0")
    # native kernels run between segments on the same cores, so the runtime's threads must be idle by then
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Its rewrites around QuantizeLinear assume uint8 where a zero point was moved, and fail on int8.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return options


BACKENDS.register("onnxruntime", OnnxRuntimeBackend, origin=__name__)
