"""Every bad input is one line that names it, with the right exit code, and no traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from graphc.cli import main
from tests.cli.models import BLOCKED, blobs, parse, write_blobs, write_mlp

LOSS = ("--loss", "softmax_cross_entropy:logits=logits,label=label")
SGD = ("--optimizer", "sgd:lr=0.1")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_mlp(tmp_path)
    write_blobs(tmp_path)
    return tmp_path


def train(*arguments: str, data: str = "d.npz", model: str = "mlp.onnx") -> list[str]:
    return ["train", model, "--data", data, *LOSS, *SGD, "--epochs", "1", "--batch-size", "16", *arguments]


def save(name: str, **changes: Any) -> None:
    np.savez(name, **{key: value for key, value in {**blobs(), **changes}.items() if value is not None})


def text_file(here: Path) -> list[str]:
    (here / "no.onnx").write_text("this is no model")
    return ["check", "no.onnx"]


def truncated(here: Path) -> list[str]:
    data = (here / "mlp.onnx").read_bytes()
    (here / "cut.onnx").write_bytes(data[: len(data) // 2])
    return ["check", "cut.onnx"]


def external_missing(here: Path) -> list[str]:
    onnx.save(
        parse("<float".join(BLOCKED.split("<float"))),
        here / "e.onnx",
        save_as_external_data=True,
        location="e.data",
        size_threshold=0,
    )
    (here / "e.data").unlink()
    return ["check", "e.onnx"]


def external_outside(here: Path) -> list[str]:
    (here / "sub").mkdir()
    model = parse(BLOCKED)
    onnx.save(model, here / "sub" / "e.onnx", save_as_external_data=True, location="e.data", size_threshold=0)
    loaded = onnx.load(here / "sub" / "e.onnx", load_external_data=False)
    for tensor in loaded.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../e.data"
    (here / "e.data").write_bytes((here / "sub" / "e.data").read_bytes())
    (here / "sub" / "e.onnx").write_bytes(loaded.SerializeToString())
    return ["check", "sub/e.onnx"]


def blocked(here: Path) -> list[str]:
    onnx.save(parse(BLOCKED), here / "blocked.onnx")
    return ["check", "blocked.onnx"]


def blocked_compile(here: Path) -> list[str]:
    onnx.save(parse(BLOCKED), here / "blocked.onnx")
    return ["compile", "blocked.onnx", "-o", "t.onnx", "--loss", "mse", *SGD]


def missing_key(here: Path) -> list[str]:
    save("bad.npz", label=None)
    return train(data="bad.npz")


def extra_key(here: Path) -> list[str]:
    save("bad.npz", lable=np.zeros(96))
    return train(data="bad.npz")


def both_keys(here: Path) -> list[str]:
    save("bad.npz", label=None, target=np.zeros(96, np.int64))
    return train(data="bad.npz")


def run_feeds(here: Path) -> list[str]:
    np.savez("bad.npz", X=np.zeros((2, 4), np.float32))
    return ["run", "mlp.onnx", "--inputs", "bad.npz"]


def wrong_dtype(here: Path) -> list[str]:
    save("bad.npz", x=np.zeros((96, 4), dtype=np.complex64))
    return train(data="bad.npz")


def integer_features(here: Path) -> list[str]:
    save("bad.npz", x=np.zeros((96, 4), dtype=np.uint8))
    return train(data="bad.npz")


def wrong_shape(here: Path) -> list[str]:
    save("bad.npz", x=np.zeros((96, 5), dtype=np.float32))
    return train(data="bad.npz")


def unequal_lengths(here: Path) -> list[str]:
    save("bad.npz", label=np.zeros(95, dtype=np.int64))
    return train(data="bad.npz")


def label_out_of_range(here: Path) -> list[str]:
    label = blobs()["label"].copy()
    label[7] = 3
    save("bad.npz", label=label)
    return train(data="bad.npz")


def not_npz(here: Path) -> list[str]:
    (here / "bad.npz").write_text("no zip archive")
    return train(data="bad.npz")


def objects(here: Path) -> list[str]:
    save("bad.npz", x=np.array([{"a": 1}] * 96, dtype=object))
    return train(data="bad.npz")


def array_file(here: Path) -> list[str]:
    np.save("bad.npy", np.zeros(4))
    return train(data="bad.npy")


def sparse(here: Path) -> list[str]:
    model = onnx.load("mlp.onnx")
    dense = onnx.numpy_helper.to_array(model.graph.initializer[0])
    del model.graph.initializer[0]
    values = onnx.numpy_helper.from_array(dense.reshape(-1), "w1")
    places = onnx.numpy_helper.from_array(np.arange(dense.size) + 1, "places")
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, places, dense.shape))
    onnx.save(model, "sparse.onnx")
    return ["check", "sparse.onnx"]


def no_text(here: Path) -> list[str]:
    data = (here / "mlp.onnx").read_bytes()
    (here / "names.onnx").write_bytes(data.replace(b"Relu", b"Re\xff\xfe"))
    return ["check", "names.onnx"]


def circle(here: Path) -> list[str]:
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("own", 1)]
    call = onnx.helper.make_node("F", ["x"], ["y"], domain="own")
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy"]
    graph = onnx.helper.make_graph([call], "g", value[:1], value[1:])
    function = onnx.helper.make_function("own", "F", ["x"], ["y"], [call], opsets)
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=[function])
    (here / "circle.onnx").write_bytes(model.SerializeToString())
    return ["check", "circle.onnx"]


def training_graph(here: Path) -> list[str]:
    assert main(["compile", "mlp.onnx", *LOSS, *SGD, "-o", "t.onnx"]) == 0
    return train(model="t.onnx")


def standard_graph(here: Path) -> list[str]:
    assert main(["compile", "mlp.onnx", *LOSS, *SGD, "--standard", "-o", "t.onnx"]) == 0
    return ["check", "t.onnx"]


def labels_all_ignored(here: Path) -> list[str]:
    save("bad.npz", label=np.full(96, -1))
    loss = ("--loss", "softmax_cross_entropy:ignore_index=-1")
    return ["train", "mlp.onnx", "--data", "bad.npz", *loss, *SGD, "--batch-size", "96"]


def nan_in_data(here: Path) -> list[str]:
    save("bad.npz", x=np.full((96, 4), np.nan, np.float32))
    return train(data="bad.npz")


def other_optimizer(here: Path) -> list[str]:
    assert main(["train", "mlp.onnx", "--data", "d.npz", *LOSS, "--optimizer", "adam", "--checkpoint", "c"]) == 0
    return train("--resume", "c")


CASES: dict[str, tuple[Callable[[Path], list[str]], int, str]] = {
    "text file": (text_file, 1, "no.onnx is no ONNX model"),
    "truncated": (truncated, 1, "cut.onnx"),
    "no such model": (lambda _: ["check", "mpl.onnx"], 1, "did you mean 'mlp.onnx'"),
    "a sparse tensor with an index beyond it": (sparse, 1, "has an index beyond it"),
    "names that are no text": (no_text, 1, "is not UTF-8; the file is damaged, export it again"),
    "functions in a circle": (circle, 1, "cannot be inlined"),
    "a training graph": (training_graph, 2, "a training graph already"),
    "a standard training graph": (standard_graph, 2, "give the model that it was compiled from"),
    "labels all ignored": (labels_all_ignored, 1, "every label of the batch is the one that is ignored"),
    "NaN in the data": (nan_in_data, 1, "first in tensor 'x' on rank 0; the state is that of the last good step (it is in the"),
    "checkpoint of another optimizer": (other_optimizer, 2, "the checkpoint holds 'b1::exp_avg' and 7 more"),
    "checkpoint file": (lambda _: train("--resume", "mlp.onnx"), 1, "name the folder of the checkpoint"),
    "no data named": (lambda _: train(data=""), 2, "--data has an empty name"),
    "external data missing": (external_missing, 1, "is missing"),
    "external data outside": (external_outside, 1, "outside the folder"),
    "no gradient": (blocked, 3, "Det (1×)"),
    "no gradient at compile": (blocked_compile, 3, "no gradient for Det"),
    "key missing": (missing_key, 1, "no array 'label'"),
    "key too many": (extra_key, 1, "no input 'lable'; did you mean 'label'"),
    "dtype": (wrong_dtype, 1, "array 'x' is complex64, the model wants float32"),
    "integers for floats": (integer_features, 1, "array 'x' is uint8"),
    "shape": (wrong_shape, 1, "shape [96, 5]"),
    "lengths": (unequal_lengths, 1, "one entry per sample"),
    "label out of range": (label_out_of_range, 1, "label 3 at label[7] is outside 0 … 2"),
    "not an npz": (not_npz, 1, "bad.npz is not an .npz file"),
    "objects": (objects, 1, "'x' of bad.npz holds Python objects"),
    "an npy": (array_file, 1, "bad.npy is not an .npz file"),
    "no such data": (lambda _: train(data="e.npz"), 1, "no such file: e.npz"),
    "batch smaller than the world": (
        lambda _: [*train("-n", "20"), "--transport", "threads"],
        2,
        "smaller than the 20 workers",
    ),
    "unknown loss": (
        lambda _: ["compile", "mlp.onnx", "-o", "t.onnx", "--loss", "softmax_crossentropy", *SGD],
        2,
        "softmax_cross_entropy",
    ),
    "unknown loss option": (
        lambda _: ["compile", "mlp.onnx", "-o", "t.onnx", "--loss", "mse:labels=y", *SGD],
        2,
        "no option 'labels'",
    ),
    "unknown optimizer": (
        lambda _: ["compile", "mlp.onnx", "-o", "t.onnx", *LOSS, "--optimizer", "adan"],
        2,
        "did you mean 'adam'",
    ),
    "no such value": (
        lambda _: ["compile", "mlp.onnx", "-o", "t.onnx", "--loss", "nll:logits=logit", *SGD],
        2,
        "did you mean 'logits'",
    ),
    "unknown backend": (lambda _: train("--backend", "onnxruntme"), 2, "did you mean 'onnxruntime'"),
    "unknown pass": (lambda _: ["opt", "mlp.onnx", "-p", "legalise"], 2, "did you mean 'legalize'"),
    "unknown pass option": (lambda _: ["opt", "mlp.onnx", "-p", "initialize{metod=he}"], 2, "did you mean 'method'"),
    "prerequisite": (lambda _: ["opt", "mlp.onnx", "-p", "autodiff"], 2, "needs legalize before it"),
    "pipeline syntax": (lambda _: ["opt", "mlp.onnx", "-p", "legalize{"], 2, "cannot read the pipeline"),
    "print after": (lambda _: ["opt", "mlp.onnx", "-p", "legalize", "--print-after", "verify"], 2, "no such pass"),
    "pass name": (lambda _: ["passes", "buckets"], 2, "did you mean 'bucket'"),
    "freeze nothing": (lambda _: train("--freeze", "encoder.*"), 2, "no parameter matches 'encoder.*'"),
    "initialize": (lambda _: train("--initialize", "hee"), 2, "hee"),
    "batch option": (lambda _: train("--batch", "-3"), 2, "batch=-3 is neither"),
    "transport": (lambda _: train("-n", "2", "--transport", "mpy"), 2, "unknown transport 'mpy'"),
    "seed too large": (lambda _: train("--seed", "9" * 24), 2, "does not fit 64 bits"),
    "bucket of no size": (lambda _: train("--bucket-mb", "nan"), 2, "bucket sizes must be positive"),
    "model without a name": (lambda _: ["check", ""], 2, "the name of the model is empty"),
    "loss option without a value": (
        lambda _: ["check", "mlp.onnx", "--loss", "softmax_cross_entropy:logits"],
        2,
        "option 'logits' has no value; write logits=VALUE",
    ),
    "loss option with an empty value": (
        lambda _: ["check", "mlp.onnx", "--loss", "softmax_cross_entropy:logits="],
        2,
        "option 'logits' has no value; write logits=VALUE",
    ),
    "optimizer option without a value": (
        lambda _: [*train(), "--optimizer", "sgd:momentum"],
        2,
        "optimizer 'sgd': option 'momentum' has no value",
    ),
    "infinite learning rate": (lambda _: [*train(), "--optimizer", "sgd:lr=inf"], 2, "it must be a finite number, at least 0"),
    "kind of labels": (
        lambda _: ["check", "mlp.onnx", "--loss", "softmax_cross_entropy:label_kind=one"],
        2,
        "it is auto, class, probabilities",
    ),
    "values of the graph": (
        lambda _: ["check", "mlp.onnx", "--loss", "softmax_cross_entropy:logits=scores"],
        2,
        "the graph has no value 'scores'; the only output is logits",
    ),
    "every pass": (lambda _: ["opt", "mlp.onnx", "-p", "frobnicate"], 2, "the passes are accumulate, adasum, allreduce"),
    "every backend": (lambda _: train("--backend", "gpu"), 2, "the backends are cupy, numpy, onnxruntime, onnxruntime-cuda"),
    "every optimizer": (
        lambda _: [*train(), "--optimizer", "lion"],
        2,
        "the optimizers are adagrad, adam, adamw, rmsprop, sgd",
    ),
    "every loss": (
        lambda _: [*train(), "--loss", "hinge"],
        2,
        "the losses are softmax_cross_entropy, nll, ctc",
    ),
    "every strategy": (lambda _: train("--strategy", "ring"), 2, "known are mirrored, zero, central_storage"),
    "every option of a pass": (
        lambda _: ["opt", "mlp.onnx", "-p", "bucket{size=3}"],
        2,
        "pass 'bucket' has no option 'size'; the options are mb, first_mb",
    ),
    "unknown backend to list": (lambda _: ["backends", "gpu"], 2, "the backends are cupy, numpy"),
    "unknown op to list": (lambda _: ["ops", "Frob"], 2, "there is no operator 'Frob'"),
    "no whole number": (lambda _: train("--epochs", "1.5"), 2, "--epochs: '1.5' is no whole number; 'graphc train --help'"),
    "no number": (lambda _: train("--clip-norm", "abc"), 2, "--clip-norm: 'abc' is no number"),
    "negative number": (lambda _: train("-n", "-3"), 2, "-n / --workers: '-3' is too small; it must be at least 1"),
    "no choice": (lambda _: train("--format", "xml"), 2, "'xml' is not one of 'text', 'json'"),
    "surplus argument": (lambda _: train("more", "words"), 2, "these arguments belong to no option: more words"),
    "option without value": (lambda _: train("--epochs"), 2, "Option '--epochs' requires an argument; 'graphc train --help'"),
    "unknown option of a command": (lambda _: train("--batchsize", "4"), 2, "there is no option --batchsize"),
    "unknown command": (lambda _: ["trian"], 2, "there is no command 'trian'; did you mean 'train'?"),
    "strategy and accumulate": (
        lambda _: train("--strategy", "parameter_server", "--accumulate", "2"),
        2,
        "strategy 'parameter_server' and accumulate=2 exclude each other: a worker pushes the gradients of each batch",
    ),
    "strategy and compress": (
        lambda _: train("--strategy", "zero:stage=2", "--compress", "bf16"),
        2,
        "strategy 'zero' and compress=bf16 exclude each other",
    ),
    "strategy and deterministic": (
        lambda _: train("--strategy", "adasum", "--deterministic", "any-world"),
        2,
        "strategy 'adasum' and deterministic=any-world exclude each other",
    ),
    "nccl on the host": (lambda _: train("--transport", "nccl"), 2, "'nccl' moves arrays of GPUs"),
    "command": (lambda _: ["trian"], 2, "trian"),
    "option": (lambda _: train("--epoch-count", "3"), 2, "--epoch-count"),
    "option value": (lambda _: ["train", "mlp.onnx", "--epochs", "many"], 2, "--epochs"),
    "option missing": (lambda _: ["train", "mlp.onnx"], 2, "--data"),
    "output folder": (lambda _: train("-o", "nowhere/t.onnx"), 1, "there is no folder"),
    "output stdout": (lambda _: train("-o", "-"), 2, "name a file"),
    "resume": (lambda _: train("--resume", "nothing"), 2, "no such checkpoint"),
    "show a model": (lambda _: ["show", "mlp.onnx"], 2, "no training graph"),
    "inspect part": (lambda _: ["inspect", "mlp.onnx", "--show", "parms"], 2, "did you mean 'params'"),
    "script": (lambda _: ["launch", "-n", "2", "none.py"], 2, "no script 'none.py'"),
    "several workers in standard ONNX": (
        lambda _: ["compile", "mlp.onnx", "-o", "t.onnx", *LOSS, *SGD, "--standard", "-n", "2"],
        2,
        "--standard writes the graph of one worker",
    ),
    "no flight log": (lambda _: ["show", "flight", "nope"], 1, "cannot read nope: No such file or directory"),
    "run feeds": (run_feeds, 1, "there is no input 'X'; the inputs are x"),
    "missing beside unknown": (
        both_keys,
        1,
        "the model has no input 'target'; its inputs are 'x', 'label'; the file has no array 'label'",
    ),
}


@pytest.mark.usefixtures("det_without_gradient")
@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make, code, fragment = CASES[name]
    arguments = make(here)
    before = sorted(p.name for p in here.rglob("*"))
    assert main(arguments) == code
    out, err = capfd.readouterr()
    assert fragment in err
    assert [line for line in err.splitlines() if line.startswith("graphc: error: ")]
    assert "Traceback" not in err + out
    assert sorted(p.name for p in here.rglob("*")) == before, "nothing is written"


def test_unexpected_errors_are_one_line(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr("graphc.frontends.load", fail)
    assert main(["inspect", "mlp.onnx"]) == 1
    assert capfd.readouterr().err == (
        "graphc: error: unexpected RuntimeError: first second (run with GRAPHC_DEBUG=1 for the traceback)\n"
    )
    monkeypatch.setenv("GRAPHC_DEBUG", "1")
    with pytest.raises(RuntimeError):
        main(["inspect", "mlp.onnx"])
