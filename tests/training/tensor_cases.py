"""A block stack like GPT-2's in ONNX, with dropout and tied embeddings, and its training on any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

import graphc
from graphc.distributed.communicator import Communicator
from tests.training.compile_once import shared

Array = np.ndarray[Any, Any]

VOCABULARY, WIDTH, HEADS, SEQUENCE = 24, 16, 4, 6
EACH = WIDTH // HEADS


def _block(k: int, source: str) -> tuple[str, dict[str, tuple[int, ...]], str]:
    """One block: its nodes, the shapes of its parameters, and its result."""
    p = f"b{k}_"
    text = f"""
        {p}n1 = LayerNormalization <axis = -1> ({source}, {p}s1, {p}o1)
        {p}f = MatMul ({p}n1, {p}qkv)
        {p}fb = Add ({p}f, {p}qkv_bias)
        {p}q0, {p}k0, {p}v0 = Split <axis = -1, num_outputs = 3> ({p}fb)
        {p}q1 = Reshape ({p}q0, cut) {p}k1 = Reshape ({p}k0, cut) {p}v1 = Reshape ({p}v0, cut)
        {p}q = Transpose <perm = [0, 2, 1, 3]> ({p}q1)
        {p}k = Transpose <perm = [0, 2, 3, 1]> ({p}k1)
        {p}v = Transpose <perm = [0, 2, 1, 3]> ({p}v1)
        {p}a0 = MatMul ({p}q, {p}k)
        {p}a1 = Mul ({p}a0, scale)
        {p}a2 = Add ({p}a1, causal)
        {p}a3 = Softmax <axis = -1> ({p}a2)
        {p}a4 = Dropout ({p}a3, ratio)
        {p}y0 = MatMul ({p}a4, {p}v)
        {p}y1 = Transpose <perm = [0, 2, 1, 3]> ({p}y0)
        {p}y2 = Reshape ({p}y1, join)
        {p}y3 = MatMul ({p}y2, {p}out)
        {p}y4 = Add ({p}y3, {p}out_bias)
        {p}y5 = Dropout ({p}y4, ratio)
        {p}r = Add ({source}, {p}y5)
        {p}n2 = LayerNormalization <axis = -1> ({p}r, {p}s2, {p}o2)
        {p}h0 = MatMul ({p}n2, {p}up)
        {p}h1 = Add ({p}h0, {p}up_bias)
        {p}h2 = Gelu ({p}h1)
        {p}h3 = Dropout ({p}h2, ratio)
        {p}h4 = MatMul ({p}h3, {p}down)
        {p}h5 = Add ({p}h4, {p}down_bias)
        {p}x = Add ({p}r, {p}h5)
    """
    d = WIDTH
    shapes = {"s1": (d,), "o1": (d,), "qkv": (d, 3 * d), "qkv_bias": (3 * d,), "out": (d, d), "out_bias": (d,)}
    shapes |= {"s2": (d,), "o2": (d,), "up": (d, 4 * d), "up_bias": (4 * d,), "down": (4 * d, d), "down_bias": (d,)}
    return text, {f"{p}{name}": shape for name, shape in shapes.items()}, f"{p}x"


def gpt(blocks: int = 2, sequence: int = SEQUENCE) -> ir.Model:
    """logits of the next token, [batch, vocabulary, sequence]."""
    text, shapes, source = "e = Gather (table, tokens) x = Add (e, places)", {"table": (VOCABULARY, WIDTH)}, "x"
    shapes["places"] = (sequence, WIDTH)
    for k in range(blocks):
        one, its, source = _block(k, source)
        text, shapes = text + one, {**shapes, **its}
    text += f"""
        last = LayerNormalization <axis = -1> ({source}, s, o)
        turned = Transpose <perm = [1, 0]> (table)
        scores = MatMul (last, turned)
        logits = Transpose <perm = [0, 2, 1]> (scores)
    """
    shapes |= {"s": (WIDTH,), "o": (WIDTH,)}
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        gpt (int64[N, {sequence}] tokens) => (float[N, {VOCABULARY}, {sequence}] logits) {{ {text} }}"""
    )
    rng = np.random.default_rng(0)
    arrays = {name: (0.3 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    arrays |= {name: 1 + array for name, array in arrays.items() if name in ("s",) or name[3:] in ("s1", "s2")}
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    constants = {
        "cut": np.array([0, 0, HEADS, EACH]),
        "join": np.array([0, 0, WIDTH]),
        "scale": np.float32(EACH**-0.5),
        "causal": np.triu(np.full((sequence, sequence), -1e9, np.float32), 1),
        "ratio": np.float32(0.1),
    }
    for name, value in constants.items():
        node = onnx.helper.make_node("Constant", [], [name], value=onnx.numpy_helper.from_array(np.asarray(value), name))
        model.graph.node.insert(0, node)
    return ir.serde.deserialize_model(model)


@shared
def compiled(mesh: graphc.Mesh, **options: Any) -> graphc.Program:
    optimizer = graphc.optim.parse(options.pop("optimizer", "sgd:lr=0.05,momentum=0.9"))
    loss = options.pop("loss", graphc.losses.SoftmaxCrossEntropy())
    return graphc.compile(gpt(), loss=loss, optimizer=optimizer, mesh=mesh, **options)


def batch(step: int, count: int = 4) -> dict[str, Array]:
    tokens = np.random.default_rng(step).integers(0, VOCABULARY, (count, SEQUENCE))
    return {"tokens": tokens, "label": np.roll(tokens, -1, axis=1)}


def share(trainer: graphc.Trainer, feeds: dict[str, Array]) -> dict[str, Array]:
    """This worker's part of a global batch."""
    each = len(feeds["tokens"]) // trainer.data_size
    return {name: array[trainer.data_rank * each : (trainer.data_rank + 1) * each] for name, array in feeds.items()}


def train(
    comm: Communicator | None,
    mesh: graphc.Mesh,
    steps: int = 4,
    first: int = 0,
    restore: str = "",
    save: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Losses of each step, the loss of an evaluation, the weights, and the hash of the state."""
    with graphc.Trainer(compiled(mesh, **options), comm=comm, threads=1) as trainer:
        if restore:
            trainer.restore(restore)
        losses = [trainer.step(share(trainer, batch(step)))["loss"] for step in range(first, first + steps)]
        if save:
            trainer.save(save)
        evaluated = trainer.evaluate([share(trainer, batch(100))])["loss"]
        weights = {name: array.copy() for name, array in trainer.trained_values().items()}
        if save:
            trainer.export(Path(save) / "trained.onnx")
        return {"losses": losses, "evaluated": evaluated, "weights": weights, "hash": trainer.state_sha256()}
