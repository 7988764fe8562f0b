"""What the fuzz campaign attacks: each kind makes attempt ``number``, which a child process runs."""

from __future__ import annotations

import contextlib
import io
import os
import random
import tempfile
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
from onnx import helper

from graphc.cli import main
from graphc.data.files import open_arrays
from graphc.runtime import checkpoint
from tests.fuzz.fault import fault
from tests.fuzz.model_mutants import mutate
from tests.fuzz.network import network
from tests.fuzz.seeds import seeds
from tests.fuzz.uses import USES, use
from tests.passes.legalize.legalize_cases import build

Work = Callable[[], object]
VALID = 50


def model(number: int, keep: Collection[int] | None = None) -> tuple[str, Work]:
    """Use a mutant of a model in one of the ways of :data:`USES`; every ``VALID``-th is the valid model, and trained."""
    rng = random.Random(number)
    seed, how = rng.choice(seeds()), rng.choice(["train"] * 5 + list(USES))
    if not number % VALID:
        how, content = "train", seed.model.SerializeToString()
    else:
        content = mutate(seed.model, number, keep)
    return f"{seed.name}, {how}", lambda: use(content, seed, how)


def data(number: int, keep: Collection[int] | None = None) -> tuple[str, Work]:
    """Read a damaged archive or folder of arrays, every element of it."""
    rng = random.Random(number)
    arrays = {"x": np.arange(60.0).reshape(12, 5), "y": np.arange(12)}
    folder = rng.random() < 0.3
    name = rng.choice(sorted(arrays))
    if folder:
        out = io.BytesIO()
        np.save(out, arrays[name])
    else:
        out = io.BytesIO()
        (np.savez if rng.random() < 0.7 else np.savez_compressed)(out, **arrays)
    content = _spoil(bytearray(out.getvalue()), rng)

    def work() -> None:
        with tempfile.TemporaryDirectory(prefix="graphc-fuzz-") as place:
            path = Path(place) / (f"{name}.npy" if folder else "data.npz")
            path.write_bytes(content)
            found = open_arrays(place if folder else path)
            for array in found.values():
                str(array.sum()) if array.dtype.kind in "biuf" else None

    return "folder" if folder else "archive", work


def saved(number: int, keep: Collection[int] | None = None) -> tuple[str, Work]:
    """Read a damaged checkpoint; one that differs in any byte must not be read as a whole one."""
    rng = random.Random(number)
    whole = _checkpoint()
    content = _spoil(bytearray(whole), rng)

    def work() -> None:
        with tempfile.TemporaryDirectory(prefix="graphc-fuzz-") as place:
            (Path(place) / checkpoint.FILE_NAME).write_bytes(content)
            checkpoint.load(place)
        if content != whole:
            raise AssertionError("a damaged checkpoint was read as a whole one")

    return "checkpoint", work


@cache
def _checkpoint() -> bytes:
    state = {"w": np.arange(12.0).reshape(3, 4), "b": np.ones(5, np.float32), "steps": np.array(3, np.int64)}
    with tempfile.TemporaryDirectory(prefix="graphc-fuzz-") as place:
        return checkpoint.save(place, state, {"steps": 3, "pipeline": "legalize,autodiff"}).read_bytes()


