"""ONNX models without weights: small files that are filled with seeded noise where they run.

    python -m graphc.bench.skeleton strip gpt2.onnx gpt2-skeleton.onnx
    python -m graphc.bench.skeleton fill gpt2-skeleton.onnx gpt2.onnx

Mean and deviation of each weight are kept, so the scales of a norm stay ones and biases stay zeros.
"""

from __future__ import annotations

import argparse
import json
import zlib
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from graphc.atomic_files import whole_file

SMALL = 1024
"""Tensors of fewer elements are kept: shapes, axes, scalars."""

NOTE = "graphc.skeleton: "


def strip(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model in which large weights have no data, but a note with their mean and deviation."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    for tensor in found.graph.initializer:
        if int(np.prod(tensor.dims)) < SMALL or tensor.data_type not in FLOATS:
            continue
        value = numpy_helper.to_array(tensor).astype(np.float64)
        if not is_weight(value):
            continue
        note = json.dumps({"mean": float(value.mean()), "std": float(value.std())})
        for field in ("raw_data", "float_data", "double_data", "int32_data"):
            tensor.ClearField(field)
        tensor.doc_string = NOTE + note
    return found


def is_weight(value: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> bool:
    """Whether noise may take the place of the values: masks and tables of a few numbers are no weights."""
    return bool(np.isfinite(value).all()) and len(np.unique(value)) not in range(2, FEW)


FEW = 17

FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE, onnx.TensorProto.BFLOAT16)


def fill(model: onnx.ModelProto, seed: int = 0) -> onnx.ModelProto:
    """The skeleton with noise of each weight's mean and deviation; the same for the same seed and names."""
    for tensor in model.graph.initializer:
        if not tensor.doc_string.startswith(NOTE):
            continue
        known = json.loads(tensor.doc_string.removeprefix(NOTE))
        rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
        value = rng.standard_normal(tuple(tensor.dims), dtype=np.float32) * np.float32(known["std"]) + np.float32(known["mean"])
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        tensor.CopyFrom(numpy_helper.from_array(value.astype(dtype), tensor.name))
    return model


def main() -> None:
    """Strip or fill one file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("what", choices=("strip", "fill"))
    parser.add_argument("model", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    given = onnx.load(arguments.model)
    found = strip(given) if arguments.what == "strip" else fill(given)
    with whole_file(arguments.target) as file:
        file.write(found.SerializeToString())


if __name__ == "__main__":
    main()
