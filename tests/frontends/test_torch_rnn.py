"""``torch.nn.RNN`` exports as one RNN node a layer that computes what the module does."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from graphc.frontends.torch import export
from tests.tiers import params


class Network(torch.nn.Module):
    """Two layers; returns all outputs of the last and the final states, from a given state or from zero."""

    def __init__(self, activation: str, *, both: bool, batch_first: bool, bias: bool) -> None:
        super().__init__()
        self.layers = torch.nn.RNN(5, 8, 2, activation, bias=bias, bidirectional=both, batch_first=batch_first)

    def forward(self, x: torch.Tensor, h: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers(x, h)  # type: ignore[no-any-return]


@pytest.mark.full
@pytest.mark.parametrize(
    ("activation", "both", "bias"),
    params(
        itertools.product(("tanh", "relu"), (False, True), (False, True)),
        large=[("tanh", False, True), ("tanh", True, False), ("relu", False, False), ("relu", True, True)],
    ),
)
def test_layers_are_nodes_and_compute_what_the_module_does(activation: str, both: bool, bias: bool) -> None:
    torch.manual_seed(0)
    module = Network(activation, both=both, batch_first=not both, bias=bias)
    x, h = torch.randn(4, 6, 5), torch.randn(4 if both else 2, 6 if both else 4, 8)
    inputs = (x, h) if bias else (x,)
    model = export(module, inputs, dynamic_batch=False, exporter="dynamo")
    assert sum(node.op_type == "RNN" for node in model.graph) == 2
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    found = session.run(None, {v.name: t.numpy() for v, t in zip(model.graph.inputs, inputs, strict=True)})
    with torch.no_grad():
        wanted = module(*inputs)
    for made, true in zip(found, wanted, strict=True):
        np.testing.assert_allclose(made, true.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("kind", params(["LSTM", "GRU", "RNN"], large=["GRU", "RNN"]))
def test_a_long_sequence_takes_no_longer_to_export(kind: str) -> None:
    module = getattr(torch.nn, kind)(5, 8, 2, bidirectional=True)
    spent = []
    for steps in (3, 3, 1000):
        start = time.perf_counter()
        model = export(module, (torch.randn(steps, 4, 5),), dynamic_batch=False, exporter="dynamo")
        spent.append(time.perf_counter() - start)
        assert sum(node.op_type == kind for node in model.graph) == 2
    # a minute and more where every step is run; a moment of other processes must not count
    assert spent[2] < 2 * spent[1] + 20


@pytest.mark.full
def test_pytorch_decomposes_layers_as_before_an_export() -> None:
    module, x = torch.nn.LSTM(5, 8), torch.randn(3, 4, 5)

    def operators() -> int:
        captured = torch.export.export(module, (x,), strict=False)
        return len(captured.run_decompositions().graph.nodes)

    before = operators()
    with ThreadPoolExecutor(3) as threads:  # as workers of one process do
        list(threads.map(lambda _: export(module, (x,), dynamic_batch=False, exporter="dynamo"), range(3)))
    assert operators() == before > 20
