"""Files that break the specification are refused by name before anything else reads them."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from graphc import frontends
from graphc.errors import InternalError, ModelError
from graphc.pipeline import PASSES, PassCall, graph_pass
from graphc.pipeline import run as run_passes
from tests.frontends.zoo import legal
from tests.passes.legalize.legalize_cases import build, normal

Damage = Callable[[onnx.ModelProto], None]


def convolution() -> onnx.ModelProto:
    """A convolution and a loop whose body adds ``x``."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Add", ["s", "s"], ["t"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("t", TensorProto.FLOAT, None),
        ],
    )
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", strides=[1, 1], group=1),
        helper.make_node("Loop", ["trips", "", "c"], ["y"], name="loop", body=body),
    ]
    weights = {"w": normal(2, 3, 1, 1), "trips": np.array(2, np.int64)}
    return build(nodes, {"x": ("n", 3, 4, 4)}, {"y": ("n", 2, 4, 4)}, weights, opset=17)


def attribute(model: onnx.ModelProto, node: int, name: str) -> onnx.AttributeProto:
    return next(a for a in model.graph.node[node].attribute if a.name == name)


def strides_are_zero(model: onnx.ModelProto) -> None:
    attribute(model, 0, "strides").ints[0] = 0


def group_is_a_text(model: onnx.ModelProto) -> None:
    attribute(model, 0, "group").CopyFrom(helper.make_attribute("group", "1"))


def unknown_attribute(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute.append(helper.make_attribute("stride", [1, 1]))


def input_left_out(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[1] = ""


def too_many_inputs(model: onnx.ModelProto) -> None:
    model.graph.node[0].input.extend(["w", "w"])


def no_body(model: onnx.ModelProto) -> None:
    del model.graph.node[1].attribute[:]


def body_lacks_an_input(model: onnx.ModelProto) -> None:
    del attribute(model, 1, "body").g.input[2]


def body_attribute_is_bad(model: onnx.ModelProto) -> None:
    attribute(model, 1, "body").g.node[1].attribute.append(helper.make_attribute("axis", 1))


def defined_twice(model: onnx.ModelProto) -> None:
    model.graph.node[1].output[0] = "c"


def auto_pad_is_unknown(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute.append(helper.make_attribute("auto_pad", "SOME"))


def no_file_name(model: onnx.ModelProto) -> None:
    tensor = model.graph.initializer[0]
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("raw_data")
    tensor.external_data.add(key="location", value="a\0b")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (strides_are_zero, r"'strides' is \[0, 1\]; it must be positive numbers: conv"),
        (group_is_a_text, r"the attribute 'group' of Conv is STRING, not INT: conv"),
        (unknown_attribute, r"Conv has no attribute 'stride'; did you mean 'strides'\?: conv"),
        (input_left_out, r"Conv needs its input 1, 'W': conv"),
        (too_many_inputs, r"Conv takes 2 to 3 inputs, not 4: conv"),
        (no_body, r"Loop needs the attribute 'body': loop"),
        (body_lacks_an_input, r"the body 'body' of Loop needs 3 inputs, it has 2: loop"),
        (body_attribute_is_bad, r"Add has no attribute 'axis'"),
        (defined_twice, r"'c' is redeclared"),
        (auto_pad_is_unknown, r"'auto_pad' is 'SOME'; it may be NOTSET, SAME_LOWER, SAME_UPPER, VALID: conv"),
        (no_file_name, r"external data .* is no file name"),
    ],
)
def test_the_fault_is_named(damage: Damage, message: str, tmp_path) -> None:
    model = convolution()
    damage(model)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=re.compile(message, re.DOTALL)):
        frontends.load(path)


def test_the_valid_file_is_read() -> None:
    assert len(frontends.load(convolution()).graph) == 2


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            helper.make_node("Split", ["x"], ["y", "b", "c"], num_outputs=2),
            "'num_outputs' is 2; it must be the number",
        ),
        (helper.make_node("GatherND", ["x", "i"], ["y"], batch_dims=-3), "'batch_dims' is -3; it must be at least 0"),
        (helper.make_node("Transpose", ["x"], ["y"], perm=[0, 0]), r"'perm' is \[0, 0\]; it must be a permutation"),
        (helper.make_node("Cast", ["x"], ["y"], to=99), "'to' is 99; it must be the number of an element type"),
        (
            helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[2]),
            r"'kernel_shape' is \[2\]; 0 spatial axes need one number each",
        ),
        (helper.make_node("Celu", ["x"], ["y"], alpha=0.0), "'alpha' is 0.0; it must be a finite number other than 0"),
    ],
)
def test_values_that_kill_other_readers_are_refused(node: onnx.NodeProto, message: str) -> None:
    """ONNX's inference in C++ ends the process on the first two."""
    model = build([node], {"x": (6, 4)}, ["y"], {"i": np.zeros((2, 1), np.int64)}, opset=20)
    with pytest.raises(ModelError, match=message):
        frontends.load(model)


@pytest.mark.parametrize(("size", "pad"), [(8, 8), (1, 1), (4, 9)])
def test_more_elements_to_reflect_than_there_are_are_refused(size: int, pad: int) -> None:
    """onnxruntime stops at the first run; so 'check' says it, and tries longer inputs where sizes are free."""
    node = helper.make_node("Pad", ["x", "pads"], ["y"], mode="reflect")
    model = build([node], {"x": (2, size)}, ["y"], {"pads": np.array([0, 0, 0, pad])}, opset=20)
    with pytest.raises(ModelError, match=rf"Pad reflects {pad} elements of x:float\[2,{size}\], which has {size} along axis 1"):
        legal(frontends.load(model))


def test_a_recurrent_layer_whose_state_has_another_size_is_refused() -> None:
    """PyTorch's newer exporter writes an LSTM with projections like this, and onnxruntime stops at the first run."""
    node = helper.make_node("LSTM", ["x", "w", "r", "", "", "", "c"], ["y"], hidden_size=3)
    held = {"w": normal(1, 12, 4), "r": normal(1, 12, 3), "c": normal(1, 2, 5)}
    message = r"LSTM with hidden_size=3 gets c:float\[1,2,5\] as initial_c, whose axis 2 must have 3 elements"
    with pytest.raises(ModelError, match=message):
        legal(frontends.load(build([node], {"x": (6, 2, 4)}, ["y"], held, opset=20)))


def test_an_op_newer_than_the_files_opset_is_read_by_its_first_schema() -> None:
    """Exporters write LayerNormalization into files of opset 11."""
    node = helper.make_node("LayerNormalization", ["x", "s"], ["y"])
    frontends.load(build([node], {"x": (2, 4)}, ["y"], {"s": normal(4)}, opset=11))


def test_an_exception_inside_a_pass_names_the_pass_the_node_and_whose_it_is() -> None:
    with PASSES.restored():

        @graph_pass("clumsy")
        def clumsy(model, ctx) -> bool:
            node = next(iter(model.graph))
            return bool({}[node.op_type])

        model = frontends.load(convolution())
        with pytest.raises(
            InternalError, match=r"clumsy: unexpected KeyError at conv: .*the pass belongs to tests\."
        ) as caught:
            run_passes(model, [PassCall("clumsy")])
        assert isinstance(caught.value.__cause__, KeyError)
