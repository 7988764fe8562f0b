"""Reading and writing ONNX files: errors that help, external data, and trained values in the user's own file."""

from __future__ import annotations

import io
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphc.errors import ModelError
from graphc.frontends import writing
from graphc.frontends.onnx import atomic_write, load, save, write_back
from tests.frontends.zoo import run
from tests.passes.legalize.legalize_cases import build, normal


def linear(opset: int = 17) -> onnx.ModelProto:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "b"], ["y"])]
    return build(nodes, {"x": [2, 30]}, {"y": [2, 20]}, {"w": normal(30, 20), "b": normal(20, seed=1)}, opset=opset)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    onnx.save(linear(), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.fixture
def external(tmp_path: Path) -> Path:
    onnx.save(
        linear(),
        tmp_path / "big.onnx",
        save_as_external_data=True,
        location="big.data",
        size_threshold=100,
        convert_attribute=False,
    )
    assert (tmp_path / "big.data").stat().st_size >= 30 * 20 * 4
    return tmp_path / "big.onnx"


X = {"x": normal(2, 30, seed=9)}


# Reading ---------------------------------------------------------------------------------------------------------------


def test_every_kind_of_source(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (want,) = run(load(file), X)
    model = load(str(file))
    assert load(model) is model
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    for source in (model, onnx.load(file), "-"):
        np.testing.assert_array_equal(run(load(source), X)[0], want)


def zipped() -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr("data.pkl", b"weights")
    return memory.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"hello, this is not a model\n" * 20, "text file"),
        (zipped(), "zip archive, perhaps a PyTorch"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (bytes(range(255, 0, -1)) * 9, "is no ONNX model"),
        (b"\x08\x08", "it has no graph"),
    ],
)
def test_files_that_are_no_models(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_truncated_files(file: Path, part: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(ModelError, match="truncated"):
        load(file)


def test_no_such_file_names_the_nearest(file: Path) -> None:
    with pytest.raises(ModelError, match=r"no such file: .*modle\.onnx; did you mean 'model\.onnx'"):
        load(file.with_name("modle.onnx"))
    with pytest.raises(ModelError, match="is a folder"):
        load(file.parent)


def test_files_from_the_future(file: Path) -> None:
    proto = linear()
    proto.opset_import[0].version = 99
    with pytest.raises(ModelError, match=r"uses opset 99; the newest known here is \d+"):
        load(proto)
    proto = linear()
    proto.ir_version = 99
    with pytest.raises(ModelError, match="format version 99"):
        load(proto)


def test_an_initializer_with_too_little_data_is_named() -> None:
    proto = linear()
    proto.graph.initializer[0].raw_data = proto.graph.initializer[0].raw_data[:-4]
    with pytest.raises(ModelError, match=r"initializer 'w' of shape \[30, 20\] holds 2396 bytes instead of 2400"):
        load(proto)


# External data -----------------------------------------------------------------------------------------------------------


def test_external_data_is_mapped_not_read(external: Path) -> None:
    model = load(external)
    tensor = model.graph.initializers["w"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    np.testing.assert_array_equal(tensor.numpy(), normal(30, 20))
    assert not tensor.numpy().flags.owndata


def relocate(path: Path, location: str) -> None:
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    onnx.save(proto, path)


def outside(path: Path) -> None:
    folder = path.parent.parent / "elsewhere"
    folder.mkdir()
    (path.parent / "big.data").rename(folder / "big.data")
    relocate(path, "../elsewhere/big.data")


def absolute(path: Path) -> None:
    relocate(path, str(path.parent / "big.data"))


def by_symlink(path: Path) -> None:
    target = path.parent.parent / "secret"
    (path.parent / "big.data").rename(target)
    (path.parent / "big.data").symlink_to(target)


def hard_link(path: Path) -> None:
    os.link(path.parent / "big.data", path.parent / "other")


def missing(path: Path) -> None:
    (path.parent / "big.data").unlink()


def short(path: Path) -> None:
    os.truncate(path.parent / "big.data", 2000)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (outside, "outside the folder of the model"),
        (absolute, "outside the folder of the model"),
        (by_symlink, "outside the folder of the model"),
        (hard_link, "several hard links"),
        (missing, "is missing; put the file beside the model"),
        (short, "is too short: 2400 bytes are needed, the file has 2000"),
    ],
)
def test_external_data_is_refused(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    path = folder / "big.onnx"
    onnx.save(linear(), path, save_as_external_data=True, location="big.data", size_threshold=100)
    damage(path)
    with pytest.raises(ModelError, match=message) as caught:
        load(path)
    assert "'w'" in str(caught.value)


def test_a_symlink_inside_the_folder_is_fine(external: Path) -> None:
    (external.parent / "big.data").rename(external.parent / "blob")
    (external.parent / "big.data").symlink_to("blob")
    np.testing.assert_array_equal(load(external).graph.initializers["w"].const_value.numpy(), normal(30, 20))


def test_a_proto_with_unread_external_data_has_no_folder(external: Path) -> None:
    with pytest.raises(ModelError, match="load the model from its path"):
        load(onnx.load(external, load_external_data=False))


# Giving weights back -------------------------------------------------------------------------------------------------------


def test_write_back_keeps_everything_but_the_values(file: Path) -> None:
    original = load(file)
    trained = write_back(original, {"w": np.ones((30, 20))})
    assert trained.opset_imports == original.opset_imports
    assert trained.ir_version == original.ir_version
    assert [n.op_type for n in trained.graph] == [n.op_type for n in original.graph]
    w = trained.graph.initializers["w"].const_value
    assert w.dtype == ir.DataType.FLOAT
    np.testing.assert_array_equal(w.numpy(), np.ones((30, 20), np.float32))
    np.testing.assert_array_equal(trained.graph.initializers["b"].const_value.numpy(), normal(20, seed=1))
    np.testing.assert_array_equal(original.graph.initializers["w"].const_value.numpy(), normal(30, 20))


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_write_back_keeps_the_element_type_of_the_file(dtype: type) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    proto = build(nodes, {"x": [2, 3]}, ["y"], {"w": normal(3, 4).astype(dtype)}, opset=17, types={"x": kind, "y": kind})
    values = normal(3, 4, seed=5)
    trained = write_back(load(proto), {"w": values})
    assert trained.graph.initializers["w"].const_value.numpy().dtype == dtype
    np.testing.assert_array_equal(trained.graph.initializers["w"].const_value.numpy(), values.astype(dtype))


def test_write_back_to_an_old_file_whose_initializers_are_inputs() -> None:
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["y"]),
    ]
    proto = build(
        nodes, {"x": [2, 3], "b": [4]}, {"y": [2, 4]}, {"shape": np.array([3, 4]), "b": normal(4)}, opset=9, ir_version=3
    )
    proto.graph.input.append(helper.make_tensor_value_info("shape", TensorProto.INT64, [2]))
    values = {"w": normal(3, 4), "b": normal(4, seed=2)}
    trained = write_back(load(proto), values)
    assert {v.name for v in trained.graph.inputs} == {"x", "b", "w"}
    assert set(trained.graph.initializers) == {"w", "b"}
    onnx.checker.check_model(ir.to_proto(trained))
    x = normal(2, 3, seed=3)
    np.testing.assert_allclose(run(trained, {"x": x})[0], x @ values["w"] + values["b"], rtol=1e-5)


