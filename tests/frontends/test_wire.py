"""The weights of a file are arrays in its bytes or stay in it; whatever is unusual or damaged is parsed as a whole."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import graphc
from graphc import frontends
from graphc.errors import ModelError
from graphc.frontends import wire

SIDE = 96
"""Of matrices that are large enough to be cut out."""


def _model(*tensors: onnx.TensorProto) -> onnx.ModelProto:
    types = {t.name: t.data_type for t in tensors}
    nodes = [helper.make_node("Identity", [name], [f"{name}.out"]) for name in types]
    outputs = [helper.make_tensor_value_info(f"{t.name}.out", t.data_type, list(t.dims)) for t in tensors]
    graph = helper.make_graph(nodes, "g", [], outputs, initializer=list(tensors))
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def _tensors() -> dict[str, onnx.TensorProto]:
    rng = np.random.default_rng(0)
    square = rng.standard_normal((SIDE, SIDE)).astype(np.float32)
    half = square.astype(ir.DataType.BFLOAT16.numpy()).tobytes()
    return {
        "large": numpy_helper.from_array(square, "large"),
        "small": numpy_helper.from_array(square[0], "small"),
        "typed": helper.make_tensor("typed", TensorProto.FLOAT, [SIDE, SIDE], square.reshape(-1).tolist()),
        "half": helper.make_tensor("half", TensorProto.BFLOAT16, [SIDE, SIDE], half, raw=True),
        "bits": helper.make_tensor("bits", TensorProto.INT4, [200, 200], bytes(range(200)) * 100, raw=True),
        "ids": numpy_helper.from_array(rng.integers(0, 9, (SIDE, SIDE)), "ids"),
    }


def test_every_tensor_is_what_onnx_reads(tmp_path: Path) -> None:
    tensors = _tensors()
    model = _model(*tensors.values())
    onnx.save(model, tmp_path / "m.onnx")
    loaded = frontends.load(tmp_path / "m.onnx").graph.initializers
    assert list(loaded) == list(tensors)
    for name, value in loaded.items():
        assert value.const_value is not None
        want = ir.serde.deserialize_tensor(tensors[name])
        assert (value.const_value.dtype, tuple(value.const_value.shape)) == (want.dtype, tuple(want.shape))
        np.testing.assert_array_equal(value.const_value.numpy(), want.numpy())
        assert value.const_value.tobytes() == want.tobytes()


def test_large_tensors_are_no_copies() -> None:
    data = _model(*_tensors().values()).SerializeToString()
    small, apart = wire.cut(data)
    assert sorted(apart) == [0, 3, 5]  # large, half and ids
    assert len(small) + sum(stop - start for start, stop in apart.values()) < len(data)
    parsed = onnx.ModelProto.FromString(small).graph
    assert [t.name for t in parsed.initializer] == list(_tensors())
    like = {k: ir.serde.deserialize_tensor(parsed.initializer[k]) for k in apart}
    array = wire.tensors(data, apart, like, None)[0].numpy()
    assert np.shares_memory(array, np.frombuffer(data, np.uint8))


def test_what_is_written_back_is_whole(tmp_path: Path) -> None:
    onnx.save(_model(*_tensors().values()), tmp_path / "m.onnx")
    frontends.save(frontends.load(tmp_path / "m.onnx"), tmp_path / "again.onnx")
    again = frontends.load(tmp_path / "again.onnx").graph.initializers
    assert again.keys() == _tensors().keys()
    for name, tensor in again.items():
        np.testing.assert_array_equal(tensor.const_value.numpy(), numpy_helper.to_array(_tensors()[name]))  # type: ignore[union-attr]


def test_a_graph_in_two_pieces_is_read_as_protocol_buffers_read_it() -> None:
    tensors = _tensors()
    first, second = _model(tensors["large"]), onnx.ModelProto()
    second.graph.initializer.append(tensors["ids"])  # fields of a message that occurs twice are joined
    data = first.SerializeToString() + second.SerializeToString()
    small, apart = wire.cut(data)
    assert sorted(apart) == [0, 1]
    assert [t.name for t in onnx.ModelProto.FromString(small).graph.initializer] == ["large", "ids"]
    assert data[slice(*apart[1])] == tensors["ids"].raw_data


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused_as_before(tmp_path: Path, keep: float) -> None:
    data = _model(*_tensors().values()).SerializeToString()
    data = data[: int(len(data) * keep)]
    assert wire.cut(data) == (data, {})
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(ModelError, match="truncated or damaged"):
        frontends.load(tmp_path / "m.onnx")


def test_a_tensor_of_the_wrong_length_is_refused_by_name(tmp_path: Path) -> None:
    tensor = _tensors()["large"]
    tensor.dims[0] += 1
    onnx.save(_model(tensor), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"'large'.*the file is damaged"):
        frontends.load(tmp_path / "m.onnx")


def _heavy(path: Path) -> dict[str, np.ndarray]:
    """Write a model whose two tensors are too many bytes to be kept."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((700, 500)).astype(np.float32) for name in ("a", "b")}
    onnx.save(_model(*(numpy_helper.from_array(array, name) for name, array in arrays.items())), path)
    return arrays


