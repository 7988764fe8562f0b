"""Small models and data, and ways to call the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser

MLP = """
<ir_version: 9, opset_import: ["" : 17]>
mlp (float[N,4] x) => (float[N,3] logits)
<float[4,8] w1, float[8] b1, float[8,3] w2, float[3] b2>
{
  h = Gemm (x, w1, b1)
  r = Relu (h)
  logits = Gemm (r, w2, b2)
}
"""

BLOCKED = """
<ir_version: 9, opset_import: ["" : 17]>
blocked (float[N,3,3] x) => (float[N] y)
<float[3,3] w>
{
  h = MatMul (x, w)
  y = Det (h)
}
"""


def parse(text: str, seed: int = 0) -> onnx.ModelProto:
    """A model from text whose initializers get random numbers."""
    header, _, rest = text.partition("<float")
    declared, _, body = rest.partition(">")
    model = onnx.parser.parse_model(header + body)
    generator = np.random.default_rng(seed)
    for item in ("float" + declared).split(", float"):
        shape_text, name = item.removeprefix("float").strip("[").split("] ")
        shape = [int(d) for d in shape_text.split(",")]
        array = (generator.standard_normal(shape) * 0.5).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name.strip()))
    onnx.checker.check_model(model)
    return model


def write_mlp(folder: Path, name: str = "mlp.onnx") -> Path:
    path = folder / name
    onnx.save(parse(MLP), path)
    return path


def blobs(samples: int = 96, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Three well-separated clusters in four dimensions, the label first in the order of nothing in particular."""
    generator = np.random.default_rng(seed)
    label = generator.integers(0, 3, samples)
    centres = np.array([[2, 0, 0, 1], [0, 2, 0, -1], [0, 0, 2, 0]], dtype=np.float32)
    x = centres[label] + 0.3 * generator.standard_normal((samples, 4), dtype=np.float32)
    return {"x": x.astype(np.float32), "label": label.astype(np.int64)}


def write_blobs(folder: Path, name: str = "d.npz", **kwargs: Any) -> Path:
    path = folder / name
    np.savez(path, **blobs(**kwargs))
    return path


def cli(*arguments: object, stdin: bytes | None = None, timeout: float = 200, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run ``graphc`` as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "graphc", *map(str, arguments)],
        input=stdin,
        stdin=None if stdin is not None else subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout,
        env=os.environ | env,
        check=False,
    )
