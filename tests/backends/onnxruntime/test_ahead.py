"""Native kernels that are compiled ahead of time: the list is of this version, and a first start runs them without Numba."""

from __future__ import annotations

import ast
import inspect
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from graphc.backends.host.object_files import write_object
from graphc.backends.host.processor import processor
from graphc.backends.onnxruntime import ahead
from graphc.backends.onnxruntime.ahead import LIST, function_of
from graphc.backends.onnxruntime.kernels.common.jit import NumbaFunction
from graphc.backends.onnxruntime.machine_code import AHEAD, ahead_name, identity_of

LINES = LIST.read_text().splitlines()

KERNEL = """
import sys
from pathlib import Path
import numpy as np
from graphc.backends.host.object_files import write_object
from graphc.backends.onnxruntime import machine_code
from graphc.backends.onnxruntime.kernels.rows.activations import _relu_grad
from graphc.backends.onnxruntime.pool import ThreadPool

machine_code.AHEAD = Path({folder!r})
kinds = ["<f4:1C"] * 3
file = machine_code.ahead_name(machine_code.identity_of(_relu_grad, kinds))
if sys.argv[1] == "make":
    write_object(machine_code.AHEAD / "x86-64-v3" / f"{{file}}.o", machine_code.object_of(_relu_grad, kinds, file))
else:
    dy, y, dx = np.float32([1, 2, 3]), np.float32([0, 1, 2]), np.zeros(3, np.float32)
    ThreadPool(1).bind(_relu_grad, (dy, y, dx), dx.size)()
    print(dx.tolist(), "numba" in sys.modules)
"""

TRAINING = """
import sys
import numpy as np
import onnx
from onnx import TensorProto as T, helper, numpy_helper
import graphc

rng = np.random.default_rng(0)
weights = {
    "w1": rng.standard_normal((16, 16, 3, 3)), "b1": np.zeros(16), "scale": np.ones(16), "shift": np.zeros(16),
    "mean": np.zeros(16), "var": np.ones(16), "w2": rng.standard_normal((16, 5)), "b2": np.zeros(5),
}
nodes = [
    helper.make_node("Conv", ["x", "w1", "b1"], ["c"], pads=[1, 1, 1, 1]),
    helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["n"]),
    helper.make_node("Relu", ["n"], ["r"]),
    helper.make_node("MaxPool", ["r"], ["m"], kernel_shape=[2, 2], strides=[2, 2]),
    helper.make_node("GlobalAveragePool", ["m"], ["p"]),
    helper.make_node("Flatten", ["p"], ["f"]),
    helper.make_node("Gemm", ["f", "w2", "b2"], ["scores"]),
]
graph = helper.make_graph(
    nodes, "g", [helper.make_tensor_value_info("x", T.FLOAT, [4, 16, 16, 16])],
    [helper.make_tensor_value_info("scores", T.FLOAT, [4, 5])],
    [numpy_helper.from_array(w.astype(np.float32), name) for name, w in weights.items()],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
onnx.save(model, sys.argv[1])
program = graphc.compile(sys.argv[1], loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.AdamW(lr=1e-3))
with graphc.Trainer(program) as trainer:
    feeds = {"x": rng.standard_normal((4, 16, 16, 16)).astype(np.float32), "label": np.arange(4)}
    losses = [trainer.step(feeds)["loss"] for _ in range(3)]
print(losses[2] < losses[0], "numba" in sys.modules)
"""

RECURRENT = """
import sys
import numpy as np
import onnx
from onnx import TensorProto as T, helper, numpy_helper
import graphc

rng = np.random.default_rng(0)
weights = {
    "w": rng.standard_normal((1, 1024, 4)), "r": rng.standard_normal((1, 1024, 256)), "v": rng.standard_normal((256, 5)),
    "zeros": np.zeros((2, 32, 256)),
}
for shift in range(4):  # somewhere the constants' bytes begin between two elements
    nodes = [
        helper.make_node("Slice", ["zeros", "0", "1", "0"], ["h0"]),
        helper.make_node("Slice", ["zeros", "1", "2", "0"], ["c0"]),
        helper.make_node("LSTM", ["x", "w", "r", "", "", "h0", "c0"], ["", "h"], hidden_size=256),
        helper.make_node("Squeeze", ["h"], ["s"]),
        helper.make_node("MatMul", ["s", "v"], ["scores"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", T.FLOAT, [7, 32, 4])],
        [helper.make_tensor_value_info("scores", T.FLOAT, [32, 5])],
        [numpy_helper.from_array(w.astype(np.float32), name) for name, w in weights.items()]
        + [numpy_helper.from_array(np.int64([k]), str(k)) for k in range(3)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)], ir_version=8, producer_name="p" * shift)
    onnx.save(model, sys.argv[1])
    program = graphc.compile(sys.argv[1], loss=graphc.losses.SoftmaxCrossEntropy(), optimizer=graphc.optim.AdamW(lr=1e-3))
    with graphc.Trainer(program) as trainer:
        trainer.step({"x": rng.standard_normal((7, 32, 4)).astype(np.float32), "label": np.arange(32) % 5})
print("numba" in sys.modules)
"""


