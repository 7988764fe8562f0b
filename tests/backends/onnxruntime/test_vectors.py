"""Products with vectors: onnxruntime 1.31 fuses a transposition into Aᵀ·x and computes another product."""

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
