"""The commands beside ``train``: what they print and write, compared with onnx, onnxruntime and PyTorch."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from graphc.cli import COMMANDS, main
from tests.cli.models import BLOCKED, MLP, blobs, cli, parse, write_blobs, write_mlp

LOSS = ("--loss", "softmax_cross_entropy")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_mlp(tmp_path)
    write_blobs(tmp_path)
    return tmp_path


def document(capfd: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--format", "json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_help_and_version_load_nothing_heavy() -> None:
    code = (
        "import sys; from graphc.cli import main; assert main(['--help']) == 0; assert main(['--version']) == 0\n"
        "heavy = {'numpy', 'onnx', 'onnx_ir', 'onnxruntime', 'numba', 'torch', 'mpi4py', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=200)


@pytest.mark.full
def test_listing_passes_loads_no_runtime() -> None:
    code = (
        "import sys; from graphc.cli import main; assert main(['passes']) == 0\n"
        "heavy = {'onnxruntime', 'numba', 'torch', 'mpi4py', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=200)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"graphc {name}" in capfd.readouterr().out


def test_check(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = document(capfd, "check", "mlp.onnx")
    assert found["trainable"]
    assert found["trained_parameters"] == 4
    assert found["trained_elements"] == 4 * 8 + 8 + 8 * 3 + 3
    assert found["ops"] == {"Gemm": 2, "Relu": 1}
    assert found["warnings"] == []


@pytest.mark.usefixtures("det_without_gradient")
def test_check_names_ops_and_counts(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    onnx.save(parse(BLOCKED), "blocked.onnx")
    assert main(["check", "blocked.onnx", "--format", "json"]) == 3
    (missing,) = json.loads(capfd.readouterr().out)["missing"]
    assert (missing["op"], missing["count"]) == ("Det", 1)
    assert missing["path"][0] == "w"


@pytest.mark.usefixtures("det_without_gradient")
def test_an_op_off_the_path_is_no_matter(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = BLOCKED.replace("h = MatMul (x, w)", "d = Det (x)").replace(
        "y = Det (h)", "h = MatMul (x, w)\n  s = ReduceSum <keepdims=0> (h)\n  y = Mul (d, s)"
    )
    onnx.save(parse(text), "off.onnx")
    assert document(capfd, "check", "off.onnx")["trainable"]
    assert main(["check", "off.onnx"]) == 0
    assert "can be trained" in capfd.readouterr().out


def test_check_warns(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = parse(MLP.replace("[N,", "[1,"))
    for tensor in model.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.ones(tuple(tensor.dims), np.float32), tensor.name))
    onnx.save(model, "ones.onnx")
    found = document(capfd, "check", "ones.onnx")
    assert "--initialize he" in " ".join(found["warnings"])
    assert "fixed at 1" in found["batch"]
    assert found["batch_size"] == 1


def test_inspect_params(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = document(capfd, "inspect", "mlp.onnx", "--show", "params", "--freeze", "b*")["params"]
    assert {r["name"]: r["reason"] for r in rows} == {
        "w1": "weight of Gemm",
        "b1": "frozen",
        "w2": "weight of Gemm",
        "b2": "frozen",
    }


def test_inspect_summary_and_nodes(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = document(capfd, "inspect", "mlp.onnx")
    assert found["nodes"] == 3
    assert found["opsets"] == {"": 17}
    nodes = document(capfd, "inspect", "mlp.onnx", "--show", "nodes")["nodes"]
    assert [n["op"] for n in nodes] == ["Gemm", "Relu", "Gemm"]
    assert main(["inspect", "mlp.onnx", "--show", "nodes,params,collectives"]) == 0
    assert "no collectives" in capfd.readouterr().out


def test_compile(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = document(capfd, "compile", "mlp.onnx", "-o", "t.onnx", *LOSS, "--optimizer", "adam", "-n", "2")
    assert found["trained_parameters"] == 4
    assert onnx.load("t.onnx").graph.input[1].name == "label"
    assert [row["pass"] for row in found["passes"]][:4] == ["legalize", "dequantize", "draws", "train_mode"]
    rows = document(capfd, "inspect", "t.onnx", "--show", "collectives")["collectives"]
    assert sum(r["bytes"] for r in rows) == found["allreduce_bytes"] >= 4 * found["trained_elements"]
    assert main(["show", "t.onnx", "--batch", "8", "--backend", "numpy"]) == 0
    plan = capfd.readouterr().out
    assert "plan for 2 workers" in plan
    assert "start" in plan


def test_memory_of_a_plain_model_is_that_of_its_forward_pass(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "mlp.onnx", "--memory"]) == 0
    assert "forward pass alone" in capfd.readouterr().out
    assert document(capfd, "inspect", "mlp.onnx", "--memory")["step"] == "inference"
    document(capfd, "compile", "mlp.onnx", "-o", "t.onnx", *LOSS, "--optimizer", "adam")
    assert document(capfd, "inspect", "t.onnx", "--memory")["step"] == "training"
    assert main(["inspect", "t.onnx", "--memory"]) == 0
    assert "forward pass" not in capfd.readouterr().out


@pytest.mark.full
def test_inspect_shows_the_memory_of_each_worker(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Adam's 8 bytes a parameter are divided by ZeRO, and lie on the host of rank 0 with central storage."""
    command = ["compile", "mlp.onnx", "-o", "t.onnx", *LOSS, "--optimizer", "adam", "--strategy"]
    assert main([*command, "zero:stage=1,offload=true"]) == 0
    capfd.readouterr()
    whole, half = (document(capfd, "inspect", "t.onnx", "--memory", "--batch", "8", "--mesh", f"data={n}") for n in (1, 2))
    assert half["optimizer"] == half["host"] == pytest.approx(whole["optimizer"] / 2, rel=0.1)
    assert half["parameters"] == pytest.approx(whole["parameters"], rel=0.1)
    assert main([*command, "central_storage"]) == 0
    capfd.readouterr()
    central = document(capfd, "inspect", "t.onnx", "--memory", "--batch", "8", "--mesh", "data=4")
    padding = 2 * 4 * 64  # both moments, on four ranks, to whole cache lines
    assert central["rank 0"]["host"] == pytest.approx(whole["optimizer"], abs=padding)
    assert central["other ranks"]["optimizer"] == 0
    assert main(["inspect", "t.onnx", "--memory", "--mesh", "data=2"]) == 0
    assert "of it on the host" in capfd.readouterr().out


