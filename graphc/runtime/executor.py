"""Binding a plan to memory, a backend and a communicator, and running it.

Everything is looked up, allocated and checked when the plan is bound; a step is a walk over a list of closures.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphc.backend import Array, Backend, Run, aligned_zeros
from graphc.errors import ModelError
from graphc.ir import DOMAIN_VERSION, IR_VERSION, OPSET
from graphc.ir.bodies import captured
from graphc.ir.builder import Builder
from graphc.ir.declare import SHARD, declaration_of
from graphc.ir.decomposition import decompose_graph
from graphc.ir.facts import constant, is_float, static_dims
from graphc.ir.names import STEP
from graphc.plan import Plan
from graphc.runtime.communicator import Communicator
from graphc.runtime.sparse import SparseSum
from graphc.runtime.state import State
from graphc.steps import Slice, Step, Transfer, UpdateGroup

FINITE = "finite?"
"""Tag of the AllReduce by which ranks that hold parts of the gradients agree on whether all are finite."""


class NonFiniteStepError(ArithmeticError):
    """Raised by the check step, before any update has run."""


class Executor:
    """A bound plan.

    Args:
        plan: what to run.
        state: where parameters and other state live; shared by all plans of a trainer.
        backend: runs segments and kernels.
        comm: starts and finishes collectives; unused on one rank.
        check: whether gradients and loss are tested for NaN and infinity before the updates.
        wrap: called as ``wait(kind, name, run)`` around every step, for tracing; None adds nothing.
    """

    def __init__(
        self,
        plan: Plan,
        state: State,
        backend: Backend,
        comm: Communicator | None = None,
        *,
        check: bool = True,
        wrap: Callable[[str, str, Run], Run] | None = None,
    ) -> None:
        self.plan = plan
        self._state = state
        self._backend = backend
        self._comm = comm
        self._handles: dict[str, Any] = {}
        self._sparse: dict[str, SparseSum] = {}
        self._buffers: dict[str, Array] = {}
        for name, nbytes in plan.buffers.items():
            self._buffers[name] = aligned_zeros(nbytes) if name == "arena" else state.memory(name, nbytes)
        self._views: dict[ir.Value, Array] = {}
        self.inputs: dict[str, Array] = {}
        for value in plan.model.graph.inputs:
            shape = static_dims(value)
            assert shape is not None
            assert value.dtype is not None
            dtype = np.dtype(value.dtype.numpy())
            buffer = aligned_zeros(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize).view(dtype).reshape(shape)
            self.inputs[value.name or ""] = self._views[value] = buffer
        self.outputs: dict[str, Array] = {v.name or "": self._array(v) for v in plan.model.graph.outputs}
        self._copies = [(name, buffer) for name, buffer in self.inputs.items()]
        self._first = self._last = True
        self._index = 0
        self.runs: list[Run] = []
        self._within: list[Run] = []
        for k, step in enumerate(plan.steps):
            if (step.kind == "check" and not check) or (step.group is not None and self._owns_nothing(step.group)):
                continue
            run = self._bind_collective(step, k) if step.transfer is not None else self._bind(step)
            self.runs.append(wrap(step.kind, step.name, run) if wrap else run)
            if not step.once:
                self._within.append(self.runs[-1])

    def run(self, feeds: Mapping[str, Array], *, index: int = 0, last: bool = True) -> None:
        """Copy the feeds in and execute one step, or one micro-batch of it; results are in :attr:`outputs` after the last.

        Args:
            feeds: one array per graph input.
            index, last: number of the micro-batch, and whether it ends the step.
        """
        for name, buffer in self._copies:
            np.copyto(buffer, feeds[name])
        self._index, self._first, self._last = index, index == 0, last
        for run in self.runs if last else self._within:
            run()

    # Binding ----------------------------------------------------------------------------------------------------------

    def _array(self, value: ir.Value) -> Array:
        view = self._views.get(value)
        if view is None:
            place = self.plan.places.get(value)
            if place is not None:
                view = self._view(place)
            elif value in self.plan.views:
                view = self._array(self.plan.views[value]).reshape(static_dims(value) or ())
            elif value.is_initializer():
                view = self._state.array(value.name or "")
            else:
                known = constant(value)
                if known is None:
                    raise ModelError(f"value {value.name!r} has no place in the plan")
                view = np.ascontiguousarray(known).reshape(known.shape)
            self._views[value] = view
        return view

    def _view(self, place: Slice) -> Array:
        buffer = self._buffers[place.buffer]
        return buffer[place.offset : place.offset + place.nbytes].view(place.dtype).reshape(place.shape)

    def _bind(self, step: Step) -> Run:
        if step.kind == "segment":
            return self._backend.bind_segment(
                segment_model(step),
                {v.name or "": self._array(v) for v in step.inputs},
                {v.name or "": self._array(v) for v in step.outputs},
            )
        if step.kind == "kernel":
            (node,) = step.nodes
            if node.attributes.get_string(SHARD, "") and self.plan.world_size > 1:
                return self._bind_over_parts(node)
            inputs = [None if v is None else self._array(v) for v in node.inputs]
            return self._backend.bind_kernel(node, inputs, [self._array(v) for v in node.outputs], {})
        if step.kind == "update":
            assert step.group is not None
            return self._bind_update(step.group)
        if step.kind == "accumulate":
            return self._bind_accumulate(step.nodes)
        return self._bind_check()

    def _bind_accumulate(self, nodes: Sequence[ir.Node]) -> Run:
        """Sums over micro-batches, which plans for different shapes share, and their results after the last one."""
        parts: list[tuple[Array, list[Array], Array]] = []
        tree = bool(nodes[0].attributes.get_int("tree", 0))
        steps = nodes[0].attributes["steps"].as_int() // (self.plan.world_size if tree else 1)
        for node in nodes:
            (value,), result = node.inputs, node.outputs[0]
            assert value is not None
            y = self._array(result)
            levels = max(1, steps.bit_length() - 1) if tree else 1
            names = [f"accumulated/{result.name}/{level}" for level in range(levels)]
            own = [self._state.memory(name, y.nbytes).view(y.dtype).reshape(y.shape) for name in names[1:]]
            kept = self.plan.places[result].buffer != "arena" and not tree
            first = y if kept else self._state.memory(names[0], y.nbytes).view(y.dtype).reshape(y.shape)
            parts.append((self._array(value), [first, *own], y))

        def accumulate() -> None:
            for x, (own, *_), y in parts:
                out = y if self._last else own
                if self._first:
                    np.copyto(out, x)
                else:
                    np.add(own, x, out=out)

        def accumulate_by_tree() -> None:
            """As a binary counter carries: level k holds the sum of 2ᵏ neighbours that waits for the next 2ᵏ."""
            carries = (~self._index & (self._index + 1)).bit_length() - 1
            for x, own, y in parts:
                total = x
                for level in range(carries):
                    total = np.add(own[level], total, out=own[level])
                np.copyto(y if self._last else own[carries], total)

        return accumulate_by_tree if tree else accumulate

    def _bind_collective(self, step: Step, index: int) -> Run:
        transfer, handles, comm = step.transfer, self._handles, self._comm
        assert transfer is not None
        tag = transfer.tag
        if comm is None:
            raise ModelError(f"the plan has the collective {tag!r}, but there is no communicator")
        flat = self._buffers[transfer.buffer][transfer.offset : transfer.offset + transfer.nbytes].view(transfer.dtype)
        part = slice(*transfer.parts[self.plan.rank]) if transfer.parts else slice(0)
        if transfer.sparse(self.plan.world_size):
            return self._bind_sparse(step, index, flat)
        if step.kind == "wait":
            sink = self._buffers[transfer.sink].view(transfer.dtype) if transfer.sink else None

            def wait() -> None:
                handle = handles.pop(tag, None)
                if handle is not None:
                    comm.wait(handle)
                if sink is not None:
                    np.copyto(sink, flat[part])

            return wait
        source = self._buffers[transfer.source].view(transfer.dtype) if transfer.source else None
        gaps = [flat[slice(*gap)] for gap in transfer.gaps]
        skipped, overlap = self._skips(transfer, index), self._overlaps(step, index)
        if transfer.kind == "allreduce":
            lengths = transfer.lengths if transfer.reduce == "adasum" else None
            handle = comm.prepare(flat, transfer.reduce, tag, lengths=lengths, overlap=overlap)
        else:
            reduce, kind = transfer.reduce or "sum", transfer.kind
            handle = comm.prepare(flat, reduce, tag, kind=kind, parts=transfer.parts, root=transfer.root, overlap=overlap)

        def start() -> None:
            for gap in gaps:
                gap.fill(0)
            if source is not None:
                np.copyto(flat[part], source)
            if not skipped():
                handles[tag] = handle
                comm.begin(handle)

        return start

    def _overlaps(self, step: Step, index: int) -> bool:
        """Whether anything is computed between the start of a collective, which is step ``index``, and its wait."""
        rest = self.plan.steps[index + 1 :]
        end = next((k for k, s in enumerate(rest) if s.kind == "wait" and s.tag == step.tag), len(rest))
        return any(s.transfer is None for s in rest[:end])

    def _bind_sparse(self, step: Step, index: int, flat: Array) -> Run:
        transfer, handles = step.transfer, self._handles
        assert transfer is not None
        tag = transfer.tag
        if step.kind == "wait":
            exchange = self._sparse[tag]

            def wait() -> None:
                if handles.pop(tag, None) is not None:
                    exchange.finish()

            return wait
        exchange = SparseSum(flat, transfer.nonzero, self.plan.rank, self.plan.world_size)
        handle = exchange.prepare(self._comm, tag, overlap=self._overlaps(step, index))
        self._sparse[tag] = exchange
        skipped = self._skips(transfer, index)

        def start() -> None:
            if not skipped():
                handles[tag] = handle
                exchange.start()

        return start

    def _skips(self, transfer: Transfer, index: int) -> Callable[[], bool]:
        """Whether the collective, which is step ``index`` of the plan, is left out in the present training step."""
        if transfer.every <= 1 and transfer.first <= 1 and not transfer.last:
            return lambda: False
        if STEP not in self._state.arrays:
            raise ModelError(f"{transfer} runs in some steps only, but the graph does not count steps in {STEP!r}")
        done, every, since = self._state.arrays[STEP], transfer.every, transfer.since
        first, last = transfer.first, transfer.last or math.inf
        counted = any(s.group is not None and _counts_steps(s.group) for s in self.plan.steps[:index])

        def skipped() -> bool:
            number = int(done) + (not counted)
            return not first <= number <= last or (number > since and number % every != 0)

        return skipped

    def _owns_nothing(self, group: UpdateGroup) -> bool:
        start, stop = group.owned
        return start == stop and group.elements > 0

    def _part(self, group: UpdateGroup, index: int) -> Array:
        """The elements of flat input ``index`` that this rank updates."""
        array = self._buffers[group.buffer(index)].view(group.dtype(index))
        return array if index in group.scattered else array[slice(*group.owned)]

    def _bind_over_parts(self, node: ir.Node) -> Run:
        """A reduction over gradients of which this rank has a part: its result is over the part."""
        outputs = [self._array(v) for v in node.outputs]
        parts: dict[str, Array] = {}
        for value in node.inputs:
            assert value is not None
            group, index = self.plan.homes[value]
            parts[group.buffer(index)] = self._part(group, index)
        inputs: list[Array | None] = [array for array in parts.values() if array.size]
        if not inputs:
            return functools.partial(outputs[0].fill, 0)
        if self._backend.prefers_native(node):
            return self._backend.bind_kernel(node, inputs, outputs, {})
        return self._bind_decomposed(node, inputs, outputs)

    def _bind_check(self) -> Run:
        """Test all gradients of parameters, and the scalars reported, before the first update.

        Where updates can skip a step (a scaled loss), the graph has done so; what stops the run is an overflow that no smaller
        scale can cure.
        """
        if any(group.nodes[0].op_type == "Tally" for group in self.plan.groups):
            return lambda: None  # the graph skips and counts such steps itself
        skip = self._skip_flag()
        if skip is not None:
            flag, scale, least = skip

            def check_scale() -> None:
                if flag and scale <= least:
                    raise NonFiniteStepError

            return check_scale
        watched: list[Array] = [a.reshape(-1) for v, a in self._outputs() if is_float(v)]
        gradients = [group for group in self.plan.groups if 1 in group.flat and group.buffer(1) not in self._state.flat]
        watched += [part for group in gradients if (part := self._part(group, 1)).size]
        finite, comm = self._backend.all_finite, self._comm
        if comm is None or not any(group.sharded for group in gradients):

            def check() -> None:
                for array in watched:
                    if not finite(array):
                        raise NonFiniteStepError

            return check
        flag = np.zeros(1, dtype=np.float32)

        def check_together() -> None:
            """A rank sees its own parts only: all stop when one of them meets a NaN."""
            flag[0] = not all(finite(array) for array in watched)
            comm.allreduce(flag, "max", FINITE)
            if flag[0]:
                raise NonFiniteStepError

        return check_together

    def _skip_flag(self) -> tuple[Array, Array, float] | None:
        """The flag that makes updates skip the step, the loss scale, and the least that this may become."""
        for group in self.plan.groups:
            node = group.nodes[0]
            if node.op_type == "LossScale" and node.inputs[2] is not None and node.inputs[0] is not None:
                declaration = declaration_of(node)
                assert declaration is not None
                least = float(declaration.attribute_values(node)["minimum"])
                return self._array(node.inputs[2]), self._array(node.inputs[0]), least
        return None

    def _outputs(self) -> list[tuple[ir.Value, Array]]:
        return [(v, self._array(v)) for v in self.plan.model.graph.outputs]

    def _bind_update(self, group: UpdateGroup) -> Run:
        node = group.nodes[0]
        declaration = declaration_of(node)
        assert declaration is not None
        inputs: list[Array | None] = []
        for index, value in enumerate(node.inputs):
            if value is None:
                inputs.append(None)
            elif index in group.flat:
                inputs.append(self._part(group, index))
            else:
                inputs.append(self._array(value))
        targets: list[Array] = []
        start, stop = group.owned
        for output in range(len(node.outputs)):
            target = inputs[declaration.next_value[output]] if declaration.next_value[output] < len(inputs) else None
            # An output whose state is left out (RMSprop without momentum, say) is written to memory nobody reads.
            targets.append(target if target is not None else np.zeros(stop - start, dtype=np.float32))
        if self._backend.prefers_native(node):
            return self._backend.bind_kernel(node, inputs, targets, dict(declaration.next_value))
        present = [k for k, t in enumerate(targets) if any(t is a for a in inputs)]
        return self._bind_decomposed(node, inputs, targets, present)

    def _bind_decomposed(
        self, node: ir.Node, inputs: list[Array | None], targets: list[Array], present: Sequence[int] = (0,)
    ) -> Run:
        """Run what the backend has no kernel for over flat buffers: its decomposition, then copy the results back."""
        graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, "graphc": DOMAIN_VERSION}, name=node.op_type)
        values: list[ir.Value | None] = []
        bound: dict[str, Array] = {}
        for index, array in enumerate(inputs):
            if array is None:
                values.append(None)
                continue
            name = f"i{index}"
            value = ir.Value(
                name=name, type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(list(array.shape))
            )
            graph.inputs.append(value)
            values.append(value)
            bound[name] = array
        op = Builder(graph)
        names = [f"o{k}" for k in range(len(targets))]
        produced = op.emit(node.op_type, values, dict(node.attributes), domain="graphc", outputs=names)
        graph.outputs.extend(produced[k] for k in present)
        decompose_graph(graph, lambda n: False)
        results = {f"o{k}": np.empty_like(targets[k]) for k in present}
        run = self._backend.bind_segment(ir.to_proto(ir.Model(graph, ir_version=IR_VERSION)), bound, results)
        pairs = [(targets[k], results[f"o{k}"]) for k in present]

        def update() -> None:
            run()
            for target, result in pairs:
                np.copyto(target, result)

        return update


def _counts_steps(group: UpdateGroup) -> bool:
    state = group.nodes[0].inputs[0]
    return state is not None and state.name == STEP


def segment_model(step: Step) -> onnx.ModelProto:
    """The ONNX model of a segment: its nodes, the constants they read as initializers, static types throughout."""
    graph = onnx.GraphProto(name="segment")
    constants: dict[str, ir.Value] = {}
    bound = set(step.inputs)
    for node in step.nodes:
        graph.node.append(ir.serde.serialize_node(node))
        for value in node.inputs:
            if value is not None and value not in bound and constant(value) is not None:
                constants[value.name or ""] = value
        for inner in captured(node):
            if inner not in bound and constant(inner) is not None:
                constants[inner.name or ""] = inner
    for name, value in constants.items():
        known = constant(value)
        assert known is not None
        graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(known).reshape(known.shape), name))
    graph.input.extend(_value_info(v) for v in step.inputs)
    graph.output.extend(_value_info(v) for v in step.outputs)
    domains = {"": OPSET}
    for node in step.nodes:
        if node.domain != "" and node.graph is not None:
            domains[node.domain] = node.graph.opset_imports[node.domain]
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in sorted(domains.items())]
    return onnx.ModelProto(ir_version=IR_VERSION, graph=graph, opset_import=opsets)


def _value_info(value: ir.Value) -> onnx.ValueInfoProto:
    assert value.dtype is not None
    return onnx.helper.make_tensor_value_info(value.name or "", int(value.dtype), static_dims(value))
