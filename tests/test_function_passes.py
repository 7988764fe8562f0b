"""A pass that changes what the model computes is in the training graph, in the evaluation and in the exported model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

import graphc
from graphc.compiler import training_pipeline
from graphc.errors import UsageError
from graphc.frontends.training_export import training_info
from graphc.ir.builder import Builder
from graphc.ir.names import GRADIENT_OF, LOSS_TOTAL
from graphc.pipeline import PASSES, Context, PassCall, graph_pass

Array = np.ndarray[Any, Any]
LOSS, OPTIMIZER = graphc.losses.SoftmaxCrossEntropy(), graphc.optim.SGD(lr=0.1)
RNG = np.random.default_rng(0)
W1, W2 = (RNG.standard_normal(shape).astype(np.float32) for shape in ((6, 16), (16, 3)))
FEEDS = {"x": RNG.standard_normal((8, 6)).astype(np.float32), "label": np.arange(8) % 3}


def model() -> onnx.ModelProto:
    made = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> net (float[N, 6] x) => (float[N, 3] y)
        { h = MatMul(x, w1) r = Relu(h) d = Dropout(r) y = MatMul(d, w2) }"""
    )
    made.graph.initializer.extend([onnx.numpy_helper.from_array(W1, "w1"), onnx.numpy_helper.from_array(W2, "w2")])
    return made


def square_relu(model: ir.Model, ctx: Context) -> bool:
    """Replace Relu by its square, as the example of docs/writing-a-pass.md does."""
    changed = False
    for node in list(model.graph):
        if node.op_type == "Relu":
            op = Builder(model.graph, before=node, scope="square_relu")
            relu = op.Relu(node.inputs[0])
            node.outputs[0].replace_all_uses_with(op.Mul(relu, relu), replace_graph_outputs=True)
            model.graph.remove(node, safe=True)
            changed = True
    return changed


def penalty(model: ir.Model, ctx: Context) -> bool:
    """Add Σ w1² to the total that autodiff differentiates."""
    (total,) = [v for node in model.graph for v in node.outputs if LOSS_TOTAL in v.metadata_props]
    following = list(model.graph)
    op = Builder(model.graph, before=following[following.index(total.producer()) + 1], scope="penalty")  # type: ignore[arg-type]
    users = list(total.uses())
    w = model.graph.initializers["w1"]
    both = op.Add(total, op.ReduceSum(op.Mul(w, w), keepdims=0))
    both.metadata_props[LOSS_TOTAL] = total.metadata_props.pop(LOSS_TOTAL)
    for user, index in users:
        user.replace_input_with(index, both)
    return True


def double_gradients(model: ir.Model, ctx: Context) -> bool:
    for value in [v for node in model.graph for v in node.outputs if GRADIENT_OF in v.metadata_props]:
        users = list(value.uses())
        op = Builder(model.graph, before=users[0][0], scope="double")
        doubled = op.Add(value, value)
        for user, index in users:
            user.replace_input_with(index, doubled)
    return True


@pytest.fixture(autouse=True)
def plugins() -> Iterator[None]:
    with PASSES.restored():
        yield


def pipeline(name: str, behind: str) -> list[PassCall]:
    steps = training_pipeline(LOSS, OPTIMIZER)
    place = [step.name for step in steps].index(behind) + 1 if behind else 0
    return [*steps[:place], PassCall(name), *steps[place:]]


def without_dropout(steps: list[PassCall]) -> list[PassCall]:
    return [PassCall("inference_mode") if step.name == "train_mode" else step for step in steps]


class Torch(torch.nn.Module):
    def __init__(self, *, square: bool) -> None:
        super().__init__()
        self.w1, self.w2 = (torch.nn.Parameter(torch.tensor(w)) for w in (W1, W2))
        self.square = square

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(x @ self.w1)
        return (h * h if self.square else h) @ self.w2  # type: ignore[no-any-return]


