"""Losses of small legal models, and the same by PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch

from graphc.ir.infer import propagate
from graphc.passes.legalize.decompose import decompose
from graphc.passes.training.autodiff import autodiff
from graphc.passes.training.loss import loss
from graphc.pipeline import Context

Array = np.ndarray[Any, Any]
HEAD = '<ir_version: 11, opset_import: ["" : 26]>'


def graph_of(signature: str, body: str) -> ir.Model:
    """A legal model from ONNX text: ``graph_of("double[N,3] x) => (double[N,3] y", "y = Identity(x)")``."""
    model = ir.from_onnx_text(f"{HEAD} g ({signature}) {{ {body} }}")
    for k, node in enumerate(model.graph):
        node.name = f"node{k}"
    propagate(model.graph)
    return model


def scores(shape: str, label: str = "") -> ir.Model:
    """A model whose output ``z`` is its input ``x``."""
    return graph_of(f"double[{shape}] x{label}) => (double[{shape}] z", "z = Identity(x)")


def outputs(model: ir.Model, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Decompose ``model`` and run it in onnxruntime."""
    names = [v.name for v in model.graph.outputs]
    decompose(model, Context())
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(None, dict(feeds)), strict=True))


def run(model: ir.Model, feeds: Mapping[str, Array], *, of: str | None = None, **options: Any) -> dict[str, Array]:
    """The reported values, and the gradient of the marked total (or of value ``of``) with respect to ``x``."""
    loss(model, Context(), **options)
    autodiff(model, Context(), wrt=["x"], of=[of] if of else None)
    model.graph.outputs.append(next(v for n in model.graph for v in n.outputs if v.name == "x::grad"))
    return outputs(model, feeds)


def torch_loss(function: Any, x: Array, label: Array, **options: Any) -> tuple[float, Array]:
    """Loss of ``function`` and gradient of its *mean*."""
    leaf = torch.tensor(x, requires_grad=True)
    value = function(leaf, torch.tensor(label), **options)
    value.backward()
    assert leaf.grad is not None
    return float(value.detach()), leaf.grad.numpy()


def data(*shape: int, classes_at: int = 1, seed: int = 0) -> tuple[Array, Array]:
    """Scores and class indices for them."""
    rng = np.random.default_rng(seed)
    label_shape = tuple(d for k, d in enumerate(shape) if k != classes_at)
    return rng.normal(size=shape) * 3, rng.integers(0, shape[classes_at], size=label_shape)


WEIGHTS = [0.5, 2.0, 0.0, 1.5, 1.0]
