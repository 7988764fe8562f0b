"""Small files that ask for much: refused by name, before memory or time is spent on them."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

import graphc
from graphc import frontends
from graphc.cli import main
from graphc.errors import FeedError, ModelError, UsageError
from graphc.ir.symbolic_dims import product
from graphc.options import ReadOptions
from graphc.pipeline import run
from graphc.training.inference import run_model
from tests.fuzz.child import attempt

HUGE = 2**40


def net(body: str, inputs: str = "float[1] x", outputs: str = "float[n] y") -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> net ({inputs}) => ({outputs}) {{ {body} }}')


EXPANSIONS = {
    "fill": f"to = Constant <value = int64[1] {{{HUGE}}}> ()  w = ConstantOfShape (to)  y = Add (x, w)",
    "a square": "to = Constant <value = int64[2] {4294967296, 4294967296}> ()  w = ConstantOfShape (to)  y = Add (x, w)",
    "70 axes": f"to = Constant <value = int64[70] {{{','.join(['1'] * 70)}}}> ()  w = ConstantOfShape (to)  y = Add (x, w)",
    "negative": "to = Constant <value = int64[1] {-5}> ()  w = ConstantOfShape (to)  y = Add (x, w)",
    "expand": f"one = Constant <value = float[1] {{1}}> ()  to = Constant <value = int64[1] {{{HUGE}}}> ()"
    "  w = Expand (one, to)  y = Add (x, w)",
    "tile": f"one = Constant <value = float[1] {{1}}> ()  to = Constant <value = int64[1] {{{HUGE}}}> ()"
    "  w = Tile (one, to)  y = Add (x, w)",
    "range": f"a = Constant <value = int64 {{0}}> ()  b = Constant <value = int64 {{{HUGE}}}> ()"
    "  c = Constant <value = int64 {1}> ()  r = Range (a, b, c)  w = Cast <to = 1> (r)  y = Add (x, w)",
    "outer product": "a = Constant <value = int64[2] {2000000, 1}> ()  b = Constant <value = int64[2] {1, 2000000}> ()"
    "  f = ConstantOfShape (a)  g = ConstantOfShape (b)  w = MatMul (f, g)  s = ReduceSum (w)  y = Add (x, s)",
    "1,000 fills": "to = Constant <value = int64[1] {100000000}> ()"
    + "".join(f"  w{k} = ConstantOfShape (to)" for k in range(1000))
    + "  s = Sum ("
    + ", ".join(f"w{k}" for k in range(1000))
    + ")  t = ReduceSum (s)  y = Add (x, t)",
}


@pytest.mark.parametrize("body", EXPANSIONS.values(), ids=EXPANSIONS)
def test_constants_that_expand_beyond_the_limit_are_refused_by_name(body: str) -> None:
    def legalize() -> None:
        run(frontends.load(net(body)), "legalize")

    found = attempt(legalize, seconds=10, megabytes=1024)
    assert found.ending == "refused", found
    assert "makes a constant of" in found.detail or "no machine holds" in found.detail
    assert found.seconds < 5


def test_the_message_names_the_node_the_size_and_the_option() -> None:
    with pytest.raises(ModelError, match=r"w = ConstantOfShape|ConstantOfShape\(to") as error:
        run(frontends.load(net(EXPANSIONS["fill"])), "legalize")
    for word in (str(HUGE), "4.0 TiB", "2.0 GiB", "--max-model-bytes", "max_model_bytes"):
        assert word in str(error.value)


def test_the_axes_of_a_slice_may_claim_any_number() -> None:
    """M3 of the first campaign: 232 bytes took 11 GB and 20 s, since a shape of so many unknown sizes was written out."""
    body = "y = Slice (x, starts, starts, axes)"
    model = net(body, f"float[2] x, int64[{HUGE}] starts, int64[{HUGE}] axes", "float[2] y")
    found = attempt(lambda: run(frontends.load(model), "legalize"), seconds=10, megabytes=1024)
    assert found.good, found
    assert found.seconds < 5


def test_an_option_allows_more_or_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.onnx"
    onnx.save(net("to = Constant <value = int64[1] {1000}> ()  w = ConstantOfShape (to)  y = Add (x, w)", "float[1] x"), file)
    loss, optimizer = graphc.losses.MSE(), graphc.optim.SGD(lr=0.1)
    assert graphc.compile(file, loss=loss, optimizer=optimizer).model
    assert graphc.compile(file, loss=loss, optimizer=optimizer, max_model_bytes=4008).model
    with pytest.raises(ModelError, match=r"3.9 KiB.*more than the 1000 bytes"):
        graphc.compile(file, loss=loss, optimizer=optimizer, max_model_bytes=1000)
    with pytest.raises(ModelError, match="1000 bytes"):
        graphc.grad(file, of="y", wrt="x", max_model_bytes=1000)
    with pytest.raises(ModelError, match="1000 bytes"):
        run_model(file, {"x": np.ones(1, np.float32)}, max_model_bytes=1000)
    for words in (["check"], ["opt", "-p", "legalize"], ["inspect", "--show", "params"]):
        assert main([words[0], str(file), *words[1:], "--max-model-bytes", "1000"]) in (1, 3)
        assert "1000 bytes" in "".join(capsys.readouterr())


def test_what_a_file_holds_counts_too(tmp_path: Path) -> None:
    model = net("y = Add (x, w)", "float[1000] x", "float[1000] y")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1000, np.float32), "w"))
    assert frontends.load(model, reading=ReadOptions(max_model_bytes=4000))
    with pytest.raises(ModelError, match=r"tensors of the model take 3.9 KiB, more than the 3.9 KiB|--max-model-bytes"):
        frontends.load(model, reading=ReadOptions(max_model_bytes=3999))


@pytest.mark.parametrize("name", ["9**9**9**9", "((((", "2*" * 5000 + "n", "9" * 5000, "²", "n" * 10**6, "1/0", "n*n*n"])
def test_symbolic_sizes_of_any_text_end_quickly(name: str) -> None:
    model = net(
        "s = Shape (x)  f = Mul (s, s)  g = Mul (f, f)  h = Cast <to = 1> (g)  y = ReduceSum (h)", "float[n, 2] x", "float y"
    )
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = name
    start = time.perf_counter()
    found = attempt(lambda: run(frontends.load(model), "legalize,simplify"), seconds=10, megabytes=1024)
    assert found.good, found
    assert time.perf_counter() - start < 5


def test_a_size_that_is_squared_again_and_again_stays_small() -> None:
    squares = "  ".join(f"s{k + 1} = Mul (s{k}, s{k})" for k in range(60))
    model = net(f"s0 = Shape (x)  {squares}  f = Cast <to = 1> (s60)  y = ReduceSum (f)", "float[n, 7] x", "float y")
    found = attempt(lambda: run(frontends.load(model), "legalize,simplify"), seconds=10, megabytes=1024)
    assert found.good, found
    assert found.seconds < 5
    assert product(["n"] * 40) == "*".join(["n"] * 40)
    assert product(["n"] * 100) is None
    assert product([2**40, 2**40]) is None


def test_an_input_bound_to_a_huge_constant_is_refused() -> None:
    with pytest.raises(UsageError, match="--max-model-bytes"):
        graphc.compile(
            net("s = ReduceSum (z)  y = Add (x, s)", "float[2] x, float[m] z"),
            loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.1), inputs={"z": f"zeros:{HUGE}"},
        )  # fmt: skip


def test_a_step_that_needs_more_than_the_machine_has_says_so() -> None:
    """The product of two feeds of 64 KiB has 2**38 elements."""
    model = net("y = MatMul (a, b)", "float[n, 1] a, float[1, m] b", "float[n, m] y")
    side = 2**19
    feeds = {"a": np.ones((side, 1), np.float32), "b": np.ones((1, side), np.float32)}
    found = attempt(lambda: run_model(model, feeds), seconds=20, megabytes=1024)
    assert found.ending == "refused", found
    assert "memory" in found.detail
    feeds = {"a": np.ones((2**21, 1), np.float32), "b": np.ones((1, 2**21), np.float32)}
    with pytest.raises((ModelError, FeedError), match="no machine holds"):
        run_model(model, feeds)
