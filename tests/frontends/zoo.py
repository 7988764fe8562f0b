"""The nine models that ship inside the onnx package, with small random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from graphc.frontends.onnx import load, write_back
from graphc.passes.legalize.legalize import legalize
from graphc.pipeline import Context

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"

SMALL = ("squeezenet", "shufflenet", "inception_v1")
LARGE = ("bvlc_alexnet", "densenet121", "inception_v2", "resnet50", "vgg19", "zfnet512")
HUGE = ("bvlc_alexnet", "vgg19", "zfnet512")
"""Of 240 to 550 MB. They have no op that the others lack."""


def path_of(name: str) -> Path:
    return FOLDER / f"light_{name}.onnx"


def legal(model: ir.Model) -> ir.Model:
    """A legalised copy."""
    copy = model.clone()
    legalize(copy, Context())
    return copy


def with_random_weights(name: str, seed: int = 0) -> tuple[ir.Model, ir.Model]:
    """(the file with random weights, the legalised model with the same weights)."""
    original = load(path_of(name))
    model = legal(original)
    random = np.random.default_rng(seed)
    values = {}
    for parameter, value in model.graph.initializers.items():
        shape = tuple(value.const_value.shape.numpy())
        fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else 4
        array = random.standard_normal(shape, dtype=np.float32) * np.float32(np.sqrt(2.0 / fan_in))
        values[parameter] = np.abs(array) + np.float32(0.5) if len(shape) == 1 else array
    filled = write_back(original, values)
    return filled, legal(filled)


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs of plain onnxruntime on the CPU, without its graph optimisations."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 2
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))
