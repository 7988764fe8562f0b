"""Ops of foreign domains: declared, run, differentiated and trained; rules that replace built-in ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import graphc
from graphc.backend import Binding, kernel
from graphc.errors import UnsupportedOpError, UsageError
from graphc.frontends.training_export import standard_model
from graphc.gradient import gradient
from graphc.ir.declare import REQUIRED, same_as
from graphc.passes.legalize.legalize import legalize
from graphc.passes.training.autodiff import autodiff
from graphc.pipeline import Context, run
from graphc.registry import Registry
from graphc.training.inference import run_model

SOFTSIGN = """
<ir_version: 10, opset_import: ["": 21, "acme": 3]>
net (float[batch, 4] x) => (float[batch, 3] logits)
<float[4, 3] w = {0.5, -0.25, 0.125, 0.75, -0.5, 0.25, 0.3, 0.2, -0.1, -0.6, 0.4, 0.9}>
{
    h = MatMul (x, w)
    logits = acme.Softsign <scale: float = 2.0> (h)
}
"""


pytestmark = pytest.mark.usefixtures("registries")


def declare_softsign() -> None:
    @graphc.custom_op("acme::Softsign", inputs="x", outputs="y", attributes={"scale": 1.0})
    def softsign(op: Any, x: ir.Value, *, scale: float) -> ir.Value:
        """y = scale·x / (1 + |x|)"""
        return op.Div(op.Mul(x, scale), op.Add(op.Abs(x), 1.0))  # type: ignore[no-any-return]


def model(text: str = SOFTSIGN) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(text))


def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal((5, 4)).astype(np.float32), "label": rng.integers(0, 3, 5)}


def torch_losses(steps: int) -> list[float]:
    """Softmax cross-entropy of the same network under plain gradient descent."""
    feeds = data()
    w = torch.tensor(model().graph.initializers["w"].const_value.numpy(), requires_grad=True)
    losses = []
    for _ in range(steps):
        h = torch.from_numpy(feeds["x"]) @ w
        loss = torch.nn.functional.cross_entropy(2.0 * h / (1 + h.abs()), torch.from_numpy(feeds["label"]))
        (g,) = torch.autograd.grad(loss, w)
        losses.append(loss.item())
        w = (w - 0.5 * g).detach().requires_grad_()
    return losses


def our_losses(steps: int, backend: str = "onnxruntime") -> list[float]:
    program = graphc.compile(
        model(), loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.5), backend=backend
    )
    with graphc.Trainer(program, threads=1) as trainer:
        return [trainer.step(data())["loss"] for _ in range(steps)]


@pytest.mark.parametrize("backend", ["onnxruntime", "numpy"])
def test_an_op_with_a_decomposition_trains(backend: str) -> None:
    declare_softsign()
    np.testing.assert_allclose(our_losses(4, backend), torch_losses(4), rtol=1e-5)


def test_it_runs_and_keeps_symbolic_shapes() -> None:
    declare_softsign()
    feeds = {"x": data()["x"]}
    h = feeds["x"] @ model().graph.initializers["w"].const_value.numpy()
    for backend in ("onnxruntime", "numpy"):
        np.testing.assert_allclose(run_model(model(), feeds, backend)["logits"], 2 * h / (1 + np.abs(h)), rtol=1e-6)
    legal = model()
    run(legal, "legalize,verify")
    assert [n.domain for n in legal.graph] == ["", "acme"]
    assert [str(d) for d in legal.graph.outputs[0].shape or ()] == ["batch", "3"]
    assert legal.opset_imports["acme"] == 3


def test_its_own_rule_goes_before_the_decomposition() -> None:
    declare_softsign()
    called: list[str] = []

    @gradient("acme::Softsign")
    def softsign(op: Any, node: ir.Node, dy: ir.Value) -> ir.Value:
        """∂x = dy·scale / (1 + |x|)²"""
        called.append(node.name or "")
        (x,) = node.inputs
        below = op.Add(op.Abs(x), 1.0)
        return op.Div(op.Mul(dy, node.attributes["scale"].as_float()), op.Mul(below, below))  # type: ignore[no-any-return]

    np.testing.assert_allclose(our_losses(3), torch_losses(3), rtol=1e-5)
    assert called


def test_a_kernel_alone_is_enough() -> None:
    runs: list[int] = []
    graphc.custom_primitive("acme::Softsign", inputs="x", outputs="y", infer=same_as(0), doc="", attributes={"scale": 1.0})

    @kernel("onnxruntime", "acme::Softsign")
    def bind(k: Binding) -> Callable[[], None]:
        (x,), (y,), scale = k.inputs, k.outputs, k.attributes["scale"]
        assert x is not None

        def compute() -> None:
            runs.append(1)
            np.copyto(y, scale * x / (1 + np.abs(x)))

        return compute

    @gradient("acme::Softsign")
    def rule(op: Any, node: ir.Node, dy: ir.Value) -> ir.Value:
        """∂x = dy·scale / (1 + |x|)²"""
        below = op.Add(op.Abs(node.inputs[0]), 1.0)
        return op.Div(op.Mul(dy, node.attributes["scale"].as_float()), op.Mul(below, below))  # type: ignore[no-any-return]

    np.testing.assert_allclose(our_losses(3), torch_losses(3), rtol=1e-5)
    assert len(runs) == 3
    with pytest.raises(UnsupportedOpError, match=r"acme\.Softsign has no decomposition"):
        our_losses(1, "numpy")


def test_a_kernel_goes_before_the_decomposition() -> None:
    declare_softsign()
    runs: list[int] = []

    @kernel("onnxruntime", "acme::Softsign")
    def bind(k: Binding) -> Callable[[], None]:
        (x,), (y,), scale = k.inputs, k.outputs, k.attributes["scale"]
        assert x is not None

        def compute() -> None:
            runs.append(1)
            np.copyto(y, scale * x / (1 + np.abs(x)))

        return compute

    np.testing.assert_allclose(our_losses(2), torch_losses(2), rtol=1e-5)
    assert len(runs) == 2


def test_optional_inputs_several_outputs_and_required_attributes() -> None:
    @graphc.custom_op("acme::Affine", inputs="x shift?", outputs="y negative", attributes={"scale": REQUIRED})
    def affine(op: Any, x: ir.Value, shift: ir.Value | None = None, *, scale: float) -> tuple[ir.Value, ir.Value]:
        y = op.Mul(x, scale)
        y = y if shift is None else op.Add(y, shift)
        return y, op.Neg(y)

    text = """
    <ir_version: 10, opset_import: ["": 21, "acme": 1]>
    net (float[3] x, float[3] s) => (float[3] a, float[3] b)
    { a, n = acme.Affine <scale: float = 2.0> (x, s)  p, b = acme.Affine <scale: float = 3.0> (x) }
    """
    x, s = np.array([1, -2, 3], np.float32), np.array([10, 20, 30], np.float32)
    found = run_model(model(text), {"x": x, "s": s})
    np.testing.assert_array_equal(found["a"], 2 * x + s)
    np.testing.assert_array_equal(found["b"], -3 * x)
    with pytest.raises(graphc.GraphcError, match="Affine needs the attribute 'scale'"):
        run(model(text.replace(" <scale: float = 3.0>", "")), "legalize,verify")


def test_a_body_may_hold_it() -> None:
    declare_softsign()
    text = """
    <ir_version: 10, opset_import: ["": 21, "acme": 1]>
    net (float[3] x, bool c) => (float[3] y)
    { y = If (c) <then_branch = then () => (float[3] t) { t = acme.Softsign (x) },
                  else_branch = other () => (float[3] e) { e = Neg (x) }> }
    """
    x = np.array([1, -2, 3], np.float32)
    np.testing.assert_allclose(run_model(model(text), {"x": x, "c": np.array(True)})["y"], x / (1 + np.abs(x)), rtol=1e-6)
    np.testing.assert_allclose(run_model(model(text), {"x": x, "c": np.array(False)})["y"], -x)


def test_the_standard_export_holds_standard_ops_only() -> None:
    declare_softsign()
    program = graphc.compile(model(), loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.5))
    exported = ir.to_proto(standard_model(program.model))
    onnx.checker.check_model(exported, full_check=True)
    assert {n.domain for n in exported.graph.node} == {""}
    assert [i.domain for i in exported.opset_import] == [""]


def test_a_built_in_rule_can_be_replaced() -> None:
    """A straight-through Round: what quantisation-aware training wants, where the standard gradient is zero."""

    @gradient("Round", override=True)
    def straight_through(op: Any, node: ir.Node, dy: ir.Value) -> ir.Value:
        """∂x = dy"""
        return dy

    text = """
    <ir_version: 10, opset_import: ["": 21]>
    net (float[3] x) => (float z) { r = Round (x)  y = Mul (r, r)  z = ReduceSum <keepdims: int = 0> (y) }
    """
    x = np.array([0.4, 1.6, -2.3], np.float32)
    found = run_model(graphc.grad(model(text), of="z", wrt=["x"]), {"x": x})
    np.testing.assert_array_equal(found["x::grad"], 2 * np.round(x))


def test_an_entry_point_declares_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after ``pip install`` of a package that has one: graphc imports the module when it looks for ops."""
    (tmp_path / "acme_ops.py").write_text(
        "import graphc\n\n@graphc.custom_op('acme::Double', inputs='x', outputs='y')\n"
        "def double(op, x):\n    return op.Add(x, x)\n"
    )
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[graphc.ops]\nacme = acme_ops\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found: Registry[Any] = Registry("custom op", "graphc.ops")
    monkeypatch.setattr("graphc.custom.CUSTOM", found)
    assert "acme::Double" in found
    assert found["acme::Double"].origin == "acme_ops"


