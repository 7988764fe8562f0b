"""Packs the signs of rectified sums into bits, which gradients read instead of the sums.

    before   z = Relu(x + Relu(…))             …   Where(z > 0, dz, 0)
    after    z = Relu(x + Relu(…)), bits = PackedMask(z > 0)   …   Where(UnpackedMask(bits), dz, 0)

The gradient of a residual sum needs only the sum's sign: a sixteenth of the bytes. A sign is recomputed instead if the sum
follows
from other operands of its gradient, as that of two normalisations does.
"""

from __future__ import annotations

import onnx_ir as ir

from graphc.backends.fusion.graph_queries import stand_in
from graphc.backends.fusion.packed_masks import BITS, PACKED, UNPACKED
from graphc.ir import DOMAIN
from graphc.ir.facts import constant, shape_of, size_of

DTYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def pack_masks(graph: ir.Graph, least: int) -> None:
    """Replace reads of rectified sums of more than ``least`` elements by bits where gradients need only signs."""
    for relu in [n for n in graph if n.op_type == "Relu" and n.domain == "" and _adds_rectified(n, least)]:
        asked = [user for user, index in relu.outputs[0].uses() if index == 0 and _is_sign(user)]
        if asked:
            bits = _node(PACKED, asked[0].outputs[0], f"{relu.outputs[0].name}.bits", ir.DataType.UINT8)
            sign, *others = asked
            for other in others:
                stand_in(other.outputs[0], sign.outputs[0])
                graph.remove(other, safe=True)
            mask = _node(UNPACKED, bits.outputs[0], f"{relu.outputs[0].name}.mask", ir.DataType.BOOL)
            sign.outputs[0].replace_all_uses_with(mask.outputs[0])
            bits.replace_input_with(0, sign.outputs[0])
            graph.remove(sign)
            graph.insert_after(relu, [sign, bits, mask])


def _adds_rectified(relu: ir.Node, least: int) -> bool:
    x = relu.inputs[0]
    total = x.producer() if x is not None else None
    if x is None or total is None or total.op_type != "Add" or total.domain or x.dtype not in DTYPES:
        return False
    if size_of(x) <= least or shape_of(x)[-1] % BITS:
        return False
    made = [v.producer() for v in total.inputs if v is not None]
    return any(n is not None and n.op_type == "Relu" and not n.domain for n in made)


def _is_sign(node: ir.Node) -> bool:
    if node.op_type != "Greater" or node.domain or node.outputs[0].is_graph_output():
        return False
    known = constant(node.inputs[1])
    return known is not None and known.size == 1 and not known.any() and shape_of(node.outputs[0]) == shape_of(node.inputs[0])


def _node(op_type: str, x: ir.Value, name: str, dtype: ir.DataType) -> ir.Node:
    *outer, last = shape_of(x)
    shape = ir.Shape([*outer, last // BITS if op_type == PACKED else last * BITS])
    out = ir.Value(name=name, type=ir.TensorType(dtype), shape=shape)
    return ir.Node(DOMAIN, op_type, [x], outputs=[out], name=name)
