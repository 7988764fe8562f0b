"""Models whose activations are divided along the sequence, and their training on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

import graphc
from graphc.distributed.communicator import Communicator
from tests.training import tensor_cases
from tests.training.compile_once import shared
from tests.training.tensor_cases import EACH, HEADS, VOCABULARY, WIDTH

TOKENS, BLOCKS = 8, 1
"""Length of the sequences, which 2 and 4 divide; blocks of a transformer."""

Array = np.ndarray[Any, Any]


def gpt() -> ir.Model:
    """Norms before the products, dropout, tied embeddings."""
    return tensor_cases.gpt(BLOCKS, TOKENS)


def _encoder_block(k: int, source: str) -> tuple[str, dict[str, tuple[int, ...]], str]:
    p, d = f"b{k}_", WIDTH
    text = f"""
        {p}q0 = MatMul ({source}, {p}wq) {p}k0 = MatMul ({source}, {p}wk) {p}v0 = MatMul ({source}, {p}wv)
        {p}q1 = Reshape ({p}q0, cut) {p}k1 = Reshape ({p}k0, cut) {p}v1 = Reshape ({p}v0, cut)
        {p}q = Transpose <perm = [0, 2, 1, 3]> ({p}q1)
        {p}k = Transpose <perm = [0, 2, 3, 1]> ({p}k1)
        {p}v = Transpose <perm = [0, 2, 1, 3]> ({p}v1)
        {p}a0 = MatMul ({p}q, {p}k)
        {p}a1 = Mul ({p}a0, scale)
        {p}a2 = Softmax <axis = -1> ({p}a1)
        {p}a3 = Dropout ({p}a2, ratio)
        {p}y0 = MatMul ({p}a3, {p}v)
        {p}y1 = Transpose <perm = [0, 2, 1, 3]> ({p}y0)
        {p}y2 = Reshape ({p}y1, join)
        {p}y3 = MatMul ({p}y2, {p}out)
        {p}y4 = Add ({p}y3, {p}out_bias)
        {p}y5 = Dropout ({p}y4, ratio)
        {p}r = Add ({source}, {p}y5)
        {p}n1 = LayerNormalization <axis = -1> ({p}r, {p}s1, {p}o1)
        {p}h0 = MatMul ({p}n1, {p}up)
        {p}h1 = Add ({p}h0, {p}up_bias)
        {p}h2 = Gelu ({p}h1)
        {p}h3 = MatMul ({p}h2, {p}down)
        {p}h4 = Add ({p}h3, {p}down_bias)
        {p}h5 = Dropout ({p}h4, ratio)
        {p}t = Add ({p}n1, {p}h5)
        {p}x = LayerNormalization <axis = -1> ({p}t, {p}s2, {p}o2)
    """
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("wq", "wk", "wv", "out"), (d, d))
    shapes |= {"up": (d, 4 * d), "up_bias": (4 * d,), "down": (4 * d, d)}
    shapes |= dict.fromkeys(("out_bias", "down_bias", "s1", "o1", "s2", "o2"), (d,))
    return text, {p + name: shape for name, shape in shapes.items()}, f"{p}x"


def bert() -> ir.Model:
    """Norms behind the residual sums; classes of a sentence, [batch, 3], from its first token."""
    text, source = "e0 = Gather (table, tokens) e1 = Add (e0, places) e2 = LayerNormalization <axis = -1> (e1, s, o)", "e3"
    text += " e3 = Dropout (e2, ratio)"
    shapes: dict[str, tuple[int, ...]] = {"table": (VOCABULARY, WIDTH), "places": (TOKENS, WIDTH), "s": (WIDTH,), "o": (WIDTH,)}
    for k in range(BLOCKS):
        one, its, source = _encoder_block(k, source)
        text, shapes = text + one, {**shapes, **its}
    text += f"""
        first = Gather <axis = 1> ({source}, zero)
        pooled0 = MatMul (first, pool)
        pooled = Tanh (pooled0)
        logits = MatMul (pooled, head)
    """
    shapes |= {"pool": (WIDTH, WIDTH), "head": (WIDTH, 3)}
    return model(f"(int64[N, {TOKENS}] tokens) => (float[N, 3] logits)", text, shapes)


def flat() -> ir.Model:
    """Blocks of products over tokens [batch · sequence, features]."""
    text, source = "x0 = Reshape (x, flat)", "x0"
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(2):
        p = f"b{k}_"
        text += f"""
            {p}h0 = Gemm ({source}, {p}up, {p}up_bias)
            {p}h1 = Relu ({p}h0)
            {p}h2 = Gemm ({p}h1, {p}down, {p}down_bias)
            {p}h3 = Dropout ({p}h2, ratio)
            {p}r = Add ({p}h3, {source})
            {p}x = RMSNormalization <axis = -1> ({p}r, {p}s)
        """
        shapes |= {f"{p}up": (WIDTH, 64), f"{p}up_bias": (64,), f"{p}down": (64, WIDTH), f"{p}down_bias": (WIDTH,)}
        shapes[f"{p}s"] = (WIDTH,)
        source = f"{p}x"
    text += f"y = Reshape ({source}, parted) z = ReduceMean <keepdims = 0> (y, one) logits = MatMul (z, head)"
    shapes["head"] = (WIDTH, 3)
    return model(f"(float[N, {TOKENS}, {WIDTH}] x) => (float[N, 3] logits)", text, shapes, opset=23)


def model(signature: str, text: str, shapes: dict[str, tuple[int, ...]], opset: int = 21) -> ir.Model:
    """A model from text, with random parameters; norms begin near 1."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> net {signature} {{ {text} }}')
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        array = 0.3 * rng.standard_normal(shape) + (name.rpartition("_")[2] in ("s", "s1", "s2"))
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    constants: dict[str, Any] = {
        "cut": np.array([0, 0, HEADS, EACH]),
        "join": np.array([0, 0, WIDTH]),
        "flat": np.array([-1, WIDTH]),
        "parted": np.array([-1, TOKENS, WIDTH]),
        "scale": np.float32(EACH**-0.5),
        "ratio": np.float32(0.1),
        "zero": np.int64(0),
        "one": np.array([1]),
    }
    used = {name for node in proto.graph.node for name in node.input}
    for name in sorted(used & constants.keys()):
        tensor = onnx.numpy_helper.from_array(np.asarray(constants[name]), name)
        proto.graph.node.insert(0, onnx.helper.make_node("Constant", [], [name], value=tensor))
    return ir.serde.deserialize_model(proto)


