"""Five captured training steps of small networks on a GPU, beside the same steps on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

STEPS = 5
FLOAT32, BFLOAT16 = 1e-3, 2e-2
"""Most relative difference of a loss."""

HEAD = '<ir_version: 10, opset_import: ["": 21]> net '

MLP = """(float[batch, 64] input) => (float[batch, 10] logits) {
  a = Gemm<transB=1>(input, w0, b0)  h = Relu(a)
  c = Gemm<transB=1>(h, w1, b1)  g = Relu(c)
  logits = Gemm<transB=1>(g, w2, b2)
}"""
MLP_SIZES = {"w0": (256, 64), "b0": (256,), "w1": (256, 256), "b1": (256,), "w2": (10, 256), "b2": (10,)}

WIDTH, HEADS, LENGTH, WORDS = 64, 2, 32, 96
BLOCK = """
  n{k} = LayerNormalization<axis=-1>(x{k}, s{k}, t{k})
  p{k} = MatMul(n{k}, wp{k})  pb{k} = Add(p{k}, bp{k})
  q{k}, k{k}, v{k} = Split<axis=2, num_outputs=3>(pb{k})
  qh{k} = Reshape(q{k}, heads)  kh{k} = Reshape(k{k}, heads)  vh{k} = Reshape(v{k}, heads)
  qt{k} = Transpose<perm=[0,2,1,3]>(qh{k})  kt{k} = Transpose<perm=[0,2,3,1]>(kh{k})  vt{k} = Transpose<perm=[0,2,1,3]>(vh{k})
  qs{k} = Mul(qt{k}, scale)  sc{k} = MatMul(qs{k}, kt{k})  sm{k} = Add(sc{k}, mask)  pr{k} = Softmax<axis=-1>(sm{k})
  o{k} = MatMul(pr{k}, vt{k})  ot{k} = Transpose<perm=[0,2,1,3]>(o{k})  of{k} = Reshape(ot{k}, flat)
  wo{k} = MatMul(of{k}, wq{k})  r{k} = Add(x{k}, wo{k})
  m{k} = LayerNormalization<axis=-1>(r{k}, u{k}, y{k})
  f{k} = MatMul(m{k}, wf{k})  fb{k} = Add(f{k}, bf{k})  g{k} = Gelu<approximate="tanh">(fb{k})  d{k} = MatMul(g{k}, wd{k})
  x{next} = Add(r{k}, d{k})"""


def mlp(note: Callable[[str], None]) -> dict[str, Any]:
    """Train a network of three layers in float32."""
    rng = np.random.default_rng(0)
    feeds = {"input": rng.standard_normal((32, 64), dtype=np.float32), "label": rng.integers(0, 10, 32)}
    return beside_the_cpu(note, model(MLP, MLP_SIZES), feeds, 1, (None,))


def gpt(note: Callable[[str], None]) -> dict[str, Any]:
    """Train a transformer of two layers in float32 and in bfloat16."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, WORDS, (4, LENGTH))
    return beside_the_cpu(note, transformer(), {"input": tokens, "label": np.roll(tokens, -1, 1)}, 2, (None, "bf16"))


def model(text: str, sizes: Mapping[str, tuple[int, ...]], more: Sequence[onnx.TensorProto] = ()) -> onnx.ModelProto:
    """The model with seeded parameters of these sizes."""
    rng = np.random.default_rng(1)
    found = onnx.parser.parse_model(HEAD + text)
    for name, size in sizes.items():
        value = rng.standard_normal(size, dtype=np.float32) * (1.0 / np.sqrt(size[-1]))
        found.graph.initializer.append(numpy_helper.from_array((value + (name[0] in "su")).astype(np.float32), name))
    found.graph.initializer.extend(more)
    return found


def transformer() -> onnx.ModelProto:
    """A small GPT-2 with two layers."""
    blocks = "".join(BLOCK.format(k=k, next=k + 1) for k in range(2))
    text = f"""(int64[batch, {LENGTH}] input) => (float[batch, {LENGTH}, {WORDS}] logits) {{
  e = Gather(words, input)  x0 = Add(e, places){blocks}
  logits = MatMul(x2, head)
}}"""
    sizes: dict[str, tuple[int, ...]] = {"words": (WORDS, WIDTH), "places": (1, LENGTH, WIDTH), "head": (WIDTH, WORDS)}
    for k in range(2):
        sizes |= {f"{name}{k}": (WIDTH,) for name in "stuy"}
        sizes |= {f"wp{k}": (WIDTH, 3 * WIDTH), f"bp{k}": (3 * WIDTH,), f"wq{k}": (WIDTH, WIDTH)}
        sizes |= {f"wf{k}": (WIDTH, 4 * WIDTH), f"bf{k}": (4 * WIDTH,), f"wd{k}": (4 * WIDTH, WIDTH)}
    mask = np.where(np.tri(LENGTH, dtype=bool), 0, np.finfo(np.float32).min).astype(np.float32)
    constants = {
        "heads": np.array([0, 0, HEADS, WIDTH // HEADS]), "flat": np.array([0, 0, WIDTH]), "mask": mask,
        "scale": np.array((WIDTH // HEADS) ** -0.5, np.float32),
    }  # fmt: skip
    return model(text, sizes, [numpy_helper.from_array(value, name) for name, value in constants.items()])


def beside_the_cpu(
    note: Callable[[str], None],
    network: onnx.ModelProto,
    feeds: Mapping[str, Any],
    last_axis: int,
    precisions: Sequence[str | None],
) -> dict[str, Any]:
    """Losses of the steps on both backends.

    Raises:
        AssertionError: they differ, or a part of a step was not captured.
    """
    from graphc.errors import MissingExtraError

    try:
        note("steps on the CPU")
        expected, _ = losses(network, feeds, last_axis, "auto", None)
    except MissingExtraError:
        expected, _ = losses(network, feeds, last_axis, "numpy", None)
    found: dict[str, Any] = {"losses_cpu": expected}
    details = []
    for precision in precisions:
        name = precision or "fp32"
        note(f"steps in {name} on the GPU")
        got, refusals = losses(network, feeds, last_axis, "cupy", precision)
        found[f"losses_{name}"] = got
        assert not refusals, f"a step in {name} is not captured as a CUDA graph: {'; '.join(refusals)}"
        most = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(got, expected, strict=True))
        bound = BFLOAT16 if precision else FLOAT32
        assert most <= bound, f"losses in {name} are {got}, on the CPU {expected}"
        details.append(f"{name}: losses within {most:.1e} of the CPU's (at most {bound:g})")
    return {**found, "detail": f"{STEPS} steps, captured; {'; '.join(details)}"}


def losses(
    network: onnx.ModelProto, feeds: Mapping[str, Any], last_axis: int, backend: str, precision: str | None
) -> tuple[list[float], list[str]]:
    """The loss of every step, and why parts of a step were not captured."""
    import graphc

    loss = graphc.losses.SoftmaxCrossEntropy(axis=last_axis)
    program = graphc.compile(network, loss=loss, optimizer=graphc.optim.SGD(lr=0.1), backend=backend, precision=precision)
    with warnings.catch_warnings(action="ignore"), graphc.Trainer(program) as trainer:
        assert backend == "auto" or trainer.backend.name == backend
        found = [float(trainer.step(dict(feeds))["loss"]) for _ in range(STEPS)]
        runs = [run for executor in trainer.plans.training.values() for run in executor.runs]
        return found, [text for run in runs if (text := getattr(run, "refusal", None))]
