"""legalize: the legal model computes what the file computed, whatever opset and dialect the file was written in."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphc.errors import ModelError, UnsupportedOpError
from graphc.frontends.onnx import load, write_back
from graphc.ir import IR_VERSION, OPSET
from graphc.ir.facts import dims
from graphc.pipeline import run as run_pipeline
from tests.frontends.zoo import HUGE, LARGE, SMALL, legal, path_of, run, with_random_weights
from tests.passes.legalize.legalize_cases import F32, build, normal
from tests.tiers import params


def check_same(model: onnx.ModelProto, feeds: dict[str, np.ndarray], atol: float = 1e-5) -> ir.Model:
    """The legal model passes the ONNX checker and gives the file's outputs in onnxruntime; returns it."""
    original = load(model)
    legalised = legal(original)
    onnx.checker.check_model(ir.to_proto(legalised), full_check=True)
    assert legalised.opset_imports[""] == OPSET
    assert legalised.ir_version == IR_VERSION
    for want, have in zip(run(original, feeds), run(legalised, feeds), strict=True):
        assert have.dtype == want.dtype
        np.testing.assert_allclose(have, want, atol=atol, rtol=1e-5)
    return legalised


def constant_nodes(model: ir.Model) -> set[str]:
    return {n.outputs[0].name for n in model.graph if n.op_type == "Constant"}


# The zoo ---------------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("name", params((*SMALL, *LARGE), full=LARGE, large=(*HUGE, "densenet121", "inception_v2", "resnet50")))
def test_zoo_models_compute_the_same(name: str) -> None:
    original, legalised = with_random_weights(name)
    (x,) = legalised.graph.inputs
    feeds = {x.name: normal(*dims(x))}
    (want,), (have,) = run(original, feeds), run(legalised, feeds)
    assert np.ptp(want) > 0
    np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-6 * np.abs(want).max())


@pytest.mark.full
@pytest.mark.parametrize("name", params((*SMALL, *LARGE), large=HUGE))
def test_zoo_models_become_legal(name: str) -> None:
    model = legal(load(path_of(name)))
    onnx.checker.check_model(ir.to_proto(model)) if name in SMALL else None
    assert not any(v.is_initializer() for v in model.graph.inputs)
    assert "ConstantOfShape" not in {n.op_type for n in model.graph}
    assert all(v.type is not None and dims(v) is not None for n in model.graph for v in n.outputs)
    assert all(v.dtype == ir.DataType.FLOAT for v in model.graph.initializers.values())
    names = [n.name for n in model.graph]
    assert all(names)
    assert len(set(names)) == len(names)
    assert model.graph.outputs[0].name == load(path_of(name)).graph.outputs[0].name


# Opsets ----------------------------------------------------------------------------------------------------------------


