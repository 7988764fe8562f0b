"""Binding a plan to memory, a backend and a communicator, and running it.

Everything is looked up, allocated and checked when the plan is bound; a step is a walk over a list of closures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import onnx
import onnx_ir as ir

from graphc.backend import Array, Backend, Run
from graphc.errors import ModelError
from graphc.ir import DOMAIN_VERSION, IR_VERSION, OPSET
from graphc.ir.bodies import captured
from graphc.ir.builder import Builder
from graphc.ir.declare import declaration_of
from graphc.ir.decomposition import decompose_graph
from graphc.ir.facts import constant, is_float, static_dims
from graphc.plan import Plan
from graphc.runtime.state import State, aligned_zeros
from graphc.steps import Slice, Step, UpdateGroup


class Collectives(Protocol):
    """The part of a communicator that a step uses."""

    def start(self, array: Array, op: str, tag: str) -> Any: ...
    def wait(self, handle: Any) -> None: ...


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
        comm: Collectives | None = None,
        *,
        check: bool = True,
        wrap: Callable[[str, str, Run], Run] | None = None,
    ) -> None:
        self.plan = plan
        self._state = state
        self._backend = backend
        self._comm = comm
        self._handles: dict[str, Any] = {}
        self._buffers: dict[str, Array] = {}
        for name, nbytes in plan.buffers.items():
            self._buffers[name] = state.flat[name].view(np.uint8) if name in state.flat else aligned_zeros(nbytes)
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
        self.runs: list[Run] = []
        for step in plan.steps:
            if step.kind == "check" and not check:
                continue
            run = self._bind(step)
            self.runs.append(wrap(step.kind, step.name, run) if wrap else run)

    def run(self, feeds: Mapping[str, Array]) -> None:
        """Copy the feeds in and execute one step; results are in :attr:`outputs`."""
        for name, buffer in self._copies:
            np.copyto(buffer, feeds[name])
        for run in self.runs:
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
                view = self._state.arrays[value.name or ""]
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
            inputs = [None if v is None else self._array(v) for v in node.inputs]
            return self._backend.bind_kernel(node, inputs, [self._array(v) for v in node.outputs], {})
        if step.kind == "update":
            assert step.group is not None
            return self._bind_update(step.group)
        if step.kind == "check":
            return self._bind_check()
        return self._bind_collective(step)

    def _bind_collective(self, step: Step) -> Run:
        if self._comm is None:
            raise ModelError(f"the plan has the collective {step.tag!r}, but there is no communicator")
        handles, tag, comm = self._handles, step.tag, self._comm
        if step.kind == "wait":

            def wait() -> None:
                comm.wait(handles.pop(tag))

            return wait
        place = self.plan.places[step.inputs[0]]
        flat, reduce = self._buffers[place.buffer].view(place.dtype), step.reduce

        def start() -> None:
            handles[tag] = comm.start(flat, reduce, tag)

        return start

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
        for group in self.plan.groups:
            gradient = group.buffer(1) if 1 in group.flat else None
            if gradient in self._buffers and gradient not in self._state.flat:
                first = group.nodes[0].inputs[1]
                assert first is not None
                assert first.dtype is not None
                watched.append(self._buffers[gradient].view(first.dtype.numpy()))
        finite = self._backend.all_finite

        def check() -> None:
            for array in watched:
                if not finite(array):
                    raise NonFiniteStepError

        return check

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
                assert value.dtype is not None
                inputs.append(self._buffers[group.buffer(index)].view(value.dtype.numpy()))
            else:
                inputs.append(self._array(value))
        targets: list[Array] = []
        for output in range(len(node.outputs)):
            target = inputs[declaration.next_value[output]] if declaration.next_value[output] < len(inputs) else None
            # An output whose state is left out (RMSprop without momentum, say) is written to memory nobody reads.
            targets.append(target if target is not None else np.zeros(group.elements, dtype=np.float32))
        if self._backend.prefers_native(node):
            return self._backend.bind_kernel(node, inputs, targets, dict(declaration.next_value))
        return self._bind_decomposed_update(node, inputs, targets)

    def _bind_decomposed_update(self, node: ir.Node, inputs: list[Array | None], targets: list[Array]) -> Run:
        """Run an update the backend has no kernel for: its decomposition over flat buffers, then copy the results back."""
        graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, "graphc": DOMAIN_VERSION}, name="update")
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
        present = [k for k, t in enumerate(targets) if any(t is a for a in inputs)]
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
