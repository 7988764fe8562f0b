"""DropoutMask: known answers of Philox4x32-10, the decomposition against numpy, and what sharding must not change."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from graphc.ir import IR_VERSION, OPSET
from graphc.ir.builder import Builder
from graphc.ir.ops.random import dropout_scale, philox, philox_uniform
from graphc.passes.legalize.decompose import decompose_graph

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, answer):
    assert tuple(int(w) for w in philox(counter, key)) == answer


def mask_model(shape, *, ratio=0.3, tag="drop", dtype=ir.DataType.FLOAT):
    """A decomposed DropoutMask: int64 inputs seed, step, offset (and ``shape`` unless it is given)."""
    names = ["seed", "step", "offset"]
    inputs = [ir.Value(name=n, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([])) for n in names]
    if shape is None:
        inputs.append(ir.Value(name="shape", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([3])))
    graph = ir.Graph(inputs, [], nodes=[], name="mask", opset_imports={"": OPSET})
    op = Builder(graph)
    wanted = inputs[3] if shape is None else op.const(np.array(shape, dtype=np.int64))
    mask = op.graphc.DropoutMask(wanted, *inputs[:3], ratio=ratio, tag=tag, dtype=int(dtype))
    graph.outputs.append(mask)
    decompose_graph(graph, lambda node: False)
    return ir.to_proto(ir.Model(graph, ir_version=IR_VERSION))


def run(proto, **feeds):
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {k: np.array(v, dtype=np.int64) for k, v in feeds.items()})[0]


def expected(shape, *, seed, step, offset, ratio=0.3, tag="drop"):
    uniform = philox_uniform(shape, seed=seed, step=step, sample_offset=offset, tag=tag)
    return np.where(uniform >= ratio, np.float32(1 / (1 - ratio)), np.float32(0))


@pytest.mark.parametrize("shape", [(4, 3), (5,), (2, 3, 7), (1, 1), ()])
@pytest.mark.parametrize(("seed", "step", "offset"), [(0, 0, 0), (7, 3, 5), (-1, 2**33 + 1, 2**31), (2**40, 1, 1)])
def test_onnxruntime_draws_what_the_numpy_reference_draws(shape, seed, step, offset):
    got = run(mask_model(shape), seed=seed, step=step, offset=offset)
    assert got.shape == shape
    np.testing.assert_array_equal(got, expected(shape, seed=seed, step=step, offset=offset))


def test_onnx_reference_draws_the_same():
    feeds = {"seed": np.int64(3), "step": np.int64(9), "offset": np.int64(2)}
    got = ReferenceEvaluator(mask_model((3, 5))).run(None, {k: np.asarray(v) for k, v in feeds.items()})[0]
    np.testing.assert_array_equal(got, expected((3, 5), seed=3, step=9, offset=2))


def test_a_shape_known_only_at_run_time():
    got = run(mask_model(None), seed=1, step=2, offset=3, shape=[2, 5, 3])
    np.testing.assert_array_equal(got, expected((2, 5, 3), seed=1, step=2, offset=3))


@pytest.mark.parametrize("shares", [(3, 4), (1, 6), (2, 2, 3)])
def test_shares_of_a_batch_draw_the_rows_of_the_whole_batch(shares):
    whole = run(mask_model((7, 5, 3)), seed=11, step=4, offset=0)
    start, parts = 0, []
    for rows in shares:
        parts.append(run(mask_model((rows, 5, 3)), seed=11, step=4, offset=start))
        start += rows
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_seed_step_and_tag_each_change_the_draw():
    base = philox_uniform((64,), seed=1, step=1, tag="a")
    for other in ({"seed": 2, "step": 1, "tag": "a"}, {"seed": 1, "step": 2, "tag": "a"}, {"seed": 1, "step": 1, "tag": "b"}):
        assert np.mean(philox_uniform((64,), **other) == base) < 0.05
    assert np.array_equal(philox_uniform((64,), seed=1, step=1, tag="a"), base)


def test_uniform_numbers_are_uniform_and_uncorrelated():
    draws = philox_uniform((100, 2000), seed=5, step=17, tag="layer")
    counts = np.histogram(draws, bins=50, range=(0, 1))[0]
    chi2 = float(np.sum((counts - draws.size / 50) ** 2) / (draws.size / 50))
    assert 20 < chi2 < 95  # 49 degrees of freedom: both bounds lie beyond 4 standard deviations
    flat = draws.reshape(-1) - 0.5
    for lag in (1, 2, 3, 4, 2000):
        assert abs(np.mean(flat[lag:] * flat[:-lag]) * 12) < 0.01


def test_a_mask_keeps_the_mean_and_the_ratio():
    mask = run(mask_model((200, 500), ratio=0.1), seed=0, step=0, offset=0)
    assert abs(np.mean(mask == 0) - 0.1) < 0.004
    assert abs(mask.mean() - 1) < 0.005


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_extreme_ratios(ratio):
    mask = run(mask_model((8, 8), ratio=ratio), seed=0, step=0, offset=0)
    assert np.all(mask == (1 - ratio))
    assert dropout_scale(1.0) == 0.0


@pytest.mark.parametrize("dtype", [ir.DataType.DOUBLE, ir.DataType.FLOAT16])
def test_other_element_types(dtype):
    mask = run(mask_model((4, 4), ratio=0.5, dtype=dtype), seed=0, step=0, offset=0)
    assert mask.dtype == dtype.numpy()
    assert set(np.unique(mask)) == {0, 2}
