"""Float parameters in the place of constant integers with a scale and a zero point.

    before   W (int8) ─► DequantizeLinear(·, scale, zero) ─► Conv
    after    W (float32, metadata graphc.quantized) ─► Conv

The parameter keeps the name of the integers. Its metadata says how an export writes it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from graphc.ir.builder import Builder
from graphc.ir.facts import FLOATS, is_state
from graphc.ir.parameters import Decision
from graphc.ir.quantized import MIDDLE, PACKED, QUANTIZED, Factor, Packed, Quantized
from graphc.ir.state import add_initializer
from graphc.passes.parameters.decide import Rules

_VIEWS = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Cast"})

Align = Callable[[tuple[int, ...]], tuple[int, ...] | None]
"""Shape of a factor → the shape in which it broadcasts against the integers; None if it does not."""


def tensor_of(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer that nothing changes, or of a ``Constant``."""
    if value is None or value.is_graph_input() or (value.is_initializer() and is_state(value)):
        return None
    producer = value.producer()
    if producer is None:
        return value.const_value if value.is_initializer() else None
    if producer.op_type == "Constant" and producer.domain == "" and "value" in producer.attributes:
        return producer.attributes["value"].as_tensor()
    return None


def factors(value: ir.Value) -> list[tuple[ir.Value, tuple[int, ...] | None]]:
    """The values whose product ``value`` is, each with its shape in the product (None: computed); followed through views."""
    tensor = tensor_of(value)
    if tensor is not None:
        return [(value, tuple(tensor.shape.numpy()))]
    node = value.producer()
    if node is None or node.domain or not node.inputs or node.inputs[0] is None:
        return [(value, None)]
    if node.op_type == "Mul" and node.inputs[1] is not None:
        return [factor for v in node.inputs if v is not None for factor in factors(v)]
    if node.op_type in _VIEWS:
        inner = factors(node.inputs[0])
        if len(inner) != 1 or inner[0][1] is None or value.shape is None or not value.shape.is_static():
            return [(value, None)]
        return [(inner[0][0], tuple(value.shape.numpy()))]
    return [(value, None)]