def _run(script: str, *arguments: str) -> str:
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def test_every_listed_kernel_is_of_this_version() -> None:
    assert sorted(set(LINES)) == LINES
    for line in LINES:
        function, (_, *kinds) = function_of(line), line.split()
        assert function is not None, line
        assert len(inspect.signature(function.py_func).parameters) == len(kinds) + 2, line  # and the units, start to stop


@pytest.mark.full
def test_kernels_name_nothing_that_their_digest_does_not_cover() -> None:
    for module in {function.py_func.__module__ for line in LINES if (function := function_of(line)) is not None}:
        tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        apart = [node for node in imports if node.module and not node.module.startswith("graphc.backends.onnxruntime")]
        foreign = {name.asname or name.name for node in apart for name in node.names}
        kernels = [held for held in vars(sys.modules[module]).values() if isinstance(held, NumbaFunction)]
        for kernel in kernels:
            if kernel.py_func.__module__ == module:
                assert not foreign & set(kernel.py_func.__code__.co_names), kernel.place


@pytest.mark.skipif(processor().level is None, reason="no code is made ahead of time for this processor")
def test_doctor_is_told_how_many_kernels_are_compiled_and_how_to_compile_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "AHEAD", tmp_path)
    missing = ahead.state()
    assert missing.startswith(f"0 of {len(LINES)} kernels compiled ahead of time ({processor().level}); ")
    assert "'python -m graphc.backends.onnxruntime.ahead'" in missing
    for line in LINES:
        function = function_of(line)
        assert function is not None
        identity = identity_of(function, line.split()[1:])
        assert identity is not None
        write_object(tmp_path / str(processor().level) / f"{ahead_name(identity)}.o", b"")
    assert ahead.state() == f"{len(LINES)} of {len(LINES)} kernels compiled ahead of time ({processor().level})"


@pytest.mark.large
@pytest.mark.full  # four processes, two of which compile
@pytest.mark.skipif(processor().level is None, reason="no code is made ahead of time for this processor")
def test_code_of_a_level_runs_without_numba_and_damaged_code_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHC_PROCESSOR", "x86-64-v3")
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path / "cache"))
    script = KERNEL.format(folder=str(tmp_path / "ahead"))
    _run(script, "make")
    assert _run(script, "run") == "[0.0, 2.0, 3.0] False"
    (kept,) = (tmp_path / "ahead").rglob("*.o")
    kept.write_bytes(kept.read_bytes()[:-9] + b"not whole")
    assert _run(script, "run") == "[0.0, 2.0, 3.0] True"


WIDTH = """
import sys
from graphc.backends.onnxruntime.kernels.common.jit import jit, numba_package
from graphc.backends.onnxruntime.kernels.common.mathematics import exp
@jit
def total(x, y):
    for k in range(x.size):
        y[k] = exp(x[k])
types = numba_package().types
floats = types.Array(types.float32, 1, "C")
total.dispatcher.compile((floats, floats))
print("zmm" in next(iter(total.dispatcher.inspect_asm().values())))
"""


@pytest.mark.full  # processes that compile
@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86-64")
@pytest.mark.parametrize(("level", "wide"), [pytest.param("x86-64-v3", False, marks=pytest.mark.large), ("x86-64-v4", True)])
def test_loops_have_vectors_as_wide_as_the_processors(
    level: str, wide: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "width.py").write_text(WIDTH)
    monkeypatch.setenv("GRAPHC_PROCESSOR", level)
    done = subprocess.run([sys.executable, tmp_path / "width.py"], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == str(wide), done.stderr


def _is_made() -> bool:
    line = LINES[0].split()
    function = function_of(LINES[0])
    assert function is not None
    identity = identity_of(function, line[1:])
    return identity is not None and (AHEAD / str(processor().level) / f"{ahead_name(identity)}.o").exists()


@pytest.mark.full  # a process that trains
@pytest.mark.skipif(not _is_made(), reason="`make kernels` has not compiled these sources for this processor")
def test_a_first_start_needs_no_numba(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path / "cache"))
    assert _run(TRAINING, str(tmp_path / "m.onnx")) == "True False"


@pytest.mark.full  # a process that trains
@pytest.mark.skipif(not _is_made(), reason="`make kernels` has not compiled these sources for this processor")
def test_constants_that_begin_anywhere_in_a_file_need_no_kernels_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path / "cache"))
    assert _run(RECURRENT, str(tmp_path / "m.onnx")) == "False"


@pytest.mark.full  # a process that starts
@pytest.mark.parametrize("level", ["x86-64-v9", "x86-64-v4"])
def test_a_level_that_cannot_be_had_is_refused(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if processor().level == level:
        pytest.skip("this processor has it")
    monkeypatch.setenv("GRAPHC_PROCESSOR", level)
    found = subprocess.run(
        [sys.executable, "-c", "from graphc.backend import BACKENDS; BACKENDS['onnxruntime'](threads=1)"],
        capture_output=True,
        text=True,
    )
    assert f"UsageError: GRAPHC_PROCESSOR={level}" in found.stderr
