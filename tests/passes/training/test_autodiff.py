"""autodiff as a whole: accumulation, pruning, errors, higher orders, symbolic shapes, determinism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from graphc.errors import UnsupportedOpError, UsageError
from graphc.gradient import GRADIENTS
from graphc.ir.builder import Builder
from graphc.ir.names import GRADIENT_OF
from graphc.ir.state import add_initializer
from graphc.ir.text import to_text
from graphc.passes.gradients.reverse_mode import differentiate
from graphc.passes.training.autodiff import autodiff
from graphc.pipeline import Context
from tests.frontends.zoo import HUGE, LARGE, SMALL, path_of
from tests.gradient_check import Array, gradients, new_model, normal, on_onnxruntime, reference
from tests.tiers import params


def arrays(**shapes: tuple[int, ...]) -> dict[str, Array]:
    return {name: normal(*shape, seed=k).value for k, (name, shape) in enumerate(shapes.items())}


def tensors(feeds: dict[str, Array]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(array, requires_grad=True) for name, array in feeds.items()}


def run_pass(model: ir.Model, feeds: dict[str, Array], **options: Any) -> dict[str, Array]:
    """Run the pass; returns the value of every gradient by the name of what it is the gradient of."""
    autodiff(model, Context(), **options)
    made = [v for node in model.graph for v in node.outputs if GRADIENT_OF in v.metadata_props]
    model.graph.outputs[:] = made
    results = reference(model)(feeds)
    return {v.metadata_props[GRADIENT_OF]: results[v.name or ""] for v in made}


def two_layers(*, symbolic: int = 0) -> tuple[ir.Model, dict[str, Array]]:
    """loss = Σ tanh(x·w1 + b1)·w2, with w1, b1, w2 as initializers."""
    feeds = arrays(x=(4, 3))
    model, (x,) = new_model(feeds, symbolic=symbolic)
    w1, b1, w2 = (add_initializer(model.graph, n, a) for n, a in arrays(w1=(3, 5), b1=(5,), w2=(5, 2)).items())
    op = Builder(model.graph)
    hidden = op.Tanh(op.Gemm(x, w1, b1, _name="layer1"), _name="bend")
    op.emit("ReduceSum", [op.Gemm(hidden, w2, _name="layer2")], {"keepdims": 0}, outputs=["loss"])
    return model, feeds


def test_a_shared_weight_gets_the_sum_of_its_uses() -> None:
    feeds = arrays(x=(4, 3), w=(3, 3))
    model, (x, w) = new_model(feeds)
    op = Builder(model.graph)
    y = op.MatMul(op.Tanh(op.MatMul(x, w)), w)
    t = tensors(feeds)
    ((t["x"] @ t["w"]).tanh() @ t["w"]).sum().backward()
    (found,) = gradients(model, feeds, [y], [w])
    np.testing.assert_allclose(found, t["w"].grad.numpy(), rtol=1e-12)  # type: ignore[union-attr]


def test_a_value_used_twice_by_one_node_counts_twice() -> None:
    feeds = arrays(x=(4,))
    model, (x,) = new_model(feeds)
    (found,) = gradients(model, feeds, [Builder(model.graph).Mul(x, x)], [x])
    np.testing.assert_allclose(found, 2 * feeds["x"])


def test_several_losses_add_up() -> None:
    feeds = arrays(x=(3,))
    model, (x,) = new_model(feeds)
    op = Builder(model.graph)
    first = op.Exp(x)
    second = op.Sin(first)  # which also depends on the first
    (found,) = gradients(model, feeds, [first, second], [x])
    exp = np.exp(feeds["x"])
    np.testing.assert_allclose(found, exp + np.cos(exp) * exp, rtol=1e-12)


def test_parameters_train_by_default_and_gradients_are_named_after_them() -> None:
    model, feeds = two_layers()
    found = run_pass(model, feeds, of=["loss"])
    assert set(found) == {"w1", "b1", "w2"}
    assert {"w1::grad", "b1::grad", "w2::grad"} == {v.name for v in model.graph.outputs}
    w = {n: torch.tensor(v.const_value.numpy(), requires_grad=True) for n, v in model.graph.initializers.items()}  # type: ignore[union-attr]
    ((torch.tensor(feeds["x"]) @ w["w1"] + w["b1"]).tanh() @ w["w2"]).sum().backward()
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, w[name].grad.numpy(), rtol=1e-12)  # type: ignore[union-attr]


def test_inputs_and_intermediates_have_gradients_and_what_is_off_the_path_gets_zeros() -> None:
    model, feeds = two_layers()
    add_initializer(model.graph, "unused", np.ones((2, 2)))
    found = run_pass(model, feeds, of=["loss"], wrt=["x", "bend", "unused"])
    assert found["x"].shape == (4, 3)
    w2 = model.graph.initializers["w2"].const_value.numpy()  # type: ignore[union-attr]
    np.testing.assert_allclose(found["bend"], np.tile(w2.sum(axis=1), (4, 1)))
    np.testing.assert_array_equal(found["unused"], np.zeros((2, 2)))


def test_nothing_is_computed_for_frozen_layers() -> None:
    model, feeds = two_layers()
    found = run_pass(model, feeds, of=["loss"], freeze=["w1", "b1"])
    assert set(found) == {"w2"}
    backward = [n.name or "" for n in list(model.graph) if (n.name or "").startswith("grad/")]
    assert not any("layer1" in name or "bend" in name for name in backward)
    assert sum("layer2" in name for name in backward) == 1, backward  # the weight gradient, not that of the input


def test_integer_values_are_refused() -> None:
    model, _ = new_model({"x": np.arange(3), "y": np.ones(3)})
    with pytest.raises(UsageError, match=r"'x'.*INT64"):
        autodiff(model, Context(), of=["y"], wrt=["x"])


def with_det() -> ir.Model:
    """loss = Σ w·det(reshape(v)), a chain from v over the_det to the loss."""
    model, _ = new_model({"x": np.ones(3)})
    v, w = add_initializer(model.graph, "v", np.ones(4)), add_initializer(model.graph, "w", np.ones(3))
    op = Builder(model.graph)
    square = op.emit("Reshape", [v, [2, 2]], outputs=["square"], name="shape_it")[0]
    det = op.emit("Det", [square], outputs=["det"], name="the_det")[0]
    op.emit("ReduceSum", [op.Mul(w, det)], {"keepdims": 0}, outputs=["loss"])
    return model


@pytest.mark.usefixtures("det_without_gradient")
def test_a_missing_rule_is_named_with_its_node_and_path() -> None:
    with pytest.raises(UnsupportedOpError) as caught:
        autodiff(with_det(), Context(), of=["loss"])
    text = str(caught.value)
    assert caught.value.exit_code == 3
    assert "no gradient for Det" in text
    assert "the_det" in text
    assert "v → shape_it → the_det" in text
    assert "--freeze" in text


@pytest.mark.usefixtures("det_without_gradient")
def test_a_missing_rule_off_the_path_does_not_matter() -> None:
    found = run_pass(with_det(), {"x": np.ones(3)}, of=["loss"], freeze=["v"])
    np.testing.assert_array_equal(found["w"], np.zeros(3))  # the determinant of a matrix of ones


@pytest.mark.parametrize(
    ("activation", "peer"),
    [
        ("Tanh", torch.tanh),
        ("Relu", torch.relu),
        ("Softplus", torch.nn.functional.softplus),
        ("Gelu", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ],
)
def test_gradient_of_a_gradient_is_that_of_pytorch(activation: str, peer: Callable[[torch.Tensor], torch.Tensor]) -> None:
    feeds = arrays(x=(4, 3), w1=(3, 5), b1=(5,), w2=(5, 2), b2=(2,))
    model, (x, w1, b1, w2, b2) = new_model(feeds)
    op = Builder(model.graph)
    options = {"approximate": "tanh"} if activation == "Gelu" else {}
    (hidden,) = op.emit(activation, [op.Gemm(x, w1, b1)], options)
    loss = op.ReduceSum(op.Softmax(op.Gemm(hidden, w2, b2)), keepdims=0)
    square = op.ReduceSum(op.Pow(op.Gemm(hidden, w2, b2), 2.0), keepdims=0)
    first = differentiate(model.graph, [loss, square], [x])[x]
    penalty = Builder(model.graph, scope="penalty").ReduceSumSquare(first, keepdims=0)
    found = gradients(model, feeds, [penalty], [w1, b1, w2, b2])

    t = tensors(feeds)
    logits = peer(t["x"] @ t["w1"] + t["b1"]) @ t["w2"] + t["b2"]
    (dx,) = torch.autograd.grad(logits.softmax(-1).sum() + (logits**2).sum(), t["x"], create_graph=True)
    expected = torch.autograd.grad((dx**2).sum(), [t[n] for n in ("w1", "b1", "w2", "b2")])
    for name, ours, theirs in zip(("w1", "b1", "w2", "b2"), found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6, err_msg=name)


def test_one_graph_serves_every_batch_size() -> None:
    feeds = {name: array.astype(np.float32) for name, array in arrays(x=(4, 3), w=(3, 5), b=(5,)).items()}
    model, (x, w, b) = new_model(feeds)
    x.shape = ir.Shape(["N", 3])
    op = Builder(model.graph)
    y = op.LogSoftmax(op.Add(op.MatMul(x, w), b))
    picked = op.ReduceMean(op.Slice(y, [0], [1], [1]))
    adjoints = differentiate(model.graph, [picked], [x, w, b])
    model.graph.outputs[:] = list(adjoints.values())
    run = on_onnxruntime(model)
    for batch in (1, 4, 7):
        sized = {**feeds, "x": normal(batch, 3).value.astype(np.float32)}
        results = run(sized)
        t = tensors(sized)
        (t["x"] @ t["w"] + t["b"]).log_softmax(-1)[:, :1].mean().backward()
        for value in (x, w, b):
            expected = t[value.name or ""].grad.numpy()  # type: ignore[union-attr]
            np.testing.assert_allclose(results[adjoints[value].name or ""], expected, rtol=1e-4, atol=1e-6)


def test_dense_layers_have_no_transposes_in_the_backward_graph() -> None:
    model, _ = two_layers(symbolic=1)
    autodiff(model, Context(), of=["loss"])
    assert not [n.name for n in model.graph if n.op_type == "Transpose"]


def test_two_runs_give_the_same_text() -> None:
    texts = []
    for _ in range(2):
        model, _ = two_layers(symbolic=1)
        autodiff(model, Context(), of=["loss"])
        texts.append(to_text(model))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_the_gradient_of_an_allreduce_is_an_allreduce(reduce: str) -> None:
    model, (x, y) = new_model(arrays(x=(3,), y=(2,)))
    op = Builder(model.graph)
    a, b = op.graphc.AllReduce(x, y, tag="t", group="tensor", reduce=reduce)
    differentiate(model.graph, [op.Exp(a), op.Exp(b)], [x, y])
    forward, backward = (n for n in model.graph if n.op_type == "AllReduce")
    assert len(backward.inputs) == 2
    assert backward.attributes["reduce"].as_string() == reduce
    assert backward.attributes["group"].as_string() == "tensor"
    assert backward.attributes["tag"].as_string() != forward.attributes["tag"].as_string()


def test_an_allreduce_without_gradient_is_refused() -> None:
    model, (x,) = new_model(arrays(x=(3,)))
    y = Builder(model.graph).graphc.AllReduce(x, tag="t", reduce="max")
    with pytest.raises(UnsupportedOpError, match="reduce='max'"):
        differentiate(model.graph, [y], [x])


@pytest.mark.parametrize("name", params((*SMALL, *LARGE), large=HUGE))
def test_every_op_of_the_zoo_has_a_rule_or_a_zero_mark(name: str) -> None:
    used = {node.op_type for node in onnx.load(path_of(name), load_external_data=False).graph.node}
    assert used
    assert sorted(op for op in used if op not in GRADIENTS) == []
