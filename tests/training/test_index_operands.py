"""Indices and lengths beyond both ends: refused by name before anything runs, and never an access beyond an operand."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest

import graphc
from graphc import losses
from graphc.errors import ExecutionError, FeedError, GraphcError
from graphc.ir.index_operands import INDEX_OPERANDS
from tests.backends.guard_pages import guarded
from tests.fuzz.child import attempt

pytest.importorskip("onnxruntime")

from graphc.backends.onnxruntime import OnnxRuntimeBackend

Array = np.ndarray[Any, Any]
rng = np.random.default_rng(17)


def f(*shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def z(*shape: int) -> Array:
    return np.zeros(shape, np.int64)


Case = tuple[str, str, Mapping[str, Array], int, int]
"""Signature without the index input, body, other feeds, range of the index input ``i``; its shape is in the signature."""


def recurrent(op: str, gates: int, layout: int = 0) -> Case:
    text = f"{{ y = {op} <hidden_size = 2, layout = {layout}> (x, a, r, , i) }}"
    x = f(4, 3, 5) if layout == 0 else f(3, 4, 5)
    shape = "float[4,1,3,2]" if layout == 0 else "float[3,4,1,2]"
    return f"int32[3] i => {shape} y", text, {"x": x, "a": f(1, 2 * gates, 5), "r": f(1, 2 * gates, 2)}, 0, 5


CASES: Mapping[str, Case] = {
    "Gather": ("int64[2,4] i => float[2,4,3] y", "{ y = Gather <axis = 0> (x, i) }", {"x": f(5, 3)}, -5, 5),
    "Gather, int32": ("int32[4] i => float[3,4] y", "{ y = Gather <axis = 1> (x, i) }", {"x": f(3, 5)}, -5, 5),
    "GatherElements": ("int64[3,2] i => float[3,2] y", "{ y = GatherElements <axis = 1> (x, i) }", {"x": f(3, 5)}, -5, 5),
    "GatherElements, int32": ("int32[2,3] i => float[2,3] y", "{ y = GatherElements (x, i) }", {"x": f(5, 3)}, -5, 5),
    "GatherND": ("int64[4,1] i => float[4,3] y", "{ y = GatherND (x, i) }", {"x": f(5, 3)}, -5, 5),
    "GatherND, batched": (
        "int64[2,4,1] i => float[2,4,3] y", "{ y = GatherND <batch_dims = 1> (x, i) }", {"x": f(2, 5, 3)}, -5, 5
    ),
    **{
        f"{op}, {how}": (
            f"int64[2,{3 if op == 'ScatterElements' else 1}] i => float[5,3] y",
            f'{{ y = {op} <reduction = "{how}"> (x, i, u) }}',
            {"x": f(5, 3), "u": f(2, 3)}, -5, 5,
        )
        for op, how in itertools.product(("ScatterElements", "ScatterND"), ("none", "add"))
    },
    "CumSum": ("int64 i => float[4,5] y", "{ y = CumSum (x, i) }", {"x": f(4, 5)}, -2, 2),
    "ReverseSequence": (
        "int64[3] i => float[4,3,2] y", "{ y = ReverseSequence <time_axis = 0, batch_axis = 1> (x, i) }",
        {"x": f(4, 3, 2)}, 0, 5,
    ),
    "ReverseSequence, batch first": (
        "int64[3] i => float[3,4,2] y", "{ y = ReverseSequence <time_axis = 1, batch_axis = 0> (x, i) }",
        {"x": f(3, 4, 2)}, 0, 5,
    ),
    "RNN": recurrent("RNN", 1), "GRU": recurrent("GRU", 3), "LSTM": recurrent("LSTM", 4),
    "MaxUnpool": (
        "int64[1,1,2,2] i => float[1,1,4,4] y", "{ y = MaxUnpool <kernel_shape = [2,2], strides = [2,2]> (x, i) }",
        {"x": f(1, 1, 2, 2)}, 0, 16,
    ),
    "RoiAlign": (
        "int64[2] i => float[2,3,2,2] y", "{ y = RoiAlign <output_height = 2, output_width = 2> (x, r, i) }",
        {"x": f(2, 3, 5, 5), "r": np.array([[0, 0, 3, 3], [1, 1, 4, 4]], np.float32)}, 0, 2,
    ),
    "RotaryEmbedding": (
        "int64[2,3] i => float[2,2,3,4] y", "{ y = RotaryEmbedding (x, c, s, i) }",
        {"x": f(2, 2, 3, 4), "c": f(6, 2), "s": f(6, 2)}, 0, 6,
    ),
    "TensorScatter": (
        "int64[2] i => float[2,2,6,4] y", "{ y = TensorScatter (x, u, i) }", {"x": f(2, 2, 6, 4), "u": f(2, 2, 3, 4)}, 0, 4
    ),
    "Attention": (
        "int64[2] i => float[2,2,3,4] y", "{ y = Attention (x, k, v, , , , i) }",
        {"x": f(2, 2, 3, 4), "k": f(2, 2, 6, 4), "v": f(2, 2, 6, 4)}, 0, 7,
    ),
}  # fmt: skip
"""``op, variant`` → a model that reads the input ``i`` as indices or lengths."""

NOT_IN_ONNXRUNTIME = {"CumProd"}


def parse(name: str, body: str = "", opset: int = 24) -> onnx.ModelProto:
    signature, text, feeds, _, _ = CASES[name]
    inputs = ", ".join(f"float{list(a.shape)} {n}" for n, a in feeds.items())
    index, _, output = signature.partition(" => ")
    head = f'<ir_version: 10, opset_import: ["": {opset}]> net ({inputs}, {index}) => ({output})'
    return onnx.parser.parse_model(head + (body or text))


def index_of(model: onnx.ModelProto) -> Array:
    value = next(v for v in model.graph.input if v.name == "i").type.tensor_type
    return np.ones([d.dim_value for d in value.shape.dim], onnx.helper.tensor_dtype_to_np_dtype(value.elem_type))


def beyond(low: int, high: int, dtype: np.dtype[Any]) -> list[int]:
    info = np.iinfo(dtype)
    return [low - 1, low - 1000, low - 10**6, int(info.min), high, high + 1000, high + 10**6, int(info.max)]


def run_beside_closed_pages(name: str) -> None:
    """Run the op in onnxruntime with indices inside and beyond their range, everything beside closed pages."""
    _, _, feeds, low, high = CASES[name]
    model = parse(name, opset=16 if name == "RoiAlign" else 24)
    good, backend = index_of(model), OnnxRuntimeBackend(threads=1, spin=False)
    out = model.graph.output[0]
    shape = [d.dim_value for d in out.type.tensor_type.shape.dim]
    for value, whole in itertools.product((*beyond(low, high, good.dtype), low, high - 1), (True, False)):
        index = good.copy()
        index.reshape(-1)[slice(None) if whole else slice(-1, None)] = value
        for side in ("before", "behind"):
            inputs = {n: guarded(a, side) for n, a in {**feeds, "i": index}.items()}
            outputs = {out.name: guarded(np.zeros(shape, np.float32), side)}
            run = backend.bind_segment(model, inputs, outputs)
            if low <= value < high:
                run()
                continue
            with pytest.raises(ExecutionError) as found:
                run()
            assert found.value.op, found.value


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(CASES))
def test_onnxruntime_stays_within_the_operands(name: str) -> None:
    outcome = attempt(lambda: run_beside_closed_pages(name), seconds=120)
    assert outcome.ending == "result", f"{outcome.ending}: {outcome.detail}"


GRID, OFFSETS = "float[1,2,3,4] x, float[1,2,2,2] i", "float[1,1,3,3] x, float[1,8,2,2] i, float[1,1,2,2] a"
CROP = "s = Constant <value = float[4] {1.0, 1.0, 2.0, 2.0}> () y = Resize <coordinate_transformation_mode ="

COORDINATES: Mapping[str, tuple[str, str, Array]] = {
    **{
        f"GridSample, {mode}, {padding}, {corners}": (
            f"({GRID}) => (float[1,2,2,2] y)",
            f'y = GridSample <mode = "{mode}", padding_mode = "{padding}", align_corners = {corners}> (x, i)', f(1, 2, 2, 2),
        )
        for mode, padding, corners in itertools.product(
            ("linear", "nearest", "cubic"), ("zeros", "border", "reflection"), (0, 1)
        )
    },
    "DeformConv": (f"({OFFSETS}) => (float[1,1,2,2] y)", "y = DeformConv <kernel_shape = [2, 2]> (x, a, i)", f(1, 8, 2, 2)),
    **{
        f"RoiAlign, {mode}, {ratio}": (
            "(float[2,3,5,5] x, float[2,4] i, int64[2] b) => (float[2,3,2,2] y)",
            f'y = RoiAlign <mode = "{mode}", output_height = 2, output_width = 2, sampling_ratio = {ratio}> (x, i, b)', f(2, 4),
        )
        for mode, ratio in itertools.product(("avg", "max"), (0, 2))
    },
    "MaxRoiPool": (
        "(float[2,3,5,5] x, float[2,5] i) => (float[2,3,2,2] y)", "y = MaxRoiPool <pooled_shape = [2, 2]> (x, i)", f(2, 5)
    ),
    **{
        f"Resize, {mode}": (
            "(float[1,1,3,3] x, float[8] i) => (float[1,1,6,6] y)", f'{CROP} "tf_crop_and_resize", mode = "{mode}"> (x, i, s)',
            np.array([0, 0, 0, 0, 1, 1, 1, 1], np.float32),
        )
        for mode in ("linear", "nearest", "cubic")
    },
}  # fmt: skip
"""Ops whose operand ``i`` says where to read: anything may be given, and nothing beyond the operands is read."""


def sample_beside_closed_pages(name: str) -> None:
    head, body, good = COORDINATES[name]
    opset = 16 if name.startswith(("RoiAlign", "MaxRoiPool")) else 22
    text = f'<ir_version: 10, opset_import: ["": {opset}]> net {head} {{ {body} }}'
    model, backend = onnx.parser.parse_model(text), OnnxRuntimeBackend(threads=1, spin=False)
    sizes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*model.graph.input, *model.graph.output)}
    for value, whole in itertools.product((np.nan, np.inf, -np.inf, 1e30, -1e30, 1e6, -1e6, 5.0, -5.0), (True, False)):
        index = good.copy()
        index.reshape(-1)[slice(None) if whole else slice(-1, None)] = value
        for side in ("before", "behind"):
            feeds = {n: np.ones(s, np.int64 if n == "b" else np.float32) for n, s in sizes.items() if n not in ("y", "i")}
            inputs = {n: guarded(a, side) for n, a in {**feeds, "i": index}.items()}
            outputs = {"y": guarded(np.zeros(sizes["y"], np.float32), side)}
            try:
                backend.bind_segment(model, inputs, outputs)()
            except ExecutionError:
                continue  # refused: a region of another batch, say


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(COORDINATES))
def test_onnxruntime_samples_within_the_operands(name: str) -> None:
    outcome = attempt(lambda: sample_beside_closed_pages(name), seconds=120)
    assert outcome.ending == "result", f"{outcome.ending}: {outcome.detail}"


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_bad_index_is_refused_by_name_and_changes_nothing(name: str) -> None:
    _, text, feeds, low, high = CASES[name]
    weighted = text.replace("y =", "made =").replace("}", " y = Mul (made, w) }")
    model = parse(name, weighted)
    good = index_of(model)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1, np.float32), "w"))
    label = np.zeros([d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim], np.float32)
    backend = "numpy" if name == "RoiAlign" else "onnxruntime"  # onnxruntime lacks the RoiAlign of the legal opset
    optimizer = graphc.optim.SGD(lr=0.1)
    program = graphc.compile(model, loss=losses.MSE(), optimizer=optimizer, train=["w"], backend=backend)
    with graphc.Trainer(program, threads=1) as trainer:
        before = trainer.state_sha256()
        for value in beyond(low, high, good.dtype):
            bad = good.copy()
            bad.reshape(-1)[-1] = value
            with pytest.raises(FeedError, match=rf"{value} at i\[.*\] is outside {low} … {high - 1}, the range of the indices"):
                trainer.step({**feeds, "i": bad, "label": label})
            assert trainer.state_sha256() == before
        assert np.isfinite(trainer.step({**feeds, "i": good, "label": label})["loss"])


@pytest.mark.parametrize("backend", ["onnxruntime", "numpy"])
def test_a_computed_index_that_is_wrong_names_the_node_and_the_feeds_behind_it(backend: str) -> None:
    text = "{ one = Constant <value = int64 {1}> ()  j = Add (i, one)  h = Gather (x, j)  y = Mul (h, w) }"
    model = parse("Gather", text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1, np.float32), "w"))
    loss, optimizer = losses.MSE(prediction="y"), graphc.optim.Adam(lr=0.1)
    with graphc.Trainer(graphc.compile(model, loss=loss, optimizer=optimizer, backend=backend), threads=1) as trainer:
        before = trainer.state_sha256()
        feeds = {"x": f(5, 3), "label": np.zeros((2, 4, 3), np.float32)}
        for value in (4, -7):
            with pytest.raises(ExecutionError, match=r"step 0: .*failed.*no update has changed anything") as found:
                trainer.step({**feeds, "i": np.full((2, 4), value)})
            assert found.value.__cause__ is not None
            assert trainer.state_sha256() == before
            if backend == "onnxruntime":
                assert found.value.op == "Gather"
                assert "look at the feeds behind it: i [2, 4]" in str(found.value)
            with pytest.raises(GraphcError):
                trainer.evaluate([{**feeds, "i": np.full((2, 4), value)}])
        trainer.step({**feeds, "i": np.zeros((2, 4), np.int64)})


SHAPES = frozenset({
    "AffineGrid", "BlackmanWindow", "CenterCropPad", "Col2Im", "ConstantOfShape", "DFT", "Expand", "HammingWindow",
    "HannWindow", "Loop", "MelWeightMatrix", "NonMaxSuppression", "Pad", "Reshape", "Resize", "STFT", "Slice", "Split",
    "SplitToSequence",
    "Squeeze", "Tile", "TopK", "Unsqueeze", *(s.name for s in onnx.defs.get_all_schemas() if s.name.startswith("Reduce")),
})  # fmt: skip
"""Ops whose integer operands decide sizes: constants of a plan; where they are data, onnxruntime runs and checks the model."""

NUMBERS = frozenset({
    "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "DequantizeLinear", "OneHot", "QLinearConv",
    "TfIdfVectorizer", "Trilu",
})  # fmt: skip
"""Ops that compute with integers, or compare them: every value is allowed."""

SEQUENCES = frozenset({"SequenceAt", "SequenceErase", "SequenceInsert"})
"""Positions in a list, which no plan holds: the backend runs and checks the model."""

LABELS = frozenset({"NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"})
"""Losses over classes: ``label_checks`` has their range."""


def test_every_operand_of_integers_is_known() -> None:
    """A new op of ONNX with such an operand fails here until somebody says what it is."""
    found = set()
    for schema in onnx.defs.get_all_schemas():
        integers = [p for p in schema.inputs if {"tensor(int64)", "tensor(int32)"} & set(p.types)]
        if schema.domain == "" and not schema.deprecated and any("tensor(float)" not in p.types for p in integers):
            found.add(schema.name)
    assert found <= {*INDEX_OPERANDS, *SHAPES, *NUMBERS, *SEQUENCES, *LABELS}
    assert {name.partition(",")[0] for name in CASES} == set(INDEX_OPERANDS) - NOT_IN_ONNXRUNTIME