def conv_net(opset: int) -> onnx.ModelProto:
    """Conv, BatchNormalization, pooling, Clip, Dropout, Pad, Softmax as the opset writes them."""
    clip: dict[str, Any] = {"min": 0.0, "max": 6.0} if opset < 11 else {}
    bounds = [] if opset < 11 else ["low", "high"]
    pad: dict[str, Any] = {"pads": [0, 0, 1, 1, 0, 0, 1, 1], "value": 0.5} if opset < 11 else {}
    pads = [] if opset < 11 else ["pads", "half"]
    ratio: dict[str, Any] = {"ratio": 0.3} if opset < 12 else {}
    axes: dict[str, Any] = {"axes": [2, 3]} if opset < 18 else {}
    nodes = [
        helper.make_node("Pad", ["x", *pads], ["padded"], **pad),
        helper.make_node("Conv", ["padded", "w", "b"], ["c"], auto_pad="SAME_UPPER", strides=[2, 2]),
        helper.make_node("BatchNormalization", ["c", "s", "t", "m", "v"], ["n"]),
        helper.make_node("Clip", ["n", *bounds], ["r"], **clip),
        helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], auto_pad="SAME_LOWER"),
        helper.make_node("ReduceMean", ["p", *([] if axes else ["axes"])], ["mean"], keepdims=0, **axes),
        helper.make_node("Dropout", ["mean", *([] if ratio else ["ratio"])], ["d"], **ratio),
        helper.make_node("Softmax", ["d"], ["y"], axis=1),
    ]
    weights = {
        "w": normal(4, 3, 3, 3),
        "b": normal(4, seed=1),
        "s": normal(4, seed=2),
        "t": normal(4, seed=3),
        "m": normal(4, seed=4),
        "v": np.abs(normal(4, seed=5)) + 0.1,
    }
    if opset >= 11:
        weights |= {"low": np.array(0, F32), "high": np.array(6, F32), "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1])}
        weights |= {"half": np.array(0.5, F32)}
    if opset >= 12:
        weights["ratio"] = np.array(0.3, F32)
    if opset >= 18:
        weights["axes"] = np.array([2, 3])
    return build(nodes, {"x": [2, 3, 9, 9]}, ["y"], weights, opset=opset)


@pytest.mark.parametrize("opset", [7, 9, 10, 11, 12, 13, 15, 17, 18, 20, 22, 24, 26])
def test_every_opset(opset: int) -> None:
    legalised = check_same(conv_net(opset), {"x": normal(2, 3, 9, 9, seed=9)})
    assert set(legalised.graph.initializers) == {"w", "b", "s", "t", "m", "v"}
    assert not any("auto_pad" in n.attributes for n in legalised.graph)


@pytest.mark.parametrize("opset", [27, 28])
def test_a_newer_opset_is_brought_down_when_nothing_new_is_used(opset: int) -> None:
    feeds = {"x": normal(2, 3, 9, 9, seed=9)}
    (want,) = run(load(conv_net(26)), feeds)
    (have,) = run(legal(load(conv_net(opset))), feeds)
    np.testing.assert_allclose(have, want, rtol=1e-5)


def test_an_op_newer_than_the_legal_opset_is_named() -> None:
    model = build([helper.make_node("SwiGLU", ["x"], ["y"], name="gate")], {"x": [2, 4]}, ["y"], opset=28)
    with pytest.raises(UnsupportedOpError, match=r"SwiGLU is newer than opset 26, .*: gate.*Mul takes 2 inputs, not 1"):
        legal(ir.from_proto(model))  # one input short, so that its function body does not apply; load would say that


def test_a_file_says_its_opset() -> None:
    model = build([helper.make_node("Relu", ["x"], ["y"])], {"x": [2]}, ["y"], opset=9)
    del model.opset_import[:]
    with pytest.raises(ModelError, match=r"imports no ai.onnx opset"):
        legal(load(model))


X = normal(2, 3, 4, 4, seed=7)
SINGLE: dict[str, tuple[int, list[onnx.NodeProto], dict[str, np.ndarray]]] = {
    "softmax over the last axes": (11, [helper.make_node("Softmax", ["x"], ["y"], axis=2)], {}),
    "log-softmax with trailing axes": (9, [helper.make_node("LogSoftmax", ["x"], ["y"])], {}),
    "softmax of the last axis": (12, [helper.make_node("Softmax", ["x"], ["y"], axis=3)], {}),
    "split by sizes": (
        11,
        [helper.make_node("Split", ["x"], ["a", "b"], axis=1, split=[1, 2]), helper.make_node("Mul", ["b", "a"], ["y"])],
        {},
    ),
    "split evenly": (
        13,
        [helper.make_node("Split", ["x"], ["a", "b"], axis=2), helper.make_node("Sub", ["a", "b"], ["y"])],
        {},
    ),
    "squeeze and unsqueeze": (
        11,
        [helper.make_node("Unsqueeze", ["x"], ["a"], axes=[0, 2]), helper.make_node("Squeeze", ["a"], ["y"], axes=[0])],
        {},
    ),
    "slice": (9, [helper.make_node("Slice", ["x"], ["y"], starts=[1, 0], ends=[3, -1], axes=[1, 3])], {}),
    "top k": (9, [helper.make_node("TopK", ["x"], ["y", "i"], k=2, axis=2)], {}),
    "reduce sum": (11, [helper.make_node("ReduceSum", ["x"], ["y"], axes=[1, -1], keepdims=0)], {}),
    "reduce max": (13, [helper.make_node("ReduceMax", ["x"], ["y"], axes=[1], keepdims=1)], {}),
    "reduce l2 of everything": (13, [helper.make_node("ReduceL2", ["x"], ["y"], keepdims=0)], {}),
    "upsample 7": (7, [helper.make_node("Upsample", ["x"], ["y"], scales=[1.0, 1.0, 2.0, 3.0], mode="nearest")], {}),
    "upsample 9": (
        9,
        [helper.make_node("Upsample", ["x", "scales"], ["y"], mode="linear")],
        {"scales": np.array([1, 1, 2, 2], F32)},
    ),
    "resize 10": (10, [helper.make_node("Resize", ["x", "scales"], ["y"])], {"scales": np.array([1, 1, 2, 1.5], F32)}),
    "resize to a size": (
        11,
        [helper.make_node("Resize", ["x", "none", "none", "sizes"], ["y"])],
        {"none": np.zeros(0, F32), "sizes": np.array([2, 3, 9, 4])},
    ),
    "sum of one": (8, [helper.make_node("Sum", ["x"], ["y"])], {}),
    "conv transpose, same": (
        11,
        [helper.make_node("ConvTranspose", ["x", "w"], ["y"], auto_pad="SAME_UPPER", strides=[2, 2])],
        {"w": normal(3, 2, 3, 3)},
    ),
    "conv transpose, same lower": (
        11,
        [helper.make_node("ConvTranspose", ["x", "w"], ["y"], auto_pad="SAME_LOWER", strides=[2, 2])],
        {"w": normal(3, 2, 3, 3)},
    ),
    "conv transpose to a size": (
        11,
        [helper.make_node("ConvTranspose", ["x", "w"], ["y"], output_shape=[8, 8], strides=[2, 2])],
        {"w": normal(3, 2, 3, 3)},
    ),
    "conv, valid": (11, [helper.make_node("Conv", ["x", "w"], ["y"], auto_pad="VALID")], {"w": normal(2, 3, 3, 3)}),
    "conv, no padding by name": (11, [helper.make_node("Conv", ["x", "w"], ["y"], auto_pad="")], {"w": normal(2, 3, 3, 3)}),
    "average pool, same": (
        10,
        [helper.make_node("AveragePool", ["x"], ["y"], auto_pad="SAME_UPPER", kernel_shape=[3, 3], strides=[2, 2])],
        {},
    ),
    "average pool, a window beyond the map": (
        13,
        [helper.make_node("AveragePool", ["x"], ["y"], ceil_mode=1, kernel_shape=[640, 640], strides=[640, 640])],
        {},
    ),
    "average pool, a window beyond the padding": (
        13,
        [
            helper.make_node(
                "AveragePool",
                ["x"],
                ["y"],
                ceil_mode=1,
                kernel_shape=[99, 3],
                strides=[99, 2],
                pads=[1, 1, 2, 1],
                count_include_pad=1,
            )
        ],
        {},
    ),
    "max pool, a window beyond the map": (
        13,
        [helper.make_node("MaxPool", ["x"], ["y"], ceil_mode=1, kernel_shape=[99, 2], strides=[99, 2])],
        {},
    ),
    "group norm per group": (
        18,
        [helper.make_node("GroupNormalization", ["x", "s", "t"], ["y"], num_groups=3)],
        {"s": normal(3), "t": normal(3, seed=1)},
    ),
    "grid sample": (
        16,
        [helper.make_node("GridSample", ["x", "grid"], ["y"], mode="bilinear")],
        {"grid": np.tanh(normal(2, 5, 5, 2))},
    ),
    "unused mask": (10, [helper.make_node("Dropout", ["x"], ["y", "mask"])], {}),
    "ai.onnx is the standard domain": (13, [helper.make_node("Relu", ["x"], ["y"], domain="ai.onnx")], {}),
    "scatter": (
        9,
        [helper.make_node("Scatter", ["x", "i", "u"], ["y"], axis=1)],
        {"i": np.array([[[[1]]], [[[2]]]]), "u": normal(2, 1, 1, 1)},
    ),
}


@pytest.mark.parametrize("case", SINGLE)
def test_old_forms(case: str) -> None:
    opset, nodes, weights = SINGLE[case]
    check_same(build(nodes, {"x": X.shape}, ["y"], weights, opset=opset), {"x": X})


def test_old_softmax_of_a_batch_of_any_size() -> None:
    """Rows of the matrix view are softmaxed also where sizes are not known."""
    model = build([helper.make_node("Softmax", ["x"], ["y"], axis=1)], {"x": ["n", 3, "h", 4]}, ["y"], opset=11)
    legalised = check_same(model, {"x": X})
    assert dims(legalised.graph.outputs[0]) == ("n", 3, "h", 4)


CONTRIBUTED: dict[str, tuple[list[onnx.NodeProto], dict[str, np.ndarray]]] = {
    op: ([helper.make_node(op, ["x", *extra], ["y"], domain="com.microsoft", **attributes)], weights)
    for op, extra, weights, attributes in [
        ("Gelu", [], {}, {}),
        ("FastGelu", [], {}, {}),
        ("BiasGelu", ["b"], {"b": normal(4)}, {}),
        ("QuickGelu", [], {}, {"alpha": 1.5}),
        ("FusedMatMul", ["w"], {"w": normal(5, 4)}, {"alpha": 0.5, "transB": 1}),
        (
            "SkipLayerNormalization",
            ["skip", "g", "t", "b"],
            {"skip": normal(2, 3, 4), "g": normal(4, seed=1), "t": normal(4, seed=2), "b": normal(4, seed=3)},
            {"epsilon": 1e-5},
        ),
        ("SkipSimplifiedLayerNormalization", ["skip", "g"], {"skip": normal(2, 3, 4), "g": normal(4)}, {"epsilon": 1e-5}),
    ]
}


@pytest.mark.parametrize("op", CONTRIBUTED)
def test_ops_of_onnxruntime_become_standard(op: str) -> None:
    nodes, weights = CONTRIBUTED[op]
    model = build(nodes, {"x": [2, 3, 4]}, ["y"], weights, opset=17, domains={"com.microsoft": 1})
    legalised = check_same(model, {"x": normal(2, 3, 4, seed=5)})
    assert set(legalised.opset_imports) == {""}


def test_an_unknown_op_is_named() -> None:
    model = build(
        [helper.make_node("Frob", ["x"], ["y"], name="f", domain="acme")], {"x": [2]}, ["y"], opset=17, domains={"acme": 1}
    )
    with pytest.raises(UnsupportedOpError, match=r"unknown operator acme::Frob: f"):
        legal(load(model))


# Parameters ------------------------------------------------------------------------------------------------------------


def constant(name: str, array: np.ndarray) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array))


