"""Which axis of the scores holds the classes: by the labels, by the layer, by PyTorch's rule; compared with PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import graphc
from graphc.cli import main
from graphc.errors import FeedError, UsageError
from graphc.ir.facts import dims
from graphc.passes.training.loss import loss
from graphc.pipeline import Context
from tests.passes.training.loss_cases import data, graph_of, run, scores, torch_loss


def label_of(model: ir.Model, **options: object) -> tuple[object, ...]:
    loss(model, Context(), **options)  # type: ignore[arg-type]
    return dims(next(v for v in model.graph.inputs if v.name == "label")) or ()


@pytest.mark.parametrize(
    ("shape", "axis"),
    [("N,T,7", 2), ("N,7,T", 1), ("N,7,H,W", 1), ("N,H,W,7", 3), ("N,7,1,1", 1), ("N,1,7", 2), ("3,1,7", 2), ("3,4,7", 1)],
)
def test_a_new_label_leaves_out_the_axis_of_known_size(shape: str, axis: int) -> None:
    label = label_of(scores(shape))
    names = [int(d) if d.isdigit() else d for d in shape.split(",")]
    rest = tuple(d for k, d in enumerate(names) if k != axis)
    assert label == (rest[:1] if shape == "N,7,1,1" else rest)


@pytest.mark.parametrize("label", ["int64[N,T] label", "int64[M,4] label", "int64[3,4,1] label"])
def test_token_labels_of_the_graph_need_no_axis(label: str) -> None:
    x, target = data(3, 4, 5, classes_at=2)
    declared = "N,T,5" if "T" in label else "3,4,5"
    found = run(scores(declared, f", {label}"), {"x": x, "label": target[..., None] if "1]" in label else target}, of="loss")
    want, gradient = torch_loss(F.cross_entropy, np.moveaxis(x, 2, 1), target)
    np.testing.assert_allclose(found["loss"], want, rtol=1e-12)
    np.testing.assert_allclose(np.moveaxis(found["x::grad"], 2, 1), gradient, atol=1e-14)


@pytest.mark.parametrize("kind", ["softmax_cross_entropy", "nll"])
def test_labels_that_fit_two_axes_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UsageError, match=r"labels of shape \[N,5\] fit z:double\[N,5,5\] .*: say axis=1 or axis=2"):
        loss(scores("N,5,5", ", int64[N,5] label"), Context(), kind=kind)
    loss(scores("N,5,5", ", int64[N,5] label"), Context(), kind=kind, axis=2)


def test_labels_that_fit_another_axis_name_it() -> None:
    with pytest.raises(UsageError, match=r"with the classes on axis 1; it fits with axis=2"):
        loss(scores("N,4,5", ", int64[N,4] label"), Context(), axis=1)
    with pytest.raises(UsageError, match="must be that of the logits without one axis"):
        loss(scores("N,4,5", ", int64[N,3] label"), Context())


@pytest.mark.parametrize(
    ("body", "label"),
    [
        ("z = MatMul(x, w)", (2, 5)),
        ("h = MatMul(x, w) z = Add(h, b)", (2, 5)),
        ("h = MatMul(x, w) r = Relu(h) z = Transpose<perm=[0, 2, 1]>(r)", (2, 5)),
        ("h = Conv(x, k) z = Relu(h)", (2, 5)),
        ("t = Concat<axis=1>(w, w) u = Slice(t, from, to) z = MatMul(x, u)", (2, 5)),
        ("t = Mul(w, w) h = MatMul(x, t) c = Greater(h, x) z = Where(c, h, x)", (2, 5)),
        ('z = Einsum<equation="btd,vd->btv">(x, w)', (2, 5)),
        ('z = Einsum<equation="vd,btd->bvt">(w, x)', (2, 5)),
    ],
)
def test_the_layer_that_computes_fixed_scores_says_where_its_features_are(body: str, label: tuple[int, ...]) -> None:
    inputs = "float[2,5,5] x, float[5,5] w, float[5] b, float[5,5,1] k, int64[2] from, int64[2] to"
    model = graph_of(f"{inputs}) => (float[2,5,5] z", body)
    graph = model.graph
    arrays = {"w": np.ones((5, 5), np.float32), "b": np.ones(5, np.float32), "k": np.ones((5, 5, 1), np.float32)}
    for name, array in (arrays | {"from": np.array([0, 0]), "to": np.array([5, 5])}).items():
        value = next(v for v in graph.inputs if v.name == name)
        value.const_value = ir.tensor(array, name=name)
        graph.register_initializer(value)
        graph.inputs.remove(value)
    loss(model, Context(), label_shape=[-1, 5])
    (node,) = [n for n in graph if n.op_type == "SoftmaxCrossEntropy"]
    assert node.attributes["axis"].as_int() == (1 if "Conv" in body or "perm" in body or "bvt" in body else 2)
    assert dims(next(v for v in graph.inputs if v.name == "label")) == label


def tokens(path: Path, shape: str = "N,T") -> tuple[torch.Tensor, torch.Tensor]:
    """A token classifier of 6 words and 4 classes; its table and its layer."""
    torch.manual_seed(0)
    table, layer = torch.randn(6, 3), torch.randn(3, 4)
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 17]> g (int64[{shape}] ids) => (float[{shape},4] logits)'
        "{ h = Gather (table, ids) logits = MatMul (h, layer) }"
    )
    for name, array in (("table", table), ("layer", layer)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.numpy(), name))
    onnx.save(model, path)
    return table, layer


def token_loss(table: torch.Tensor, layer: torch.Tensor, ids: np.ndarray, label: np.ndarray) -> float:
    logits = (table[torch.tensor(ids)] @ layer).flatten(0, 1)
    return float(F.cross_entropy(logits, torch.tensor(label).flatten()))


def test_a_token_classifier_trains_without_an_axis(tmp_path: Path) -> None:
    table, layer = tokens(tmp_path / "m.onnx")
    rng = np.random.default_rng(0)
    ids, label = rng.integers(0, 6, (5, 4)), rng.integers(0, 4, (5, 4))
    program = graphc.compile(
        tmp_path / "m.onnx", loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1), backend="numpy"
    )
    with graphc.Trainer(program, threads=1) as trainer:
        found = trainer.step({"ids": ids, "label": label})["loss"]
    assert found == pytest.approx(token_loss(table, layer, ids, label), rel=1e-5)


@pytest.mark.parametrize("shape", ["N,3", "N,T"])
def test_a_label_for_another_axis_is_told_where_the_classes_were_found(tmp_path: Path, shape: str) -> None:
    tokens(tmp_path / "m.onnx", shape)
    program = graphc.compile(
        tmp_path / "m.onnx", loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.1), backend="numpy"
    )
    feeds = {"ids": np.zeros((5, 3), np.int64), "label": np.zeros((5, 4), np.int64)}
    message = r"classes on axis 2 of 'logits': say axis= to it for another"
    with graphc.Trainer(program, threads=1) as trainer, pytest.raises(FeedError, match=message):
        trainer.step(feeds)


def test_the_data_of_the_command_tell_the_axis(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As many tokens as classes, and labels [N, T, 1]: only the command knows that."""
    table, layer = tokens(tmp_path / "m.onnx", "N,4")
    rng = np.random.default_rng(0)
    ids, label = rng.integers(0, 6, (8, 4)), rng.integers(0, 4, (8, 4, 1))
    np.savez(tmp_path / "d.npz", ids=ids, label=label)
    names = [str(tmp_path / "m.onnx"), "--data", str(tmp_path / "d.npz"), "--backend", "numpy", "--batch-size", "8"]
    assert main(["train", *names, "--loss", "softmax_cross_entropy", "--optimizer", "sgd:lr=0.1", "--format", "json"]) == 0
    first = json.loads(capfd.readouterr().out.splitlines()[0])
    assert first["loss"] == pytest.approx(token_loss(table, layer, ids, label), rel=1e-5)
