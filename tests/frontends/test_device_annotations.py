"""ONNX's multi-device annotations: carried out, checked, and written."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from graphc import Mesh
from graphc.cli import main
from graphc.distributed.threads import run_threads
from graphc.errors import UsageError
from tests.training import pipe_cases as cases


def annotated(
    stages: dict[str, int] | None = None, devices: dict[str, int] | None = None, *, count: int = 2, shards: int = 1
) -> onnx.ModelProto:
    """The four layers of :func:`cases.mlp` with the stage, or the device, of the nodes that make these values."""
    model = cases.mlp()
    model.ir_version = 11
    model.configuration.add(name="two", num_devices=count)
    for node in model.graph.node:
        name = node.output[0]
        if stages and name in stages:
            node.device_configurations.add(configuration_id="two", pipeline_stage=stages[name])
        if devices and name in devices:
            spec = node.device_configurations.add(configuration_id="two").sharding_spec.add(tensor_name=name)
            spec.device.append(devices[name])
            if shards > 1:
                dim = spec.sharded_dim.add(axis=0)
                dim.simple_sharding.add(num_shards=shards, dim_value=8)
    return model


STAGES = {"m0": 0, "h1": 0, "m2": 1, "y": 1}


def stages_of(model: onnx.ModelProto, pipe: int = 2, **options: object) -> dict[str, str]:
    program = cases.compiled(model, Mesh(pipe=pipe), 1, **options)
    return {
        n.outputs[0].name: n.metadata_props["graphc.stage"] for n in program.model.graph if "graphc.stage" in n.metadata_props
    }


def test_pipeline_stages_of_the_file_are_carried_out() -> None:
    found = stages_of(annotated(STAGES))
    assert [found[name] for name in ("h0", "h1", "m2", "h2", "w1::grad", "w2::grad")] == ["0", "0", "1", "1", "0", "1"]
    model = annotated(STAGES)
    data = cases.batches(model, [8])
    wanted = cases.run(cases.compiled(model, Mesh(), 2), data)
    program = cases.compiled(model, Mesh(pipe=2), 2, schedule="gpipe")
    found_runs = run_threads(2, lambda comm: cases.run(program, data, comm), deadline=60)
    assert max(cases.distance(one, wanted) for one in found_runs) < 1e-5


def test_tensors_on_devices_place_their_nodes() -> None:
    found = stages_of(annotated(devices={"m0": 1, "m1": 0, "m3": 1}))
    assert [found[name] for name in ("m0", "h0", "m1", "h2", "m3")] == ["1", "1", "0", "0", "1"]


def test_options_come_before_the_file() -> None:
    assert stages_of(annotated(STAGES), cut=["h0"])["m1"] == "1"


def test_wrong_annotations_are_refused() -> None:
    unknown = annotated(STAGES)
    unknown.graph.node[0].device_configurations[0].configuration_id = "tow"
    tensor = annotated(devices={"m0": 0})
    tensor.graph.node[0].device_configurations[0].sharding_spec[0].tensor_name = "h1"
    for model, message in (
        (unknown, "configuration 'tow', which the model does not declare.*did you mean 'two'"),
        (tensor, "names the tensor 'h1', which it neither reads nor makes"),
        (annotated(devices={"m0": 5}), "names device 5 for 'm0'; the configuration 'two' has 0 … 1"),
        (annotated(devices={"m0": 0}, shards=2), "cuts 'm0' into shards"),
        (annotated({"m0": 1, "m1": 0}), "make a cycle between stages: .* on stage 0 reads from .* on stage 1"),
        (annotated({"m0": 0, "m1": 1, "m2": 2}), "ask for 3 stages, and the mesh and schedule have 2"),
    ):
        with pytest.raises(UsageError, match=message):
            stages_of(model)


def test_compile_writes_them(tmp_path: Path) -> None:
    onnx.save(cases.mlp(), tmp_path / "model.onnx")
    options = ["--loss", "softmax_cross_entropy", "--optimizer", "sgd", "--mesh", "pipe=2", "--cut", "h1", "--annotate"]
    assert main(["compile", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "t.onnx"), *options]) == 0
    written = onnx.load(tmp_path / "t.onnx")
    (configuration,) = written.configuration
    assert (configuration.num_devices, list(configuration.device)) == (2, ["pipe:0", "pipe:1"])
    found = {n.output[0]: n.device_configurations[0].pipeline_stage for n in written.graph.node if n.device_configurations}
    assert (found["m1"], found["m2"], found["w1::grad"], found["w2::grad"]) == (0, 1, 0, 1)
    assert written.ir_version >= 11
    assert main(["compile", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "t.onnx"), *options[:4], "--annotate"]) == 2
