"""Indices, axes and lengths as int32, which exporters from TensorFlow write: every op that takes them has its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

import graphc
from graphc.training.inference import run_model
from tests.passes.legalize.legalize_cases import build, normal

Case = tuple[str, dict[str, Any], tuple[Any, ...], Callable[..., torch.Tensor]]

CASES: list[Case] = [
    ("Gather", {"axis": 0}, ([[0, 2, 2]],), lambda w, i: w[i]),
    ("Gather", {"axis": 1}, ([1, 0, 1, -1],), lambda w, i: w[:, i]),
    ("Gather", {"axis": 1}, (2,), lambda w, i: w[:, i]),
    ("GatherElements", {"axis": 1}, ([[0, 2], [1, 1], [0, 0], [2, 1]],), lambda w, i: torch.gather(w, 1, i)),
    ("Slice", {}, ([1], [3], [0], [1]), lambda w, *_: w[1:3]),
    ("Slice", {}, ([-1, 0], [-9, 3], [0, 1], [-2, 1]), lambda w, *_: w.flip(0)[::2]),
    ("CumSum", {}, (1,), lambda w, _: w.cumsum(1)),
]


@pytest.mark.parametrize("fed", [False, True], ids=["constant", "fed"])
@pytest.mark.parametrize("backend", ["onnxruntime", pytest.param("numpy", marks=pytest.mark.full)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}{case[1]}")
def test_an_op_with_int32_indices_has_the_gradient_of_pytorch(case: Case, backend: str, fed: bool) -> None:
    op_type, attributes, indices, peer = case
    w, operands = normal(4, 3), {f"i{k}": np.array(i, dtype=np.int32) for k, i in enumerate(indices)}
    nodes = [helper.make_node(op_type, ["w", *operands], ["g"], **attributes), helper.make_node("Mul", ["g", "g"], ["y"])]
    model = build(
        nodes,
        {name: a.shape for name, a in operands.items()} if fed else {},
        ["y"],
        {"w": w, **({} if fed else operands)},
        opset=17,
        types=dict.fromkeys(operands, TensorProto.INT32),
    )
    got = run_model(graphc.grad(model, of="y", wrt="w"), operands if fed else {}, backend)
    theirs = torch.tensor(w, requires_grad=True)
    picked = peer(theirs, *(torch.tensor(i) for i in indices))
    (picked * picked).sum().backward()
    np.testing.assert_allclose(got["y"], (picked * picked).detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["w::grad"], theirs.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["onnxruntime", "numpy"])
def test_scatters_and_one_hot_with_int32_indices(backend: str) -> None:
    nodes = [
        helper.make_node("OneHot", ["i", "depth", "levels"], ["hot"]),
        helper.make_node("MatMul", ["hot", "w"], ["rows"]),
        helper.make_node("ScatterElements", ["base", "places", "rows"], ["y"], axis=0, reduction="add"),
    ]
    w, base = normal(4, 3), normal(5, 3, seed=1)
    places = np.array([[0, 1, 2], [0, 3, 4]], dtype=np.int32)
    weights = {"w": w, "base": base, "places": places, "depth": np.array(4, np.int32), "levels": np.array([0, 2], np.float32)}
    model = build(nodes, {"i": [2]}, ["y"], weights, opset=18, types={"i": TensorProto.INT32})
    got = run_model(graphc.grad(model, of="y", wrt=["w", "base", "levels"]), {"i": np.array([3, 1], np.int32)}, backend)
    a, b, levels = (torch.tensor(weights[k], requires_grad=True) for k in ("w", "base", "levels"))
    hot = torch.nn.functional.one_hot(torch.tensor([3, 1]), 4)
    rows = (levels[0] + (levels[1] - levels[0]) * hot) @ a
    y = torch.scatter_add(b, 0, torch.tensor(places).long(), rows)
    y.sum().backward()
    np.testing.assert_allclose(got["y"], y.detach().numpy(), rtol=1e-5, atol=1e-6)
    for name, theirs in (("w", a), ("base", b), ("levels", levels)):
        np.testing.assert_allclose(got[f"{name}::grad"], theirs.grad.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


def test_an_embedding_of_int32_ids_trains_as_in_pytorch() -> None:
    """As tf2onnx writes it: ids and their shape arithmetic in int32."""
    nodes = [
        helper.make_node("Shape", ["ids"], ["shape"]),
        helper.make_node("Cast", ["shape"], ["shape32"], to=TensorProto.INT32),
        helper.make_node("Slice", ["shape32", "zero", "one"], ["rows"]),
        helper.make_node("Concat", ["rows", "width"], ["target32"], axis=0),
        helper.make_node("Cast", ["target32"], ["target"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "ids"], ["e"]),
        helper.make_node("Reshape", ["e", "target"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["y"]),
    ]
    i32 = {"zero": np.array([0], np.int32), "one": np.array([1], np.int32), "width": np.array([6], np.int32)}
    weights = {"table": normal(5, 2), "w": normal(6, 3, seed=1)}
    model = build(nodes, {"ids": ["n", 3]}, {"y": ["n", 3]}, {**weights, **i32}, opset=13, types={"ids": TensorProto.INT32})
    ids, label = np.array([[0, 4, 4], [1, 0, 2]], np.int32), np.array([0, 2])
    program = graphc.compile(model, loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.5))
    with graphc.Trainer(program) as trainer:
        losses = [trainer.step({"ids": ids, "label": label})["loss"] for _ in range(3)]
    table, w = (torch.tensor(weights[k], requires_grad=True) for k in ("table", "w"))
    optimizer, theirs = torch.optim.SGD([table, w], lr=0.5), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(table[torch.tensor(ids)].reshape(2, 6) @ w, torch.tensor(label))
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())
    np.testing.assert_allclose(losses, theirs, rtol=1e-5)
