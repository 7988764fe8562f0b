"""Names of what builders create."""

from __future__ import annotations

import onnx_ir as ir

from graphc.ir import OPSET
from graphc.ir.builder import Builder


def test_builders_of_one_graph_that_take_turns_give_different_names() -> None:
    x = ir.val("x", ir.DataType.FLOAT, [2, 3])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": OPSET}, name="g")
    one, other = Builder(graph), Builder(graph)
    for k in range(3):
        one.Reshape(x, [6 + k])
        other.Add(x, float(k))
        one.Add(x, float(k))
    values = [v.name for node in graph for v in node.outputs]
    nodes = [node.name for node in graph]
    assert len(values) == len({*values}) == 18
    assert len(nodes) == len({*nodes}) == 18


def test_names_of_removed_nodes_are_free_for_a_later_builder() -> None:
    x = ir.val("x", ir.DataType.FLOAT, [2])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": OPSET}, name="g")
    y = Builder(graph).Neg(x)
    graph.remove(y.producer(), safe=True)
    assert Builder(graph).Neg(x).name == y.name