def test_weights_behind_nodes_are_parameters_under_the_names_of_their_use() -> None:
    nodes = [
        helper.make_node("ConstantOfShape", ["w1_shape"], ["w1"], value=numpy_helper.from_array(np.array([0.02], F32))),
        constant("w2_half", normal(4, 4).astype(np.float16)),
        helper.make_node("Cast", ["w2_half"], ["w2"], to=TensorProto.FLOAT),
        constant("raw", normal(4, seed=1)),
        helper.make_node("Identity", ["raw"], ["b2"]),
        constant("scale", np.array([2.0, 2.0, 2.0, 2.0], F32)),
        helper.make_node("MatMul", ["x", "w1"], ["h"]),
        helper.make_node("Mul", ["h", "scale"], ["scaled"]),
        helper.make_node("MatMul", ["scaled", "w2"], ["g"]),
        helper.make_node("Add", ["g", "b2"], ["y"]),
    ]
    model = build(nodes, {"x": [2, 3]}, ["y"], {"w1_shape": np.array([3, 4])}, opset=13)
    legalised = check_same(model, {"x": normal(2, 3)})
    assert set(legalised.graph.initializers) == {"w1", "w2", "b2"}
    assert constant_nodes(legalised) == {"scale"}
    # … and training gives them back to the user's own file
    values = {name: normal(*v.const_value.shape.numpy(), seed=3) for name, v in legalised.graph.initializers.items()}
    trained = write_back(load(model), values)
    assert {n.op_type for n in trained.graph} == {"Constant", "Mul", "MatMul", "Add"}
    assert trained.opset_imports[""] == 13
    (have,) = run(trained, {"x": np.ones((2, 3), F32)})
    want = (np.ones((2, 3), F32) @ values["w1"] * 2) @ values["w2"] + values["b2"]
    np.testing.assert_allclose(have, want, rtol=1e-4)


