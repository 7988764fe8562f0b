"""External data: which files a model may read, through which links, and what is said of others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import graphc
from graphc import frontends
from graphc.cli import main
from graphc.errors import ModelError, UsageError
from graphc.options import ReadOptions
from graphc.training.inference import run_model

WEIGHTS = np.arange(6, dtype=np.float32)


def model(location: str = "w.bin", offset: str = "", length: str = "", name: str = "w") -> onnx.ModelProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[6], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": offset, "length": length}.items():
        if value or key == "location":
            tensor.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", name], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", 1, [6])],
        [helper.make_tensor_value_info("y", 1, [6])],
        [tensor],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def write(path: Path, proto: onnx.ModelProto) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(proto.SerializeToString())
    return path


def data(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(WEIGHTS.tobytes())
    return path


def weights(path: Path, *folders: Path) -> np.ndarray:
    loaded = frontends.load(path, reading=ReadOptions(external_data=[str(f) for f in folders] or None))
    return np.asarray(loaded.graph.initializers["w"].const_value.numpy())


def test_a_cache_of_links_into_blobs_is_read(tmp_path: Path) -> None:
    """The layout of huggingface_hub: snapshots/REVISION/onnx/NAME is a link to ../../../blobs/DIGEST."""
    blobs, shot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "1f2e3d" / "onnx"
    write(blobs / "aaaa", model("model.onnx_data"))
    data(blobs / "bbbb")
    shot.mkdir(parents=True)
    (shot / "model.onnx").symlink_to("../../../blobs/aaaa")
    (shot / "model.onnx_data").symlink_to("../../../blobs/bbbb")
    assert np.array_equal(weights(shot / "model.onnx"), WEIGHTS)
    fed = {"x": np.zeros(6, np.float32)}
    assert np.array_equal(run_model(shot / "model.onnx", fed)["y"], WEIGHTS)
    program = graphc.compile(shot / "model.onnx", loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.5), train=["w"])
    with graphc.Trainer(program, threads=1) as trainer:
        trainer.step({"x": np.zeros((6,), np.float32), "label": np.zeros(6, np.float32)})
        trainer.export(tmp_path / "trained.onnx")
    assert not np.array_equal(run_model(tmp_path / "trained.onnx", fed)["y"], WEIGHTS)
    assert (blobs / "bbbb").read_bytes() == WEIGHTS.tobytes()


def test_data_beside_the_file_behind_a_linked_model(tmp_path: Path) -> None:
    write(tmp_path / "store" / "m.onnx", model())
    data(tmp_path / "store" / "w.bin")
    link = tmp_path / "here" / "m.onnx"
    link.parent.mkdir()
    link.symlink_to("../store/m.onnx")
    assert np.array_equal(weights(link), WEIGHTS)


def _link_out(place: Path) -> str:
    (place / "m" / "w.bin").symlink_to(data(place / "elsewhere" / "w.bin"))
    return "w.bin"


def _folder_link_out(place: Path) -> str:
    data(place / "elsewhere" / "w.bin")
    (place / "m" / "sub").symlink_to(place / "elsewhere")
    return "sub/w.bin"


def _absolute(place: Path) -> str:
    return str(data(place / "elsewhere" / "w.bin"))


def _above(place: Path) -> str:
    data(place / "elsewhere" / "w.bin")
    return "../elsewhere/w.bin"


def _hard_link(place: Path) -> str:
    os.link(data(place / "elsewhere" / "w.bin"), place / "m" / "w.bin")
    return "w.bin"


@pytest.mark.parametrize("make", [_link_out, _folder_link_out, _absolute, _above, _hard_link])
def test_data_elsewhere_is_read_only_from_a_folder_that_is_named(
    make: Callable[[Path], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m").mkdir()
    path = write(tmp_path / "m" / "m.onnx", model(make(tmp_path)))
    with pytest.raises(ModelError, match="--external-data") as error:
        weights(path)
    assert "'w'" in str(error.value)
    folder = tmp_path / "m" if make is _hard_link else tmp_path / "elsewhere"
    assert np.array_equal(weights(path, folder), WEIGHTS)
    assert main(["inspect", str(path)]) == 1
    assert main(["inspect", str(path), "--external-data", str(folder)]) == 0
    np.savez(tmp_path / "x.npz", x=np.zeros(6, np.float32))
    assert main(["run", str(path), "--inputs", str(tmp_path / "x.npz"), "--external-data", str(folder)]) == 0
    with pytest.raises(ModelError, match="--external-data"):
        graphc.grad(path, of="y", wrt="w")
    assert graphc.grad(path, of="y", wrt="w", external_data=[str(folder)])


def test_a_named_folder_is_searched_too(tmp_path: Path) -> None:
    path = write(tmp_path / "m" / "m.onnx", model())
    data(tmp_path / "weights" / "w.bin")
    with pytest.raises(ModelError, match="is missing"):
        weights(path)
    assert np.array_equal(weights(path, tmp_path / "weights"), WEIGHTS)
    with pytest.raises(UsageError, match="no such folder"):
        weights(path, tmp_path / "nowhere")
    loaded = frontends.load(
        onnx.load(path, load_external_data=False), reading=ReadOptions(external_data=[str(path.parent.parent / "weights")])
    )
    assert loaded.graph.initializers["w"].const_value.nbytes == 24


@pytest.mark.parametrize(
    ("location", "offset", "length", "says"),
    [
        ("", "", "", "no file name"),
        ("a\0b", "", "", "no file name"),
        ("x" * 5000, "", "", "missing"),
        (".", "", "", "not a regular file|outside"),
        ("fifo", "", "", "not a regular file"),
        ("/dev/zero", "", "", "outside"),
        ("dangling", "", "", "outside|missing"),
        ("round", "", "", "outside|missing"),
        ("w.bin", "4", "", "too short"),
        ("w.bin", "-4", "", "no number of bytes"),
        ("w.bin", "0", "8", "needs 24"),
        ("w.bin", str(2**80), "", "no number of bytes"),
        ("w.bin", "abc", "", "no number of bytes"),
    ],
)  # fmt: skip
def test_forged_places_and_ranges_are_named(location: str, offset: str, length: str, says: str, tmp_path: Path) -> None:
    data(tmp_path / "w.bin")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dangling").symlink_to("/nowhere/at/all")
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(ModelError, match=says):
        weights(write(tmp_path / "m.onnx", model(location, offset, length)))


def test_several_links_in_a_row_within_the_folder_are_followed(tmp_path: Path) -> None:
    data(tmp_path / "w.bin")
    (tmp_path / "one").symlink_to("w.bin")
    (tmp_path / "two").symlink_to("one")
    assert np.array_equal(weights(write(tmp_path / "m.onnx", model("two"))), WEIGHTS)


def test_external_data_in_a_body_and_in_a_constant_is_checked(tmp_path: Path) -> None:
    outside = model("../secret")
    held = outside.graph.initializer[0]
    made = helper.make_tensor_value_info("b", 1, [6])
    body = helper.make_graph([helper.make_node("Neg", ["w"], ["b"])], "body", [], [made], [held])
    makers = (
        helper.make_node("Constant", [], ["w"], value=held),
        helper.make_node("If", ["c"], ["w"], then_branch=body, else_branch=body),
    )
    for maker in makers:
        del outside.graph.initializer[:]
        outside.graph.initializer.append(numpy_helper.from_array(np.array(True), "c"))
        outside.graph.node.insert(0, maker)
        with pytest.raises(ModelError, match="outside the folder"):
            frontends.load(write(tmp_path / "m.onnx", outside))
        del outside.graph.node[0]
