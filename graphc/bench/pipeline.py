"""Measures a pipeline of two stages with equal halves; ``graphc launch -n 2 -m graphc.bench.pipeline zero-bubble``.

Alone it measures one worker with the same micro-batches. Prints one JSON line for each worker.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import onnx

import graphc
from graphc import Mesh
from graphc.distributed.world import find_world

WIDTH, LAYERS, SAMPLES, MICRO_BATCHES = 768, 8, 512, 8


def equal_layers() -> onnx.ModelProto:
    """A network of equal layers: either half has half the work."""
    lines, value = [], "x"
    for k in range(LAYERS):
        lines += [f"m{k} = MatMul({value}, w{k})", f"h{k} = Tanh(m{k})"]
        value = f"h{k}"
    shape = f"float[batch, {WIDTH}]"
    body = "\n".join([*lines, f"y = Identity({value})"])
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> net ({shape} x) => ({shape} y) {{ {body} }}')
    rng = np.random.default_rng(0)
    for k in range(LAYERS):
        weight = (rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, f"w{k}"))
    return model


def main() -> None:
    """Print the median time of a step in milliseconds."""
    parser = argparse.ArgumentParser(description="Measure a pipeline of equal stages.")
    parser.add_argument("schedule", nargs="?", default="1f1b")
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    stages = find_world().size
    program = graphc.compile(
        equal_layers(),
        loss=graphc.losses.MSE(prediction="y", label="target"),
        optimizer=graphc.optim.SGD(lr=1e-3),
        mesh=Mesh(pipe=stages),
        accumulate=MICRO_BATCHES,
        schedule=given.schedule if stages > 1 else None,
    )
    rng = np.random.default_rng(1)
    batch = {name: rng.standard_normal((SAMPLES, WIDTH), dtype=np.float32) for name in ("x", "target")}
    with graphc.Trainer(program, threads=1) as trainer:
        first = _median(trainer, batch, 3)
        count = max(trainer.comm.allgather_object(max(3, int(given.seconds / first))))  # the same on all workers
        median = _median(trainer, batch, count)
        print(json.dumps({"rank": trainer.rank, "ms": median * 1e3}), flush=True)


def _median(trainer: graphc.Trainer, batch: dict[str, np.ndarray], count: int) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        trainer.step(batch)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