def test_initial_states_and_masks_are_no_parameters() -> None:
    nodes = [
        helper.make_node("ConstantOfShape", ["state_shape"], ["h0"]),
        helper.make_node("GRU", ["x", "w", "r", "", "", "h0"], ["", "last"], hidden_size=3),
        helper.make_node("Squeeze", ["last", "zero"], ["y"]),
    ]
    weights = {
        "state_shape": np.array([1, 2, 3]),
        "w": normal(1, 9, 4),
        "r": normal(1, 9, 3, seed=1),
        "zero": np.array([0]),
    }
    legalised = check_same(build(nodes, {"x": [5, 2, 4]}, ["y"], weights, opset=17), {"x": normal(5, 2, 4)})
    assert set(legalised.graph.initializers) == {"w", "r"}


def test_copies_made_by_the_torchscript_exporter_are_parameters_of_their_own() -> None:
    nodes = [
        helper.make_node("Identity", ["fc1.weight"], ["fc2.weight"]),
        helper.make_node("MatMul", ["x", "fc1.weight"], ["h"]),
        helper.make_node("MatMul", ["h", "fc2.weight"], ["y"]),
    ]
    model = build(nodes, {"x": [2, 4]}, ["y"], {"fc1.weight": normal(4, 4)}, opset=17)
    assert set(check_same(model, {"x": normal(2, 4)}).graph.initializers) == {"fc1.weight"}
    model.producer_name = "pytorch"
    assert set(check_same(model, {"x": normal(2, 4)}).graph.initializers) == {"fc1.weight", "fc2.weight"}