def test_a_standard_training_graph_steps_as_pytorch_does(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "mlp.onnx", "-o", "s.onnx", "--standard", *LOSS, "--optimizer", "sgd:lr=0.5"]) == 0
    model = onnx.load("s.onnx")
    onnx.checker.check_model(model)
    assert {node.domain for node in model.graph.node} == {""}
    data = blobs(8)
    session = onnxruntime.InferenceSession("s.onnx", providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    results = dict(zip(names, session.run(None, data), strict=True))
    values = {
        t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy()).requires_grad_() for t in parse(MLP).graph.initializer
    }
    hidden = torch.relu(torch.from_numpy(data["x"]) @ values["w1"] + values["b1"])
    loss = torch.nn.functional.cross_entropy(hidden @ values["w2"] + values["b2"], torch.from_numpy(data["label"]))
    loss.backward()
    assert float(results["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    for name, value in values.items():
        assert value.grad is not None
        np.testing.assert_allclose(results[f"{name}::next"], (value - 0.5 * value.grad).detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_streams(here: Path) -> None:
    data = (here / "mlp.onnx").read_bytes()
    compiled = cli("compile", "-", "-o", "-", *LOSS, "--optimizer", "sgd", stdin=data)
    assert compiled.returncode == 0, compiled.stderr
    assert onnx.load_from_string(compiled.stdout).graph.input[1].name == "label"
    optimised = cli("opt", "-", "-p", "legalize,verify", "-o", "-", stdin=data)
    assert onnx.load_from_string(optimised.stdout).graph.output[0].name == "logits"


def test_opt_text(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["opt", "mlp.onnx", "-p", "legalize,simplify", "--print-after", "legalize", "--time-passes", "--verify-each"]
    assert main(arguments) == 0
    out, err = capfd.readouterr()
    assert "Relu" in out
    assert "// after legalize" in err
    assert "total" in err
    assert main(["opt", "mlp.onnx", "-p", "legalize", "-o", "m.onnxtxt"]) == 0
    assert main(["opt", "m.onnxtxt", "-p", "verify", "-o", "back.onnx"]) == 0
    assert [n.op_type for n in onnx.load("back.onnx").graph.node] == ["Gemm", "Relu", "Gemm"]


@pytest.mark.full
@pytest.mark.parametrize("backend", ["numpy", "onnxruntime"])
def test_run_is_onnxruntime(backend: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    x = blobs(5)["x"]
    np.savez("x.npz", x=x)
    rows = document(capfd, "run", "mlp.onnx", "--inputs", "x.npz", "-o", "y.npz", "--backend", backend)
    assert rows[0]["shape"] == [5, 3]
    session = onnxruntime.InferenceSession("mlp.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(np.load("y.npz")["logits"], session.run(None, {"x": x})[0], rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_run_streams(here: Path) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, x=blobs(5)["x"])
    done = cli("run", "mlp.onnx", "--inputs", "-", "-o", "-", "--backend", "numpy", stdin=buffer.getvalue())
    assert np.load(io.BytesIO(done.stdout))["logits"].shape == (5, 3)


@pytest.mark.full
def test_former_names_of_passes_are_found_and_listed(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in document(capfd, "passes")}
    assert rows["channels_last"]["aliases"] == ["layout"]
    assert rows["deterministic_shards"]["aliases"] == ["micro_shards"]
    assert not {"layout", "micro_shards"} & rows.keys()
    assert main(["passes"]) == 0
    assert "also called layout" in capfd.readouterr().out
    assert main(["passes", "micro_shards"]) == 0
    assert capfd.readouterr().out.startswith("deterministic_shards ")
    write_mlp(here)
    assert main(["opt", "mlp.onnx", "-p", "legalize,layout", "-o", "out.onnx"]) == 0


def test_the_dump_of_compile_begins_at_the_first_pass(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_mlp(here)
    options = ["--loss", "mse", "--optimizer", "sgd", "-o", "out.onnx", "--dump-dir", "stages", "--format", "json"]
    assert main(["compile", "mlp.onnx", *options]) == 0
    names = [row["pass"] for row in json.loads(capfd.readouterr().out)["passes"]]
    assert names[0] == "legalize"
    assert sorted(p.name for p in Path("stages").glob("*.onnx")) == [f"{k:02d}-{name}.onnx" for k, name in enumerate(names)]
    for path in Path("stages").glob("*.onnx"):
        onnx.load(path)


def test_passes(capfd: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in document(capfd, "passes")}
    assert {"legalize", "autodiff", "allreduce", "check"} <= rows.keys()
    assert {o["name"]: o["default"] for o in rows["bucket"]["options"]}["mb"] == 25.0
    assert rows["allreduce"]["requires"] == ["optimizer"]
    assert main(["passes", "bucket"]) == 0
    assert "megabytes" in capfd.readouterr().out


def test_backends(capfd: pytest.CaptureFixture[str]) -> None:
    found = {row["name"]: row["status"] for row in document(capfd, "backends")}
    assert found["numpy"] == found["onnxruntime"] == "ready"
    assert (
        found["onnxruntime-cuda"] == "ready" or "pip install" in found["onnxruntime-cuda"] or "GPU" in found["onnxruntime-cuda"]
    )


def test_ops(capfd: pytest.CaptureFixture[str]) -> None:
    found = document(capfd, "ops")
    standard = {row["name"]: row["gradient"] for row in found["onnx"]}
    assert [standard[op] for op in ("Conv", "ArgMax", "SwiGLU", "StringSplit")] == ["direct", "zero", "through body", "none"]
    assert found["summary"]["covered"] == sum(kind in ("direct", "through body") for kind in standard.values())
    assert "Upsample" not in standard, "deprecated operators are left out"
    assert {row["name"]: row["kind"] for row in found["graphc"]}["AllReduce"] == "collective"


@pytest.mark.mpi
def test_doctor(capfd: pytest.CaptureFixture[str]) -> None:
    found = document(capfd, "doctor")
    assert found["usable"]
    states = {f["what"]: f["state"] for f in found["findings"]}
    assert states["numpy"] == states["onnxruntime"] == states["workers over MPI"] == "ok"
    assert states["backend onnxruntime"] == "ok"
    details = {f["what"]: f["detail"] for f in found["findings"]}
    assert "kernels" in details["backend onnxruntime"], "how many are compiled ahead of time, or that Numba compiles them"
    assert {"GPU driver", "nvmath-python", "nccl4py", "onnxruntime-gpu"} <= states.keys()


@pytest.mark.full
def test_launch_in_threads(here: Path) -> None:
    (here / "s.py").write_text(
        "import sys\nfrom graphc.distributed.world import find_world\n"
        "w = find_world()\nsys.stdout.write(f'{w.rank} of {w.size} {sys.argv[1:]}\\n')\n"  # print writes its newline apart
    )
    done = cli("launch", "-n", 2, "--transport", "threads", "s.py", "--flag", "-n", "7")
    assert sorted(done.stdout.decode().splitlines()) == ["0 of 2 ['--flag', '-n', '7']", "1 of 2 ['--flag', '-n', '7']"]


@pytest.mark.full
def test_launch_returns_the_exit_code_of_the_script(here: Path) -> None:
    (here / "s.py").write_text("import sys\nsys.exit(7)\n")
    assert cli("launch", "-n", 2, "--transport", "threads", "s.py").returncode == 7


@pytest.mark.full
def test_colours_only_on_terminals(here: Path) -> None:
    pretend = {"GRAPHC_TERMINALS": "stdout"}
    assert b"\x1b[" in cli("passes", **pretend).stdout
    assert b"\x1b[3" not in cli("passes", **pretend, NO_COLOR="1").stdout
    assert b"\x1b" not in cli("passes").stdout


@pytest.mark.full
def test_a_closed_pipe_is_no_error(here: Path) -> None:
    line = f"{sys.executable} -m graphc ops | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=200, check=True)
    assert done.stderr == b""
