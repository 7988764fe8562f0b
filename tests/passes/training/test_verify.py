"""verify: each rule of the IR, broken once; the message names the rule and shows the place."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graphc.errors import ModelError
from graphc.ir import IR_VERSION, OPSET
from graphc.ir.builder import Builder
from graphc.ir.state import add_initializer
from graphc.ir.text import from_text
from graphc.ir.verify import verify_model
from graphc.pipeline import run
from tests.effort import growth

HEAD = '<ir_version: 11, opset_import: ["" : 26, "graphc" : 1]>\n'
TRAINING = (
    HEAD
    + """g (float[4,3] x) => (float[4,2] y)
  <float[3,2] w = {1, 2, 3, 4, 5, 6}, float "graphc.lr" = {0.1}>
{
   y = MatMul (x, w)
   [relu] r = Relu (y)
   dw = Gemm <transA: int = 1> (x, r)
   start = graphc.AllReduceStart <tag: string = "dw"> (dw)
   wait = graphc.AllReduceWait <tag: string = "dw"> (start)
   next = graphc.SGD (w, wait, "graphc.lr")
}
"""
)


def training():
    return from_text(TRAINING)


def nodes(model):
    return {node.op_type: node for node in model.graph}


def test_a_good_graph_passes_and_stays_as_it_is():
    model = training()
    before = str(model.graph)
    run(model, "verify")
    assert str(model.graph) == before


def raw_node(model, op_type, inputs, *, domain="", outputs=1, name="bad", attributes=(), typed=True):
    """Put in a node that the builder would refuse."""
    node = ir.Node(domain, op_type, inputs, attributes, num_outputs=outputs, name=name)
    for k, value in enumerate(node.outputs):
        value.name = f"{name}.{k}"
        if typed:
            value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([4, 3])
    model.graph.append(node)
    return node


def unknown_op(m):
    raw_node(m, "Rleu", [m.graph.inputs[0]])


def unknown_graphc_op(m):
    raw_node(m, "AllReduse", [m.graph.inputs[0]], domain="graphc")


def unknown_domain(m):
    raw_node(m, "FusedGemm", [m.graph.inputs[0]], domain="com.example")


def unknown_attribute(m):
    nodes(m)["Relu"].attributes["slope"] = ir.AttrFloat32("slope", 1.0)


def wrong_kind(m):
    nodes(m)["Gemm"].attributes["transA"] = ir.AttrFloat32("transA", 1.0)


def missing_attribute(m):
    raw_node(m, "Cast", [m.graph.inputs[0]])


def missing_graphc_attribute(m):
    raw_node(m, "AllReduce", [m.graph.inputs[0]], domain="graphc")


def too_many_inputs(m):
    x = m.graph.inputs[0]
    raw_node(m, "Relu", [x, x])


def input_left_out(m):
    raw_node(m, "Add", [m.graph.inputs[0], None])


def used_before(m):
    nodes(m)["MatMul"].replace_input_with(0, nodes(m)["Relu"].outputs[0])


def dangling(m):
    nodes(m)["Relu"].replace_input_with(
        0, ir.Value(name="ghost", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([4, 2]))
    )


def removed_producer(m):
    m.graph.remove(nodes(m)["MatMul"])


def same_value_name(m):
    nodes(m)["Relu"].outputs[0].name = "dw"


def same_node_name(m):
    nodes(m)["Relu"].name = "dw"


def no_node_name(m):
    nodes(m)["Relu"].name = ""


def initializer_is_input(m):
    m.graph.inputs.append(m.graph.initializers["w"])


def no_type(m):
    nodes(m)["Relu"].outputs[0].type = None


def refused_type(m):
    raw_node(m, "And", [m.graph.inputs[0], m.graph.inputs[0]])


def two_types_for_one_variable(m):
    other = add_initializer(m.graph, "d", np.ones((4, 3)))
    raw_node(m, "Add", [m.graph.inputs[0], other])


def wrong_shape(m):
    nodes(m)["Relu"].outputs[0].shape = ir.Shape([4, 5])


def wrong_element_type(m):
    nodes(m)["Relu"].outputs[0].type = ir.TensorType(ir.DataType.DOUBLE)


def operands_do_not_fit(m):
    raw_node(m, "MatMul", [m.graph.inputs[0], m.graph.inputs[0]])


def tag_twice(m):
    raw_node(m, "AllReduce", [m.graph.inputs[0]], domain="graphc", attributes=[ir.AttrString("tag", "dw")])


def no_wait(m):
    wait = nodes(m)["AllReduceWait"]
    wait.outputs[0].replace_all_uses_with(wait.inputs[0])
    m.graph.remove(wait, safe=True)


def no_start(m):
    start = nodes(m)["AllReduceStart"]
    start.outputs[0].replace_all_uses_with(start.inputs[0])
    m.graph.remove(start, safe=True)


def wait_of_another_group(m):
    nodes(m)["AllReduceWait"].attributes["group"] = ir.AttrString("group", "model")


def used_in_flight(m):
    raw_node(m, "Relu", [nodes(m)["AllReduceStart"].outputs[0]]).outputs[0].shape = ir.Shape([3, 2])


def updated_twice(m):
    sgd = nodes(m)["SGD"]
    raw_node(m, "SGD", list(sgd.inputs), domain="graphc").outputs[0].shape = ir.Shape([3, 2])


def updated_no_state(m):
    nodes(m)["SGD"].replace_input_with(0, nodes(m)["Gemm"].outputs[0])


def old_opset(m):
    m.graph.opset_imports[""] = 17


def output_from_nowhere(m):
    m.graph.outputs.append(ir.Value(name="nowhere", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([])))


def data_of_another_shape(m):
    m.graph.initializers["w"].shape = ir.Shape([2, 3])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (unknown_op, "no operator ai.onnx::Rleu in opset 26; did you mean 'Relu'?"),
        (unknown_graphc_op, "no graphc op 'AllReduse' is declared; did you mean 'AllReduce'?"),
        (unknown_domain, "no operator com.example::FusedGemm"),
        (unknown_attribute, "Relu has no attribute 'slope'"),
        (wrong_kind, "attribute 'transA' of Gemm is FLOAT, not INT"),
        (missing_attribute, "Cast needs the attribute 'to'"),
        (missing_graphc_attribute, "AllReduce needs the attribute 'tag'"),
        (too_many_inputs, "Relu takes 1 input, not 2"),
        (input_left_out, "Add needs its input 1, 'B'"),
        (used_before, "'r', is used before it is defined"),
        (dangling, "'ghost', is no graph input, initializer or node output"),
        (removed_producer, "'y', is no graph input, initializer or node output"),
        (same_value_name, "two values are called 'dw'"),
        (same_node_name, "two nodes are called 'dw'"),
        (no_node_name, "a node has no name"),
        (initializer_is_input, "initializer 'w' is also a graph input"),
        (no_type, "'r' has no type"),
        (refused_type, "And does not take tensor(float) for 'A'"),
        (two_types_for_one_variable, "Add needs one type for T, not tensor(float) and tensor(double)"),
        (wrong_shape, "r:float[4,5] should have shape [4,2]"),
        (wrong_element_type, "Relu needs one type for T, not tensor(float) and tensor(double)"),
        (operands_do_not_fit, "MatMul rejects its inputs"),
        (tag_twice, "two collectives have the tag 'dw'"),
        (no_wait, "tag 'dw' is started but never waited for"),
        (no_start, "tag 'dw' is waited for but never started"),
        (wait_of_another_group, "the start and the wait with tag 'dw' differ in their attributes"),
        (used_in_flight, "'start' is in flight and may only be used by 'wait'"),
        (updated_twice, "'w' is updated twice, first by 'next'"),
        (updated_no_state, "'dw' is updated but is not an initializer"),
        (old_opset, "the graph is in opset 17, not 26; run 'legalize' first"),
        (output_from_nowhere, "no node of the graph produces the graph output 'nowhere'"),
        (data_of_another_shape, "initializer w:float[2,3] does not have the type of its data"),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_a_broken_rule_is_named(fault, words):
    model = training()
    fault(model)
    with pytest.raises(ModelError) as caught:
        verify_model(model)
    assert words in str(caught.value)


def test_the_message_shows_the_node_its_neighbours_and_the_lines_around():
    model = training()
    wrong_shape(model)
    with pytest.raises(ModelError) as caught:
        verify_model(model)
    message = str(caught.value)
    assert "from  y: y:float[4,2] = MatMul(x:float[4,3], w:float[3,2])" in message
    assert "here  relu: r:float[4,5] = Relu(y:float[4,2])" in message
    assert "to    dw: dw:float[3,2] = Gemm(" in message
    assert ">    1 │ [relu] r = Relu (y)" in message
    assert '5 │ next = graphc.SGD (w, wait, "graphc.lr")' in message


def test_an_imported_model_need_not_be_legal_yet():
    model = training()
    old_opset(model)
    no_node_name(model)
    with pytest.raises(ModelError):
        verify_model(model)
    verify_model(model, legal=False)


def test_two_branches_may_use_one_name():
    model = from_text(
        HEAD
        + """g (bool c, float[2] x) => (float[2] y) {
       y = If <then_branch: graph = t () => (float[2] a) { a = Neg (x) },
               else_branch: graph = e () => (float[2] a) { [other] a = Exp (x) }> (c) }"""
    )
    verify_model(model)


def layers(count: int) -> ir.Model:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", 8]))
    graph = ir.Graph([x], [], nodes=[], name="g", opset_imports={"": OPSET})
    op, y = Builder(graph), x
    for k in range(count):
        w = add_initializer(graph, f"w{k}", np.ones((8, 8), np.float32))
        y = op.Relu(op.Add(op.Mul(op.MatMul(y, w), 0.5), x))
    graph.outputs.append(y)
    return ir.Model(graph, ir_version=IR_VERSION)


@pytest.mark.large
def test_the_effort_grows_in_proportion() -> None:
    """2,500 nodes take about 0.05 s."""
    assert growth(layers, verify_model, 313) < 8