class Weights:
    """The float parameters of a graph that were integers; equal uses of the same integers share one.

    Attributes:
        types: element type in the file → number of parameters that were of it.
        decisions: for each that was found, whether it trains.
    """

    def __init__(self, graph: ir.Graph, op: Builder) -> None:
        self.graph = graph
        self.types: dict[str, int] = {}
        self.decisions: list[Decision] = []
        self._op = op
        self._made: dict[Any, ir.Value] = {}
        self._kinds: dict[ir.Value, str] = {}
        self._records: dict[ir.Value, Quantized] = {}
        self._constants: dict[str, ir.Value] = {}

    def parameter(
        self,
        integers: ir.Value,
        scales: Sequence[tuple[ir.Value, tuple[int, ...] | None]],
        zero: ir.Value | None,
        *,
        dtype: ir.DataType,
        align: Align,
        align_zero: Align | None = None,
        block: tuple[int, int] | None = None,
    ) -> ir.Value | None:
        """The parameter (integers - zero) · Π scales; None where a part is no constant or does not fit.

        Args:
            align, align_zero: where the axes of the scales and of the zero point lie in the integers.
            block: axis of the integers, and the number of its elements that share a scale.
        """
        stored = tensor_of(integers)
        if stored is None or stored.dtype in FLOATS:
            return None
        found: list[Factor] = []
        for value, shape in scales:
            view = None if shape is None else align(shape)
            if view is None:
                return None
            found.append(self._factor(value, view))
        middle = None
        implied = None if zero is None else zero.metadata_props.get(MIDDLE)
        if zero is not None and implied is None:
            ((value, shape),) = factors(zero)[:1]
            view = None if shape is None else (align_zero or align)(shape)
            if view is None:
                return None
            middle = self._factor(value, view)
        shape = tuple(stored.shape.numpy())
        packed = _packed_of(integers)
        record = Quantized(
            packed.name if packed is not None else integers.name or "",
            tuple(found),
            middle,
            int(implied or 0),
            block=None if block is None else (*block, shape[block[0]]),
            packed=packed,
            wide=stored.dtype == ir.DataType.INT32,
        )
        key = (record, dtype)
        if key not in self._made:
            self._made[key] = self._make(stored, record, dtype)
        return self._made[key]

    def _factor(self, value: ir.Value, view: tuple[int, ...]) -> Factor:
        packed = _packed_of(value)
        name = packed.name if packed is not None else value.name or ""
        self._constants[name] = value
        return Factor(name, view, packed=packed)

    def _make(self, stored: ir.TensorProtocol, record: Quantized, dtype: ir.DataType) -> ir.Value:
        def read(factor: Factor) -> Any:
            tensor = tensor_of(self._constants[factor.name])
            assert tensor is not None
            return np.asarray(tensor.numpy()).reshape(factor.view)

        scale = record.product([read(factor) for factor in record.scales]).astype(dtype.numpy())
        zero = record.shift(None if record.zero is None else read(record.zero))
        array = record.value(np.asarray(stored.numpy()), scale, zero)
        value = add_initializer(self.graph, self._op.unique(f"{record.integers}.float", value=True), array)
        self._records[value] = record
        self._kinds[value] = stored.dtype.name.lower()
        return value

    def is_weight(self, value: ir.Value | None) -> bool:
        """Whether ``value`` is one of these parameters."""
        return value in self._records

    def follow(self, bias: ir.Value | None, weight: ir.Value | None) -> None:
        """Note that the scale of ``bias`` is a multiple of that of ``weight``: runtimes that fuse the layer rely on it."""
        if bias is None or weight is None or bias not in self._records or weight not in self._records:
            return
        record, scales = self._records[bias], self._records[weight].scales
        if len(record.scales) == 1 and len(scales) == 1 and record.scales[0].name != scales[0].name:
            self._records[bias] = replace(record, follows=scales[0].name)

    def finish(self, rules: Rules) -> None:
        """Name the parameters as the integers were, and write down which scales and zero points only they use.

        What ``rules`` say is no parameter becomes a constant. Called when nodes without use are gone.
        """
        users: dict[str, set[str]] = {}  # scale or zero point → the integers of few bits that have it
        for record in self._records.values():
            for factor in (*record.scales, *([] if record.zero is None else [record.zero])):
                if not record.wide:
                    users.setdefault(factor.name, set()).add(record.integers)

        def free(factor: Factor) -> Factor:
            unused = not self._constants[factor.name].uses()
            return replace(factor, free=unused and len(users.get(factor.name, ())) <= 1)

        for value, record in self._records.items():
            record = replace(
                record,
                scales=tuple(free(scale) for scale in record.scales),
                zero=None if record.zero is None else free(record.zero),
            )
            self._rename(value, record.integers)
            assert value.const_value is not None
            decision = rules.decide(value, value.const_value)
            self.decisions.append(decision)
            if decision.trains:
                kind = self._kinds[value]
                self.types[kind] = self.types.get(kind, 0) + 1
                value.metadata_props[QUANTIZED] = record.to_json()
            else:
                self._make_constant(value)

    def _make_constant(self, value: ir.Value) -> None:
        name = value.name or ""
        del self.graph.initializers[name]
        self._op.before = next(iter(self.graph), None)
        (out,) = self._op.emit("Constant", [], {"value": value.const_value}, outputs=[name], name=name)
        value.replace_all_uses_with(out, replace_graph_outputs=True)

    def _rename(self, value: ir.Value, name: str) -> None:
        old = value.name or ""
        taken = name in self.graph.initializers or any(v.name == name for node in self.graph for v in node.outputs)
        if taken:
            return
        del self.graph.initializers[old]
        value.name = name
        if value.const_value is not None:
            value.const_value.name = name
        self.graph.register_initializer(value)


def _packed_of(value: ir.Value) -> Packed | None:
    found = value.metadata_props.get(PACKED)
    return None if found is None else Packed.from_json(found)