def test_write_back_leaves_an_inference_model() -> None:
    nodes = [
        helper.make_node("BatchNormalization", ["x", "s", "t", "m", "v"], ["n", "m2", "v2"], training_mode=1),
        helper.make_node("Dropout", ["n", "ratio", "on"], ["y"]),
    ]
    weights = {name: np.abs(normal(3, seed=k)) + 0.5 for k, name in enumerate("stmv")}
    weights |= {"ratio": np.array(0.5, np.float32), "on": np.array(True)}
    proto = build(nodes, {"x": [4, 3, 2]}, {"y": [4, 3, 2]}, weights, opset=17)
    trained = write_back(load(proto), {"m": np.ones(3)})
    onnx.checker.check_model(ir.to_proto(trained), full_check=True)
    x = normal(4, 3, 2)
    s, t, v = (weights[k][:, None] for k in "stv")
    np.testing.assert_allclose(run(trained, {"x": x})[0], (x - 1) / np.sqrt(v + 1e-5) * s + t, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("weight", (30, 20), "no parameter 'weight'"),
        ("w", (20, 30), r"shape \[20, 30\], the file has \[30, 20\]"),
        ("h", (2, 20), r"'h' is computed by the file \(MatMul\)"),
    ],
)
def test_write_back_refuses(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        write_back(load(linear()), {name: np.zeros(shape, np.float32)})


# Writing -----------------------------------------------------------------------------------------------------------------


def test_save_and_load_again(file: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    model = load(file)
    save(model, tmp_path / "copy.onnx")
    onnx.checker.check_model(tmp_path / "copy.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy.onnx", "model.onnx"]
    save(model, "-")
    assert capsysbinary.readouterr().out == (tmp_path / "copy.onnx").read_bytes()


def test_external_tensors_come_along(external: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    save(load(external), tmp_path / "new" / "copy.onnx")
    assert {p.name for p in (tmp_path / "new").iterdir()} == {"copy.onnx", "copy.onnx.data"}
    np.testing.assert_array_equal(run(load(onnx.load(tmp_path / "new" / "copy.onnx")), X)[0], run(load(linear()), X)[0])


def test_large_models_get_a_data_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "EXTERNAL_ABOVE", 1000)
    trained = write_back(load(file), {"b": np.zeros(20)})
    save(trained, tmp_path / "large.onnx")
    assert (tmp_path / "large.onnx.data").stat().st_size >= 2400
    save(load(tmp_path / "large.onnx"), tmp_path / "large.onnx")  # over the file that is mapped
    again = load(tmp_path / "large.onnx")
    assert isinstance(again.graph.initializers["w"].const_value, ir.ExternalTensor)
    np.testing.assert_allclose(
        run(load(onnx.load(tmp_path / "large.onnx")), X)[0], X["x"] @ normal(30, 20), rtol=1e-4, atol=1e-5
    )
    with pytest.raises(ModelError, match="cannot go to standard output"):
        save(again, "-")


def test_nothing_is_half_written(file: Path, tmp_path: Path) -> None:
    before = file.read_bytes()

    def interrupted() -> None:
        with atomic_write(file) as stream:
            stream.write(b"half")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        interrupted()
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    with pytest.raises(ModelError, match="cannot write"):
        save(load(file), tmp_path / "nowhere" / "model.onnx")


def test_round_trip_of_a_constant_that_is_a_weight() -> None:
    """A weight that the file writes as a node comes back as an initializer of that name, the rest as it was."""
    weight = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(normal(3, 4)), name="weight")
    proto = build([weight, helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [2, 3]}, ["y"], opset=13)
    trained = write_back(load(proto), {"w": np.full((3, 4), 2.0)})
    assert [n.op_type for n in trained.graph] == ["MatMul"]
    np.testing.assert_allclose(run(trained, {"x": np.ones((2, 3), np.float32)})[0], np.full((2, 4), 6.0))


def test_a_graph_that_a_pass_has_broken_is_not_written(tmp_path: Path) -> None:
    def relus() -> ir.Model:
        return ir.from_onnx_text("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[2] x) => (float[2] y) { h = Relu (x)  y = Relu (h) }""")

    dangling, twice, early = relus(), relus(), relus()
    dangling.graph[1].replace_input_with(0, ir.Value(name="ghost"))
    twice.graph[0].outputs[0].name = "y"
    early.graph[0].replace_input_with(0, early.graph[1].outputs[0])
    for model, message in ((dangling, "reads 'ghost'"), (twice, "two values are called 'y'"), (early, "before it is produced")):
        with pytest.raises(ModelError, match=message):
            save(model, tmp_path / "broken.onnx")
    assert not list(tmp_path.iterdir())