def test_many_weights_stay_in_their_file_which_may_be_deleted_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    arrays = _heavy(path)
    frontends.load(path)  # what is made once
    tracemalloc.start()
    model = frontends.load(path)
    assert tracemalloc.get_traced_memory()[0] < arrays["a"].nbytes / 2
    tracemalloc.stop()
    frontends.save(model, path)
    path.unlink()
    path.write_bytes(b"another file")
    for name, value in model.graph.initializers.items():
        assert value.const_value is not None
        np.testing.assert_array_equal(value.const_value.numpy(), arrays[name])


def test_weights_that_somebody_uses_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[wire.Span] = []
    read = wire.OpenFile.read
    monkeypatch.setattr(wire.OpenFile, "read", lambda self, span: reads.append(span) or read(self, span))
    _heavy(tmp_path / "m.onnx")
    tensor = frontends.load(tmp_path / "m.onnx").graph.initializers["a"].const_value
    assert tensor is not None
    first = tensor.numpy()
    assert tensor.numpy() is first
    assert len(reads) == 1
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


@pytest.mark.parametrize("change", ["other bytes", "fewer bytes"])
def test_a_file_that_is_overwritten_after_it_was_loaded_is_named(tmp_path: Path, change: str) -> None:
    path = tmp_path / "m.onnx"
    _heavy(path)
    model = frontends.load(path)
    with path.open("r+b") as file:
        if change == "fewer bytes":
            file.truncate(1000)
        else:
            file.seek(2000)
            file.write(bytes(1000))
            os.utime(file.fileno(), (0, 0))
    with pytest.raises(ModelError, match=r"m\.onnx has been overwritten since the model was loaded.* load or compile it again"):
        frontends.save(model, tmp_path / "other.onnx")
    assert not (tmp_path / "other.onnx").exists()


def test_copies_that_leave_the_process_take_the_weights_along(tmp_path: Path) -> None:
    arrays = _heavy(tmp_path / "m.onnx")
    tensor = frontends.load(tmp_path / "m.onnx").graph.initializers["a"].const_value
    sent = pickle.loads(pickle.dumps(tensor))
    assert copy.deepcopy(tensor) is tensor
    (tmp_path / "m.onnx").write_bytes(b"")
    np.testing.assert_array_equal(sent.numpy(), arrays["a"])
    assert sent.name == "a"


@pytest.mark.full
def test_files_are_closed_when_their_models_are_gone(tmp_path: Path) -> None:
    _heavy(tmp_path / "m.onnx")
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        frontends.load(tmp_path / "m.onnx")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_an_export_needs_nothing_of_a_file_that_has_been_overwritten(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    held = {
        "first": rng.standard_normal((300, 512)).astype(np.float32) / 16,
        "second": rng.standard_normal((512, 2100)).astype(np.float32) / 16,
        "ids": np.arange(2100) % 7,
    }
    text = """<ir_version: 10, opset_import: ["": 21]>
    g (float[n,300] x) => (float[n,2100] y) {
        h = MatMul(x, first)  z = MatMul(h, second)  shift = Cast<to: int = 1>(ids)  y = Add(z, shift)
    }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in held.items())
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    program = graphc.compile(path, loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1), freeze=["second"])
    x, label = rng.standard_normal((4, 300)).astype(np.float32), np.zeros((4, 2100), np.float32)
    with graphc.Trainer(program, threads=1) as trainer:
        trainer.step({"x": x, "label": label})
        with path.open("r+b") as file:
            file.truncate(10)
        trainer.export(tmp_path / "trained.onnx")
    written = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "trained.onnx").graph.initializer}
    assert not np.array_equal(written["first"], held["first"])
    for name in ("second", "ids"):
        np.testing.assert_array_equal(written[name], held[name])