def _spoil(content: bytearray, rng: random.Random) -> bytes:
    """Flip bits, cut, repeat, overwrite with numbers, or swap pieces."""
    for _ in range(rng.randint(1, 3)):
        if not content:
            break
        place, kind = rng.randrange(len(content)), rng.randrange(6)
        if kind == 0:
            content[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del content[place:]
        elif kind == 2:
            content[place:place] = content[place : place + rng.randint(1, 64)]
        elif kind == 3:
            content[place : place + 4] = rng.choice((b"\xff" * 4, b"\0" * 4, b"9999", b"-1,)", b"\x7f\xff\xff\xff"))
        elif kind == 4:
            content[place] = rng.choice(b"0123456789{}[](),'\":|<>OUSVbifc")
        else:
            del content[place : place + rng.randint(1, 16)]
    return bytes(content)


_COMMANDS = (
    "train good.onnx --data data.npz --loss mse:label=t --optimizer sgd:lr=0.1 --batch-size 4 --epochs 1 -o out.onnx",
    "train good.onnx --data data.npz --loss mse:label=t --optimizer adam:lr=1e-3 --batch-size 4 --steps 2 --checkpoint saved",
    "compile good.onnx --loss mse:label=t --optimizer sgd:lr=0.1 -o out.onnx",
    "opt good.onnx --passes legalize,simplify -o out.onnx",
    "run good.onnx --inputs data.npz -o out.npz",
    "check good.onnx -v",
    "inspect good.onnx --memory",
    "show plan good.onnx --loss mse:label=t --optimizer sgd:lr=0.1",
    "passes",
    "ops --backend numpy",
    "backends",
)
_WORDS = ["", "a b"]
_WORDS += [
    "--loss",
    "--optimizer",
    "--data",
    "--epochs",
    "--batch-size",
    "--backend",
    "--passes",
    "--strategy",
    "--accumulate",
    "-n",
    "--precision",
]
_WORDS += [
    "--freeze",
    "--seed",
    "--shape",
    "--input",
    "--resume",
    "--trace",
    "--json",
    "--bucket-mb",
    "-o",
    "-v",
    "mse",
    "adam:lr=1e-3",
    "sgd:lr=abc",
]
_WORDS += [
    "nowhere",
    "0",
    "-1",
    "1e400",
    "nan",
    "inf",
    "=",
    "a=b=c",
    "*",
    "99999999999999999999",
    "x={",
    "legalize,autodiff",
    "legalize{a=1}",
]
_WORDS += [
    "zero:stage=9",
    "zero:stage=1",
    "/dev/null",
    "/",
    ".",
    "missing.onnx",
    "bad.onnx",
    "good.onnx",
    "data.npz",
    "bf16",
    "fp16",
    "numpy",
]
_WORDS += ["cupy", "softmax_cross_entropy", "lion", "a|b", "\u202e"]


def cli(number: int, keep: Collection[int] | None = None) -> tuple[str, Work]:
    """Run a command line with one to four words changed, in a folder with a good model, a bad one, and data."""
    rng = random.Random(number)
    command = rng.choice(_COMMANDS).split()
    for _ in range(rng.randint(1, 4)):
        place, word = rng.randrange(len(command) + 1), rng.choice(_WORDS)
        kind = rng.randrange(3)
        command[place : place + (kind > 0)] = [word] if kind < 2 else []
    weights = {"fc.weight": np.ones((4, 2), np.float32)}
    good = build([helper.make_node("MatMul", ["x", "fc.weight"], ["y"])], {"x": ("n", 4)}, {"y": ("n", 2)}, weights, opset=20)

    def work() -> None:
        with tempfile.TemporaryDirectory(prefix="graphc-fuzz-") as place, contextlib.chdir(place):
            Path("good.onnx").write_bytes(good.SerializeToString())
            Path("bad.onnx").write_bytes(b"\x08\x08junk")
            np.savez("data.npz", x=np.ones((8, 4), np.float32), t=np.zeros((8, 2), np.float32))
            os.environ["GRAPHC_DEBUG"] = "1"  # an unforeseen exception comes out as it is
            code = main(command)
            if code not in (0, 1, 2, 3):
                raise AssertionError(f"exit code {code}")

    return " ".join(command), work


KINDS: dict[str, Callable[..., tuple[str, Work]]] = {"model": model, "data": data, "checkpoint": saved, "cli": cli}
KINDS["network"] = network
KINDS["fault"] = fault

LIMITS: dict[str, dict[str, int]] = {"fault": {"seconds": 400, "megabytes": 1 << 20}}
"""Limits of an attempt where they are not the usual ones."""


def prepare() -> None:
    """Import, register and compile everything once, so that children need not."""
    quiet = io.StringIO()
    with (
        contextlib.redirect_stdout(quiet),
        contextlib.redirect_stderr(quiet),
        contextlib.chdir(Path.cwd()),
        patch.dict(os.environ),
    ):
        first = seeds()[0]
        use(first.model.SerializeToString(), first, "train")
        cli(2)[1]()
    _checkpoint()