def test_an_undeclared_op_is_named_with_the_way_to_declare_it() -> None:
    with pytest.raises(UnsupportedOpError, match=r"unknown operator acme::Softsign.*@graphc.custom_op\('acme::Softsign', …\)"):
        legalize(model(), Context())


def test_an_op_without_gradient_is_named_with_the_way_to_add_one() -> None:
    graphc.custom_primitive("acme::Softsign", inputs="x", outputs="y", infer=same_as(0), doc="", attributes={"scale": 1.0})
    found = model()
    legalize(found, Context())
    with pytest.raises(UnsupportedOpError, match=r"no gradient for acme::Softsign[\s\S]*gradient\('acme::Softsign'\)"):
        autodiff(found, Context(), of=["logits"], wrt=["w"])


@pytest.mark.parametrize("name", ["Softsign", "ai.onnx::Relu", "graphc::ReluGrad", "my domain::Op"])
def test_a_name_without_a_domain_of_its_own_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a custom op name"):
        graphc.custom_op(name, inputs="x", outputs="y")(lambda op, x: x)


def test_a_wrong_declaration_is_reported_at_the_node() -> None:
    def infer(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> list[Any]:
        raise ValueError("scale must be positive")

    graphc.custom_op("acme::Softsign", inputs="x", outputs="y", attributes={"scale": 1.0}, infer=infer)(lambda op, x, scale: x)
    with pytest.raises(graphc.GraphcError, match=r"acme\.Softsign[\s\S]*scale must be positive"):
        legalize(model(), Context())
    graphc.custom_op("acme::Softsign", inputs="x", outputs="y", infer=same_as(0))(lambda op, x: x)
    with pytest.raises(graphc.GraphcError, match="has no attribute 'scale'"):
        run(model(), "legalize,verify")