def in_torch(steps: int) -> tuple[list[float], Array]:
    """The losses of the model with the squared activation, that after the last step too, and its outputs then."""
    module = Torch(square=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, label = torch.tensor(FEEDS["x"]), torch.tensor(FEEDS["label"])
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(module(x), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    y = module(x)
    return [*losses, torch.nn.functional.cross_entropy(y, label).item()], y.detach().numpy()


@pytest.mark.parametrize("behind", ["legalize", "inference_mode", "loss", "attention"])
@pytest.mark.parametrize("as_text", [False, True])
def test_training_evaluation_and_export_agree(behind: str, as_text: bool, tmp_path: Path) -> None:
    graph_pass("square_relu", requires=("legalize",))(square_relu)
    steps = pipeline("square_relu", "train_mode" if behind == "inference_mode" else behind)
    steps = without_dropout(steps)
    passes = ",".join(map(str, steps)) if as_text else steps
    program = graphc.compile(model(), loss=LOSS, optimizer=OPTIMIZER, passes=passes)
    assert program.pipeline.count("square_relu") == 1
    with graphc.Trainer(program, threads=1) as trainer:
        losses = [trainer.step(FEEDS)["loss"] for _ in range(5)]
        evaluated = trainer.evaluate([FEEDS])["loss"]
        trainer.export(tmp_path / "trained.onnx")
    expected, y = in_torch(5)
    np.testing.assert_allclose([*losses, evaluated], expected, rtol=2e-5)
    session = ort.InferenceSession(str(tmp_path / "trained.onnx"))
    np.testing.assert_allclose(session.run(["y"], {"x": FEEDS["x"]})[0], y, rtol=1e-4, atol=1e-5)
    assert [i.name for i in onnx.load(tmp_path / "trained.onnx").graph.initializer] == ["w1", "w2"]
    fresh = ort.InferenceSession(training_info(program).SerializeToString()).run(["y"], {"x": FEEDS["x"]})[0]
    np.testing.assert_allclose(fresh, Torch(square=True)(torch.tensor(FEEDS["x"])).detach(), rtol=1e-4)


def test_a_pass_that_finds_nothing_leaves_the_users_file(tmp_path: Path) -> None:
    """The exported model stays the file as it was given: its opset, its Dropout."""

    @graph_pass("square_gelu", requires=("legalize",))
    def nothing(model: ir.Model, ctx: Context) -> bool:
        return False

    program = graphc.compile(model(), loss=LOSS, optimizer=OPTIMIZER, passes=pipeline("square_gelu", "loss"))
    assert program.changed is None
    with graphc.Trainer(program, threads=1) as trainer:
        trainer.export(tmp_path / "trained.onnx")
    saved = onnx.load(tmp_path / "trained.onnx")
    assert saved.opset_import[0].version == 21
    assert [node.op_type for node in saved.graph.node] == ["MatMul", "Relu", "Dropout", "MatMul"]


@pytest.mark.parametrize("behind", ["autodiff", "optimizer", "schedule"])
@pytest.mark.parametrize("requires", [(), ("autodiff",)])
def test_behind_autodiff_the_forward_pass_must_stay(behind: str, requires: tuple[str, ...]) -> None:
    graph_pass("square_relu", requires=requires)(square_relu)
    with pytest.raises(
        UsageError, match=r"'square_relu' changed the forward pass .* behind 'autodiff'.*Put it behind 'legalize'"
    ):
        graphc.compile(model(), loss=LOSS, optimizer=OPTIMIZER, passes=pipeline("square_relu", behind))


def test_a_pass_that_needs_the_training_graph_must_say_so() -> None:
    graph_pass("penalty", requires=("loss",))(penalty)
    with pytest.raises(UsageError, match=r"'penalty' changed the forward pass .* behind 'loss'.*changes='training'"):
        graphc.compile(model(), loss=LOSS, optimizer=OPTIMIZER, passes=pipeline("penalty", "loss"))
    graph_pass("penalty", requires=("loss",), changes="training")(penalty)
    program = graphc.compile(model(), loss=LOSS, optimizer=OPTIMIZER, passes=without_dropout(pipeline("penalty", "loss")))
    with graphc.Trainer(program, threads=1) as trainer:
        before = trainer.evaluate([FEEDS])["loss"]
        reported = trainer.step(FEEDS)["loss"]
        w1 = trainer.trained_values()["w1"]
    module = Torch(square=False)
    own = torch.nn.functional.cross_entropy(module(torch.tensor(FEEDS["x"])), torch.tensor(FEEDS["label"]))
    total = own + (module.w1 * module.w1).sum() / 8
    total.backward()
    assert module.w1.grad is not None
    np.testing.assert_allclose([before, reported], [own.item(), total.item()], rtol=1e-5)
    np.testing.assert_allclose(w1, W1 - 0.1 * module.w1.grad.numpy(), rtol=0, atol=1e-5)


def test_a_pass_over_gradients_needs_no_declaration() -> None:
    graph_pass("double_gradients", requires=("optimizer",))(double_gradients)
    program = graphc.compile(
        model(), loss=LOSS, optimizer=OPTIMIZER, passes=without_dropout(pipeline("double_gradients", "optimizer"))
    )
    with graphc.Trainer(program, threads=1) as trainer:
        trainer.step(FEEDS)
        w1 = trainer.trained_values()["w1"]
    module = Torch(square=False)
    torch.nn.functional.cross_entropy(module(torch.tensor(FEEDS["x"])), torch.tensor(FEEDS["label"])).backward()
    assert module.w1.grad is not None
    np.testing.assert_allclose(w1, W1 - 0.2 * module.w1.grad.numpy(), rtol=0, atol=1e-5)


def test_the_loss_of_the_pipeline_is_that_of_the_evaluation() -> None:
    steps = [
        PassCall("loss", {"kind": "mse"}) if step.name == "loss" else step
        for step in without_dropout(pipeline("simplify", "loss"))
    ]
    program = graphc.compile(model(), loss=LOSS, optimizer=OPTIMIZER, passes=steps)
    feeds = {"x": FEEDS["x"], "label": np.zeros((8, 3), np.float32)}
    with graphc.Trainer(program, threads=1) as trainer:
        evaluated = trainer.evaluate([feeds])["loss"]
    np.testing.assert_allclose(evaluated, (Torch(square=False)(torch.tensor(FEEDS["x"])) ** 2).mean().item(), rtol=1e-5)


def test_built_in_passes_leave_the_function_and_kinds_are_checked() -> None:
    assert {PASSES[name].changes for name in PASSES} == {"form", "training"}
    with pytest.raises(UsageError, match="changes='weights' is none of function, form, training"):
        graph_pass("other", changes="weights")  # type: ignore[arg-type]
