"""Keeps values away from kernels of onnxruntime that read beyond their operands because of them.

Known is one (1.31): a cubic Resize over regions of interest, tf_crop_and_resize, whose region is data and not finite. All other
ops with indices, lengths or coordinates check them or clamp them; ``tests/training/test_index_operands.py`` shows it.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import helper

_FAR = 1e4
"""A coordinate, in sizes of the image, that is outside whatever it is rounded to."""


def guarded(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a guard before every such operand; the model itself where there is none."""
    if not any(_reads_a_region(model.graph, node) for node in model.graph.node):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    nodes = [one for node in model.graph.node for one in _with_guard(model.graph, node)]
    copy.graph.ClearField("node")
    copy.graph.node.extend(nodes)
    return copy


def _reads_a_region(graph: onnx.GraphProto, node: onnx.NodeProto) -> bool:
    if node.op_type != "Resize" or node.domain != "" or len(node.input) < 2 or not node.input[1]:
        return False
    texts = {a.name: a.s for a in node.attribute}
    if texts.get("mode") != b"cubic" or texts.get("coordinate_transformation_mode") != b"tf_crop_and_resize":
        return False
    fixed = {t.name for t in graph.initializer} | {n.output[0] for n in graph.node if n.op_type == "Constant"}
    return node.input[1] not in fixed


def _with_guard(graph: onnx.GraphProto, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Where(region is finite, region, far outside) → Resize"""
    if _reads_a_region(graph, node):
        region = node.input[1]
        name = f"{region}/finite/{node.output[0]}"
        yield helper.make_node("IsNaN", [region], [f"{name}/nan"])
        yield helper.make_node("IsInf", [region], [f"{name}/inf"])
        yield helper.make_node("Or", [f"{name}/nan", f"{name}/inf"], [f"{name}/bad"])
        yield helper.make_node("Constant", [], [f"{name}/float"], value_float=_FAR)
        yield helper.make_node("CastLike", [f"{name}/float", region], [f"{name}/far"])
        yield helper.make_node("Where", [f"{name}/bad", f"{name}/far", region], [name])
        changed = onnx.NodeProto()
        changed.CopyFrom(node)
        changed.input[1] = name
        node = changed
    yield node
