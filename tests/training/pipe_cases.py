"""Models, data and runs of the tests of pipelines, shared by threads and MPI processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

import graphc
from graphc.distributed.communicator import Communicator

WIDTH = 8


def parameters(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]], seed: int = 0) -> onnx.ModelProto:
    """``model`` with random parameters of these shapes; names that end in ``one`` are ones, in ``zero`` zeros."""
    rng = np.random.default_rng(seed)
    for name, shape in shapes.items():
        array = rng.normal(size=shape, scale=1 / np.sqrt(shape[0])).astype(np.float32)
        fixed = np.float32(name.endswith("one")) if name.endswith(("one", "zero")) else None
        array = np.full(shape, fixed, np.float32) if fixed is not None else array
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def mlp(layers: int = 4) -> onnx.ModelProto:
    """``layers`` layers of equal width, the last with three outputs."""
    lines, value = [], "x"
    for k in range(layers):
        lines += [f"m{k} = MatMul({value}, w{k})", f"a{k} = Add(m{k}, b{k})"]
        lines += [f"h{k} = Tanh(a{k})"] if k < layers - 1 else []
        value = f"h{k}"
    text = "\n".join([*lines, f"y = Identity(a{layers - 1})"])
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> net (float[batch, {WIDTH}] x) => (float[batch, 3] y) {{ {text} }}'
    )
    widths = [WIDTH] * layers + [3]
    shapes = {f"w{k}": (WIDTH, widths[k + 1]) for k in range(layers)} | {f"b{k}": (widths[k + 1],) for k in range(layers)}
    return parameters(model, shapes)


def residual_cnn() -> onnx.ModelProto:
    """Convolutions with BatchNormalization, a skip inside a stage and one over several."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        cnn (float[batch, 2, 6, 6] x) => (float[batch, 3] y)
        {
            c0 = Conv <pads = [1, 1, 1, 1]> (x, k0)
            n0 = BatchNormalization (c0, s0_one, t0_zero, m0_zero, v0_one)
            h0 = Relu (n0)
            c1 = Conv <pads = [1, 1, 1, 1]> (h0, k1)
            n1 = BatchNormalization (c1, s1_one, t1_zero, m1_zero, v1_one)
            r1 = Add (n1, h0)
            h1 = Relu (r1)
            c2 = Conv <pads = [1, 1, 1, 1]> (h1, k2)
            n2 = BatchNormalization (c2, s2_one, t2_zero, m2_zero, v2_one)
            r2 = Add (n2, h0)
            h2 = Relu (r2)
            p = GlobalAveragePool (h2)
            f = Flatten (p)
            y = MatMul (f, w)
        }
    """)
    shapes: dict[str, Sequence[int]] = {"k0": (4, 2, 3, 3), "k1": (4, 4, 3, 3), "k2": (4, 4, 3, 3), "w": (4, 3)}
    for k in range(3):
        shapes |= {f"s{k}_one": (4,), f"t{k}_zero": (4,), f"m{k}_zero": (4,), f"v{k}_one": (4,)}
    return parameters(model, shapes)


def gpt(blocks: int = 2, length: int = 5, vocabulary: int = 11) -> onnx.ModelProto:
    """A stack of attention blocks with dropout; the embedding is the output projection too."""
    lines = ["e = Gather (wte, tokens)", "x0 = Add (e, wpe)"]
    shapes: dict[str, Sequence[int]] = {"wte": (vocabulary, WIDTH), "wpe": (length, WIDTH)}
    for k in range(blocks):
        lines += [
            f"n{k} = LayerNormalization (x{k}, g{k}_one, u{k}_zero)",
            f"q{k} = MatMul (n{k}, wq{k})",
            f"k{k} = MatMul (n{k}, wk{k})",
            f"v{k} = MatMul (n{k}, wv{k})",
            f"kt{k} = Transpose <perm = [0, 2, 1]> (k{k})",
            f"s{k} = MatMul (q{k}, kt{k})",
            f"p{k} = Softmax (s{k})",
            f"o{k} = MatMul (p{k}, v{k})",
            f"z{k} = MatMul (o{k}, wo{k})",
            f"zd{k} = Dropout (z{k})",
            f"r{k} = Add (x{k}, zd{k})",
            f"f{k} = MatMul (r{k}, wf{k})",
            f"t{k} = Tanh (f{k})",
            f"x{k + 1} = Add (r{k}, t{k})",
        ]
        shapes |= {f"g{k}_one": (WIDTH,), f"u{k}_zero": (WIDTH,)}
        shapes |= {f"{name}{k}": (WIDTH, WIDTH) for name in ("wq", "wk", "wv", "wo", "wf")}
    lines += ["head = Transpose <perm = [1, 0]> (wte)", f"y = MatMul (x{blocks}, head)"]
    text = "\n".join(lines)
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> gpt (int64[batch, {length}] tokens)'
        f" => (float[batch, {length}, {vocabulary}] y) {{ {text} }}"
    )
    return parameters(model, shapes)


def batches(model: onnx.ModelProto, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """A batch of each size for ``model``; three classes, or a token at each place."""
    rng = np.random.default_rng(1)
    (value,) = model.graph.input
    shape = [d.dim_value for d in value.type.tensor_type.shape.dim][1:]
    found = []
    for size in sizes:
        if value.name == "tokens":
            tokens = rng.integers(0, 11, (size, *shape))
            found.append({"tokens": tokens, "label": (tokens + 1) % 11})
        else:
            found.append({"x": rng.normal(size=(size, *shape)).astype(np.float32), "label": rng.integers(0, 3, size)})
    return found


LOSS = graphc.losses.SoftmaxCrossEntropy(axis=-1)


def compiled(model: onnx.ModelProto, mesh: graphc.Mesh, accumulate: int, **options: Any) -> graphc.Program:
    """A program that trains ``model`` with Adam."""
    options = {"loss": LOSS, "optimizer": graphc.optim.SGD(lr=0.1, momentum=0.9), **options}
    return graphc.compile(model, mesh=mesh, accumulate=accumulate, **options)


def own_part(trainer: graphc.Trainer, batch: Mapping[str, Any]) -> dict[str, Any]:
    """This worker's share of a global batch."""
    rank, size = trainer.data_rank, trainer.data_size
    count = len(next(iter(batch.values())))
    part = slice(count * rank // size, count * (rank + 1) // size)
    return {name: array[part] for name, array in batch.items()}


def run(program: graphc.Program, data: Sequence[Mapping[str, Any]], comm: Communicator | None = None) -> dict[str, Any]:
    """Train a step a batch; returns losses, evaluation, weights and the state's hash."""
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        starts = [len(next(iter(batch.values()))) * trainer.data_rank // trainer.data_size for batch in data]
        losses = [trainer.step(own_part(trainer, b), offset=o)["loss"] for b, o in zip(data, starts, strict=True)]
        return {
            "losses": losses,
            "evaluation": trainer.evaluate([own_part(trainer, batch) for batch in data])["loss"],
            "weights": trainer.trained_values(),
            "hash": trainer.state_sha256(),
            "held": sum(array.nbytes for array in trainer.state.arrays.values()),
        }


def distance(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> float:
    """The largest difference of losses, evaluation and weights."""
    weights = [float(np.abs(found["weights"][n] - wanted["weights"][n]).max()) for n in wanted["weights"]]
    losses = np.abs(np.subtract([*found["losses"], found["evaluation"]], [*wanted["losses"], wanted["evaluation"]]))
    assert found["weights"].keys() == wanted["weights"].keys()
    return max(*weights, float(losses.max()))