def test_initializers_that_are_inputs_and_small_integers() -> None:
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["r"]), helper.make_node("MatMul", ["r", "w"], ["y"])]
    model = build(nodes, {"x": [2, 2, 2], "w": [4, 3]}, ["y"], {"shape": np.array([2, 4]), "w": normal(4, 3)}, opset=9)
    model.graph.input.append(helper.make_tensor_value_info("shape", TensorProto.INT64, [2]))
    legalised = check_same(model, {"x": normal(2, 2, 2)})
    assert [v.name for v in legalised.graph.inputs] == ["x"]
    assert set(legalised.graph.initializers) == {"w"}
    assert constant_nodes(legalised) == {"shape"}


# Structure -------------------------------------------------------------------------------------------------------------


def test_functions_are_inlined() -> None:
    function = helper.make_function(
        "local",
        "Dense",
        ["x", "w", "b"],
        ["y"],
        [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "b"], ["y"])],
        [helper.make_opsetid("", 17)],
    )
    nodes = [
        helper.make_node("Dense", ["x", "w1", "b1"], ["h"], domain="local"),
        helper.make_node("Dense", ["h", "w2", "b1"], ["y"], domain="local"),
    ]
    weights = {"w1": normal(3, 4), "w2": normal(4, 4, seed=1), "b1": normal(4, seed=2)}
    model = build(nodes, {"x": [2, 3]}, ["y"], weights, opset=17, functions=[function], domains={"local": 1})
    legalised = check_same(model, {"x": normal(2, 3)})
    assert not legalised.functions
    assert set(legalised.graph.initializers) == set(weights)


