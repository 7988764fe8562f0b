"""What graph optimisations of onnxruntime 1.31 misread: Aᵀ·x, and ops on some axes of a transposed value."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

from graphc.ir.text import from_text
from graphc.training.inference import run_model


@pytest.mark.parametrize(("a", "x"), [((4, 6), (4,)), ((2, 4, 6), (4,)), ((4, 6), (4, 2)), ((2, 4, 6), (2, 4, 3))], ids=str)
def test_a_transposed_matrix_times_a_vector(a: tuple[int, ...], x: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("a", a), ("x", x))}
    perm = [*range(len(a) - 2), len(a) - 1, len(a) - 2]
    expected = feeds["a"].transpose(perm) @ feeds["x"]
    model = from_text(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        main (float{list(a)} a, float{list(x)} x) => (float{list(expected.shape)} y)
        {{ t = Transpose <perm = {perm}> (a)  y = MatMul (t, x) }}"""
    )
    np.testing.assert_allclose(run_model(model, feeds)["y"], expected, rtol=1e-5, atol=1e-6)


SOME_AXES = {
    "Pad": "a = Constant <value = int64[1] {1}> () p = Constant <value = int64[2] {1, 2}> () u = Pad (t, p, , a)",
    "Resize": 's = Constant <value = float[2] {2.0, 3.0}> () u = Resize <axes = [1, 2], mode = "nearest"> (t, , s)',
    "CenterCropPad": "s = Constant <value = int64[1] {2}> () u = CenterCropPad <axes = [1]> (t, s)",
}


@pytest.mark.parametrize("op", SOME_AXES)
def test_some_axes_of_a_transposed_value(op: str) -> None:
    model = from_text(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        main (float[2,3,4,4] x) => (y)
        {{ t = Transpose <perm = [0, 2, 3, 1]> (x)  {SOME_AXES[op]}  y = Transpose <perm = [0, 3, 1, 2]> (u) }}"""
    )
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 3, 4, 4)).astype(np.float32)}
    wanted = run_model(model, feeds, backend="numpy")["y"]
    np.testing.assert_array_equal(run_model(model, feeds, backend="onnxruntime")["y"], wanted)
