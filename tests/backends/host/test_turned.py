"""Matrices that kernels read by columns: rows that share lines of the cache are computed beside each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from graphc.backend import BACKENDS
from graphc.backends.host import compiler
from tests.backends.host.segment_models import results_of

SHAPES = [
    ((1031, 77), (1, 0), True),
    ((3, 515, 65), (0, 2, 1), True),
    ((600, 3, 41), (1, 2, 0), True),  # neighbours are the middle of three loops
    ((530, 8, 5), (2, 1, 0), False),  # as few as the neighbours are here
    ((65, 1024), (1, 0), True),  # lines 4 KiB apart share a set of the cache
    ((384, 49), (1, 0), False),  # all lines fit
    ((700, 40), (0, 1), False),
    ((5000, 17), (1, 0), True),  # two blocks of neighbours; threads share parts of their lines
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("shape", "perm", "beside"), SHAPES)
def test_a_turned_sum_is_exact(
    shape: tuple[int, ...], perm: tuple[int, ...], beside: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops: list[Any] = []
    plain = compiler.Compiler.compile

    def noting(own: compiler.Compiler, source: Any, made: Any, **options: Any) -> Any:
        loops.append(made)
        return plain(own, source, made, **options)

    monkeypatch.setattr(compiler.Compiler, "compile", noting)
    turned = [shape[k] for k in perm]
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        turn (float{list(shape)} a, float{list(shape)} b, float{turned} c) => (float{turned} y) {{
            s = Add(a, b)  t = Transpose<perm = {list(perm)}>(s)  y = Mul(t, c)
        }}"""
    )
    a, b = (np.random.default_rng(k).standard_normal(shape, np.float32) for k in (0, 1))
    c = np.random.default_rng(2).standard_normal(turned, np.float32)
    backend = BACKENDS["onnxruntime"](threads=threads, spin=False)
    try:
        found = results_of(model, {"a": a, "b": b, "c": c}, backend)
    finally:
        backend.close()
    np.testing.assert_array_equal(found["y"], (a + b).transpose(perm) * c)
    assert [bool(one.beside) for one in loops] == [beside]