def test_missing_and_duplicate_node_names_become_unique() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"], name="same"),
        helper.make_node("Relu", ["b"], ["c"], name="same"),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    model = build(nodes, {"x": [2]}, ["y"], opset=13)
    names = [n.name for n in legal(load(model)).graph]
    assert names == ["a", "same", "same.1", "y"]
    assert names == [n.name for n in legal(load(model)).graph]


def test_dead_nodes_and_unused_initializers_go() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Mul", ["x", "w"], ["unused"])]
    legalised = legal(load(build(nodes, {"x": [2]}, ["y"], {"w": normal(2)}, opset=13)))
    assert [n.op_type for n in legalised.graph] == ["Relu"]
    assert not legalised.graph.initializers


def test_nodes_in_the_wrong_order_are_sorted() -> None:
    nodes = [helper.make_node("Relu", ["a"], ["y"]), helper.make_node("Neg", ["x"], ["a"])]
    legalised = legal(load(build(nodes, {"x": [2]}, ["y"], opset=13)))
    assert [n.op_type for n in legalised.graph] == ["Neg", "Relu"]


def test_a_cycle_is_shown() -> None:
    nodes = [helper.make_node("Add", ["x", "b"], ["a"], name="first"), helper.make_node("Relu", ["a"], ["b"], name="second")]
    with pytest.raises(ModelError, match=r"cycle: .*first.*second|cycle: .*second.*first"):
        legal(load(build(nodes, {"x": [2]}, ["b"], opset=13)))


def test_a_value_without_source_is_named() -> None:
    model = build([helper.make_node("Add", ["x", "nowhere"], ["y"], name="sum")], {"x": [2]}, ["y"], opset=13)
    with pytest.raises(ModelError, match=r"'sum' reads 'nowhere', which nothing produces"):
        legal(load(model))


def test_ill_typed_nodes_are_shown_with_their_neighbours() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"], name="r"), helper.make_node("MatMul", ["a", "w"], ["y"], name="m")]
    with pytest.raises(ModelError, match=r"MatMul rejects its inputs(.|\n)*here  m:"):
        legal(load(build(nodes, {"x": [2, 3]}, ["y"], {"w": normal(4, 5)}, opset=13)))


