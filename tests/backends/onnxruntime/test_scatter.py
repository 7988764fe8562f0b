"""Where an index occurs twice, nothing is lost and nothing left to chance on several threads."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import graphc
from graphc.backend import BACKENDS


@pytest.mark.parametrize("nested", [False, True])
def test_scatter_nd_adds_every_update(nested: bool) -> None:
    scatter = 'y = ScatterND <reduction = "add"> (x, i, u)'
    if nested:
        then, other = f"t () => (float[200,4,32] y) {{ {scatter} }}", "e () => (float[200,4,32] z) { z = Neg (x) }"
        scatter = f"yes = Constant <value = bool {{1}}> () y = If (yes) <then_branch = {then}, else_branch = {other}>"
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[200,4,32] x, int64[20000,1] i, float[20000,4,32] u)
        => (float[200,4,32] y) {{ {scatter} }}"""
    )
    generator = np.random.default_rng(0)
    x, u = (generator.standard_normal((n, 4, 32)).astype(np.float32) for n in (200, 20000))
    i = generator.integers(0, 200, (20000, 1))
    expected = x.astype(np.float64)
    np.add.at(expected, i[:, 0], u)
    backend = BACKENDS["onnxruntime"](threads=4, spin=False)
    for _ in range(3):
        found = backend.bind_whole(model)({"x": x, "i": i, "u": u})["y"]
        np.testing.assert_allclose(found, expected, atol=1e-3)
    backend.close()


def test_of_two_values_for_one_place_the_last_one_stays() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[5000,256] x, int64[20000,1] i, float[20000,256] u)
        => (float[5000,256] y) { y = ScatterND (x, i, u) }"""
    )
    generator = np.random.default_rng(0)
    x, u = (generator.standard_normal((n, 256)).astype(np.float32) for n in (5000, 20000))
    i = generator.integers(0, 5000, (20000, 1))
    expected = x.copy()
    for place, value in zip(i[:, 0], u, strict=True):
        expected[place] = value
    backend = BACKENDS["onnxruntime"](threads=4, spin=False)
    for _ in range(3):
        np.testing.assert_array_equal(backend.bind_whole(model)({"x": x, "i": i, "u": u})["y"], expected)
    backend.close()


class Messages(nn.Module):
    """A step of message passing over a graph of fixed edges."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.randint(0, 300, (2, 20_000)))
        self.scale, self.head = nn.Parameter(torch.ones(16, 1)), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        messages = torch.tanh(x * self.scale)[:, :, self.edges[0]]
        return self.head(torch.zeros_like(x).index_add(2, self.edges[1], messages).square().mean(2) / 1000)


@pytest.mark.full
def test_a_graph_network_follows_pytorch_on_several_threads() -> None:
    torch.manual_seed(0)
    module, x, label = Messages(), torch.randn(8, 16, 300), torch.randint(0, 3, (8,))
    program = graphc.compile(
        module, example_inputs=(x,), loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.SGD(lr=0.5)
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    with graphc.Trainer(program, threads=4) as trainer:
        (name,) = (v.name for v in program.model.graph.inputs if v.name != "label")
        for _ in range(5):
            loss = nn.functional.cross_entropy(module(x), label)
            assert trainer.step({name: x.numpy(), "label": label.numpy()})["loss"] == pytest.approx(loss.item(), rel=1e-5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