def tokens(step: int, count: int) -> dict[str, Array]:
    """A batch for :func:`gpt`: the next token is to be predicted."""
    found = np.random.default_rng(step).integers(0, VOCABULARY, (count, TOKENS))
    return {"tokens": found, "label": np.roll(found, -1, axis=1)}


def sentences(step: int, count: int) -> dict[str, Array]:
    """A batch for :func:`bert`."""
    return {"tokens": tokens(step, count)["tokens"], "label": np.arange(count) % 3}


def features(step: int, count: int) -> dict[str, Array]:
    """A batch for :func:`flat`."""
    x = np.random.default_rng(step).standard_normal((count, TOKENS, WIDTH)).astype(np.float32)
    return {"x": x, "label": np.arange(count) % 3}


CASES: dict[str, tuple[Callable[[], ir.Model], Callable[[int, int], dict[str, Array]]]] = {
    "gpt": (gpt, tokens),
    "bert": (bert, sentences),
    "flat": (flat, features),
}
"""Name → the model, and its batch of a step and a size."""

SIZES = (6, 3, 6)
"""Samples of the steps; of the second, replicas have unequally many."""


@shared
def compiled(name: str, mesh: graphc.Mesh, shard: str | None = "auto:sequence", **options: Any) -> graphc.Program:
    """The program of a model; ``shard`` is left out without a tensor axis."""
    optimizer = graphc.optim.parse(options.pop("optimizer", "sgd:lr=0.05,momentum=0.9"))
    given = {"shard": [shard]} if shard is not None and mesh.tensor > 1 else {}
    return graphc.compile(
        CASES[name][0](), loss=graphc.losses.SoftmaxCrossEntropy(axis=1), optimizer=optimizer, mesh=mesh, **given, **options
    )


def train(comm: Communicator | None, name: str, mesh: graphc.Mesh, **options: Any) -> dict[str, Any]:
    """Losses of each step, the loss of an evaluation, the weights, and the hash of the state."""
    make = CASES[name][1]
    with graphc.Trainer(compiled(name, mesh, **options), comm=comm, threads=1) as trainer:

        def mine(count: int) -> slice:
            return slice(*(-(-count * k // trainer.data_size) for k in (trainer.data_rank, trainer.data_rank + 1)))

        def share(feeds: dict[str, Array]) -> dict[str, Array]:
            return {key: array[mine(len(array))] for key, array in feeds.items()}

        losses = [trainer.step(share(make(step, size)), offset=mine(size).start)["loss"] for step, size in enumerate(SIZES)]
        evaluated = trainer.evaluate([share(make(100, 6))])["loss"]
        weights = {key: array.copy() for key, array in trainer.trained_values().items()}
        return {"losses": losses, "evaluated": evaluated, "weights": weights, "hash": trainer.state_sha256()}
