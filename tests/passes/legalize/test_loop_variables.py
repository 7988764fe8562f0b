"""Loops carry what changes and is read; everything else gives the numbers that it gave."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import graphc
from graphc.frontends import load
from graphc.pipeline import run as run_pipeline
from tests.frontends.zoo import run

FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
info, node = helper.make_tensor_value_info, helper.make_node

CARRIED = {
    "w": ("w_in", "w_in"),  # read and not changed
    "v": ("v_in", "v_out"),  # the same through Identity
    "s": ("s_in", "s_out"),
    "temporary": ("t_in", "t_out"),  # assigned, read by nobody
    "steps": ("n_in", "n_out"),  # read by itself alone
    "assigned": ("a_in", "a_out"),  # assigned, read after the loop; a single number before it
    "stop": ("stop_in", "stop_out"),  # decides about the end: a scalar at first, then one element of an If, then a scalar
}
"""Value before the loop → its names in the body."""


def paddle_loop(*, inner: bool = False) -> onnx.ModelProto:
    """s ← tanh(s·w + v), four times, with all variables of the program carried; ``inner``: in a Loop of one iteration."""

    def branch(name: str) -> onnx.GraphProto:
        return helper.make_graph([node("Identity", [name], [f"of_{name}"])], name, [], [info(f"of_{name}", BOOL, None)])

    body = helper.make_graph(
        [
            node("MatMul", ["s_in", "w_in"], ["product"]),
            node("Add", ["product", "v_in"], ["sum"]),
            node("Tanh", ["sum"], ["s_out"]),
            node("Identity", ["v_in"], ["v_out"]),
            node("Exp", ["s_out"], ["t_out"]),
            node("Add", ["n_in", "one"], ["n_out"]),
            node("Mul", ["s_out", "s_in"], ["a_out"]),
            node("Less", ["k", "three"], ["less"]),
            node("Unsqueeze", ["less", "axis"], ["row"]),
            node("If", ["less"], ["stop_out"], then_branch=branch("row"), else_branch=branch("less")),
            node("Or", ["less", "stop_in"], ["either"]),
            node("And", ["less", "either"], ["more"]),
        ],
        "body",
        [info("k", INT, []), info("go", BOOL, []), *(info(name, FLOAT, None) for name, _ in CARRIED.values())],
        [info("more", BOOL, []), *(info(name, FLOAT, None) for _, name in CARRIED.values())],
    )
    for values in (body.input[2:], body.output[1:]):
        values[4].type.tensor_type.elem_type = INT
        values[6].type.tensor_type.elem_type = BOOL
    results = [f"{name}_final" for name in CARRIED]
    nodes = [
        node("Loop", ["most", "yes", *CARRIED], results, "loop", body=body),
        node("Add", ["w_final", "s_final"], ["sum_w"]),
    ]
    outputs = [info("sum_w", FLOAT, [3, 3]), info("assigned_final", FLOAT, [3, 3])]
    if inner:
        within = [node("Identity", ["go2"], ["more2"]), *nodes, node("Identity", ["s2"], ["s2_out"])]
        for n in within:
            for k, name in enumerate(n.input):
                n.input[k] = {"w": "w2", "s": "s2"}.get(name, name)
        state = [info("k2", INT, []), info("go2", BOOL, []), info("w2", FLOAT, [3, 3]), info("s2", FLOAT, [3, 3])]
        graph = helper.make_graph(
            within,
            "outer",
            state,
            [info("more2", BOOL, []), info("w2", FLOAT, [3, 3]), info("s2_out", FLOAT, [3, 3]), *outputs],
        )
        collected = ["w_last", "s_last", "sums", "others"]
        nodes = [node("Loop", ["once", "yes", "w", "s"], collected, "outside", body=graph)]
        outputs = [info(name, FLOAT, [1, 3, 3]) for name in collected[2:]]
    rng = np.random.default_rng(0)
    constants: dict[str, Any] = {
        "w": rng.standard_normal((3, 3)).astype(np.float32),
        "v": rng.standard_normal(3).astype(np.float32),
        "temporary": np.float32(0),
        "steps": np.int64(0),
        "assigned": np.float32(0),
        "stop": np.bool_(False),
        "one": np.int64(1),
        "three": np.int64(3),
        "axis": np.array([0]),
        "most": np.int64(9),
        "once": np.int64(1),
        "yes": np.bool_(True),
    }
    initializers = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "loops", [info("s", FLOAT, [3, 3])], outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


S = np.random.default_rng(1).standard_normal((3, 3)).astype(np.float32)


@pytest.mark.parametrize("inner", [False, True])
def test_a_loop_carries_what_changes_and_is_read(inner: bool) -> None:
    file = paddle_loop(inner=inner)
    model = load(file)
    run_pipeline(model, "legalize")
    loop = next(n for n in model.graph.all_nodes() if n.op_type == "Loop" and n.name == "loop")
    assert len(loop.inputs) == 2 + 3  # s, assigned and stop
    session = onnxruntime.InferenceSession(file.SerializeToString())
    for have, want in zip(run(model, {"s": S}), session.run(None, {"s": S}), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-6)


def test_its_weights_train_as_in_pytorch() -> None:
    torch = pytest.importorskip("torch")
    file = paddle_loop()
    program = graphc.compile(
        file, loss=graphc.losses.MSE(prediction="assigned_final"), optimizer=graphc.optim.SGD(lr=1.0), train=["w", "v"]
    )
    label = np.ones((3, 3), dtype=np.float32)
    with graphc.Trainer(program) as trainer:
        before = {name: np.array(value) for name, value in trainer.trained_values().items()}
        loss = trainer.step({"s": S, "label": label})["loss"]
        after = trainer.trained_values()
    w, v = (torch.tensor(before[name], requires_grad=True) for name in ("w", "v"))
    s = torch.tensor(S)
    for _ in range(4):
        s, earlier = torch.tanh(s @ w + v), s
    want = torch.nn.functional.mse_loss(s * earlier, torch.tensor(label))
    want.backward()
    assert loss == pytest.approx(want.item(), rel=1e-5)
    for name, value in (("w", w), ("v", v)):
        np.testing.assert_allclose(before[name] - after[name], value.grad.numpy(), rtol=1e-4, atol=1e-6)


def keras_loop(integers: bool) -> onnx.ModelProto:
    """The hidden states of an RNN over x: batch × time × 3, as a while loop, its counter compared as an integer or a float."""

    def compared(name: str) -> list[onnx.NodeProto]:
        return [node("Identity", [name], [f"{name}_f"]) if integers else node("Cast", [name], [f"{name}_f"], to=FLOAT)]

    def counters(name: str) -> list[onnx.ValueInfoProto]:
        return [info(name, INT, []), info("n_in", INT, []), info("w_in", FLOAT, [3, 3])]

    body = helper.make_graph(
        [
            node("Add", ["t_in", "one"], ["t_out"]),
            node("Gather", ["steps", "t_in"], ["x_t"]),
            node("MatMul", ["h_in", "w_in"], ["product"]),
            node("Add", ["product", "x_t"], ["sum"]),
            node("Tanh", ["sum"], ["h_out"]),
            node("Identity", ["h_out"], ["collected"]),
            *compared("t_out"),
            *compared("n_in"),
            node("Less", ["t_out_f", "n_in_f"], ["more"]),
        ],
        "body",
        [info("k", INT, []), info("go", BOOL, []), *counters("t_in"), info("h_in", FLOAT, None)],
        [info("more", BOOL, []), *counters("t_out"), info("h_out", FLOAT, None), info("collected", FLOAT, None)],
    )
    nodes = [
        node("Transpose", ["x"], ["steps"], perm=[1, 0, 2]),
        node("Shape", ["steps"], ["shape"]),
        node("Gather", ["shape", "nought"], ["n"]),
        node("ReduceSum", ["x", "axis"], ["like"], keepdims=0),
        node("Mul", ["like", "zero"], ["h"]),
        *compared("n"),
        node("Less", ["nought" if integers else "zero", "n_f"], ["going"]),
        node("Loop", ["", "going", "nought", "n", "w", "h"], ["t_last", "n_last", "w_last", "h_last", "found"], body=body),
        node("Transpose", ["found"], ["y"], perm=[1, 0, 2]),
    ]
    constants: dict[str, Any] = {
        "w": np.random.default_rng(0).standard_normal((3, 3)).astype(np.float32),
        "one": np.int64(1),
        "nought": np.int64(0),
        "zero": np.float32(0),
        "axis": np.array([1]),
    }
    initializers = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    inputs, outputs = [info("x", FLOAT, ["batch", "time", 3])], [info("y", FLOAT, None)]
    graph = helper.make_graph(nodes, "rnn", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("steps", [1, 5])
def test_a_loop_that_counts_to_the_length_of_x_gives_results_of_that_length(steps: int, integers: bool) -> None:
    program = graphc.compile(keras_loop(integers), loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1))
    label = next(v for v in program.model.graph.inputs if v.name == "label")
    assert [str(d) for d in label.shape or ()] == ["batch", "time", "3"]
    x, w = S[None, :1].repeat(2, 0).repeat(steps, 1), np.random.default_rng(0).standard_normal((3, 3)).astype(np.float32)
    h, want = np.zeros((2, 3), dtype=np.float32), []
    for t in range(steps):
        h = np.tanh(h @ w + x[:, t])
        want.append(h)
    with graphc.Trainer(program) as trainer:
        assert trainer.step({"x": x, "label": np.stack(want, 1)})["loss"] == pytest.approx(0.0, abs=1e-12)
        with pytest.raises(graphc.errors.FeedError, match="label"):
            trainer.step({"x": x, "label": np.stack([*want, h], 1)})