def test_shape_arithmetic_on_a_batch_of_any_size_is_followed() -> None:
    """What exporters write for ``x.view(x.shape[0] * 2, -1)`` keeps its sizes, as products of the batch."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Mul", ["n", "two"], ["n2"]),
        helper.make_node("Unsqueeze", ["n2", "axis"], ["n2u"]),
        helper.make_node("Concat", ["n2u", "minus"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    weights = {"zero": np.array(0), "two": np.array(2), "axis": np.array([0]), "minus": np.array([-1])}
    legalised = check_same(build(nodes, {"x": ["batch", 6]}, ["y"], weights, opset=17), {"x": normal(3, 6)})
    assert dims(legalised.graph.outputs[0]) == ("2*batch", 3)


def test_branches_of_an_if_are_converted_too() -> None:
    def branch(axes: list[int]) -> onnx.GraphProto:
        node = helper.make_node("ReduceSum", ["x"], ["r"], axes=axes, keepdims=1)
        return helper.make_graph([node], "branch", [], [helper.make_tensor_value_info("r", TensorProto.FLOAT, None)])

    node = helper.make_node("If", ["flag"], ["y"], then_branch=branch([0]), else_branch=branch([1]))
    model = build([node], {"x": [2, 3], "flag": []}, ["y"], opset=11, types={"flag": TensorProto.BOOL})
    for flag in (True, False):
        check_same(model, {"x": normal(2, 3), "flag": np.array(flag)})


def test_a_saved_training_graph_stays_as_it_is() -> None:
    """State, collectives and updates survive when a stage is saved, loaded and legalised again."""
    model = load(conv_net(17))
    run_pipeline(model, "legalize,train_mode,loss,autodiff,optimizer{name=adam},allreduce,bucket,schedule,simplify")
    again = legal(load(ir.to_proto(model)))
    assert Counter(n.op_type for n in again.graph) == Counter(n.op_type for n in model.graph)
    assert set(again.graph.initializers) == set(model.graph.initializers)


# Logarithms -------------------------------------------------------------------------------------------------------------

LOGARITHMS = {
    "log_sigmoid": ("p = Sigmoid (x) y = Log (p)", lambda x: -np.logaddexp(0, -x)),
    "log_one_minus_sigmoid": (
        "one = Constant <value_floats = [1.0]> () p = Sigmoid (x) q = Sub (one, p) y = Log (q)",
        lambda x: -np.logaddexp(0, x),
    ),
    "log_softmax": (
        "p = Softmax <axis = 1> (x) y = Log (p)",
        lambda x: x - np.logaddexp.reduce(x, axis=1, keepdims=True),
    ),
    "softplus": (
        "one = Constant <value_float = 1.0> () e = Exp (x) s = Add (one, e) y = Log (s)",
        lambda x: np.logaddexp(0, x),
    ),
    "logaddexp": (
        "two = Constant <value_float = 2.0> () t = Mul (x, two) e = Exp (x) f = Exp (t) s = Add (e, f) y = Log (s)",
        lambda x: np.logaddexp(x, 2 * x),
    ),
}


@pytest.mark.parametrize("name", LOGARITHMS)
def test_logarithms_of_small_and_of_large_numbers_are_finite(name: str) -> None:
    body, exact = LOGARITHMS[name]
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18]> agraph (float[N, 6] x) => (float[N, 6] y) {{ {body} }}'
    )
    x = np.array([[-300, -90, -17, 17, 90, 300], [-1, -1e-3, 0, 1e-3, 1, 0.5]], np.float32)
    (have,) = run(legal(load(model)), {"x": x})
    np.testing.assert_allclose(have, exact(x.astype(np.float64)), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("lead", [("N",), (3, "N"), (5,)], ids=str)
def test_a_matrix_times_a_batch_of_columns_is_one_product(lead: tuple[int | str, ...]) -> None:
    """Else the gradient of the matrix is an outer product for each column, and their sum."""
    model = build([helper.make_node("MatMul", ["w", "x"], ["y"])], {"x": (*lead, 6, 1)}, ["y"], {"w": normal(4, 6)}, opset=13)
    x = normal(*(d if isinstance(d, int) else 7 for d in lead), 6, 1, seed=1)
    legalised = legal(load(model))
    np.testing.assert_allclose(run(legalised, {"x": x})[0], normal(4, 6) @ x, rtol=1e-5, atol=1e-6)
    (product,) = (node for node in legalised.graph if node.op_type == "MatMul")
    assert [dims(v) for v in product.inputs if v is not None] == [(*lead, 6), (6, 4)]


@pytest.mark.parametrize("lead", ["N", 5], ids=str)
@pytest.mark.parametrize(
    ("equation", "size"), [("bi,bi->bi", (1, 3)), ("bi,bi", (1, 3)), ("bki,bi->bk", (1, 2, 3)), ("...ki,...i->...k", (1, 2, 3))]
)
def test_an_einsum_repeats_an_axis_of_one_element_along_others(equation: str, size: tuple[int, ...], lead: int | str) -> None:
    """As NumPy, PyTorch and onnxruntime do; ONNX's inference takes the result's axis for one of one element."""
    w, x = normal(*size), normal(5, 3, seed=1)
    model = build(
        [helper.make_node("Einsum", ["w", "x"], ["y"], equation=equation)], {"x": (lead, 3)}, ["y"], {"w": w}, opset=13
    )
    legalised = legal(load(model))
    (have,) = run(legalised, {"x": x})
    repeated = np.broadcast_to(w, (5, *size[1:]))
    np.testing.assert_allclose(have, np.einsum(equation, repeated, x), rtol=1e-5, atol=1e-6)
    assert (dims(legalised.graph.outputs[0]) or ())[:1] == (lead,)[: have.ndim]
