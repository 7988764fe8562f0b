"""Shards of tensors in ONNX's multi-device annotations: carried out, checked, and written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import graphc
from graphc import Mesh
from graphc.cli import main
from graphc.distributed.threads import run_threads
from graphc.errors import UsageError
from graphc.ir.shards import cuts_of


def model() -> onnx.ModelProto:
    """Two MLPs, of which a file may divide one."""
    found = onnx.parser.parse_model("""
        <ir_version: 11, opset_import: ["": 21]>
        net (float[N, 4] x) => (float[N, 4] y)
        {
            a = MatMul (x, up)  b = Add (a, bias)  h = Relu (b)  m = MatMul (h, down)
            c = MatMul (m, up2)  h2 = Relu (c)  y = MatMul (h2, down2)
        }
    """)
    rng = np.random.default_rng(0)
    for name, shape in {"up": (4, 8), "bias": (8,), "down": (8, 4), "up2": (4, 8), "down2": (8, 4)}.items():
        found.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    return found


def annotated(
    node: int = 0, tensor: str = "up", axis: int = 1, shards: int = 2, devices: Sequence[int] = (0, 1), *, count: int = 2
) -> onnx.ModelProto:
    found = model()
    found.configuration.add(name="mine", num_devices=count)
    spec = found.graph.node[node].device_configurations.add(configuration_id="mine").sharding_spec.add(tensor_name=tensor)
    spec.device.extend(devices)
    spec.sharded_dim.add(axis=axis).simple_sharding.add(num_shards=shards, dim_value=8)
    return found


def compiled(found: onnx.ModelProto, mesh: Mesh, **options: Any) -> graphc.Program:
    return graphc.compile(
        found, loss=graphc.losses.MSE(), optimizer=graphc.optim.SGD(lr=0.02, momentum=0.9), mesh=mesh, **options
    )


def run(program: graphc.Program, comm: Any = None) -> tuple[list[float], dict[str, Any]]:
    rng = np.random.default_rng(1)
    feeds = {"x": rng.normal(size=(8, 4)).astype(np.float32), "label": rng.normal(size=(8, 4)).astype(np.float32)}
    with graphc.Trainer(program, comm=comm, threads=1) as trainer:
        each = 8 // trainer.data_size
        mine = slice(trainer.data_rank * each, (trainer.data_rank + 1) * each)
        losses = [trainer.step({name: array[mine] for name, array in feeds.items()})["loss"] for _ in range(3)]
        return losses, trainer.trained_values()


@pytest.mark.parametrize(
    "found",
    [annotated(), annotated(tensor="a", axis=-1), annotated(3, "down", 0), annotated(2, "h", 1)],
    ids=["weight", "activation", "rows", "between"],
)
def test_the_shards_of_the_file_are_carried_out(found: onnx.ModelProto) -> None:
    """The weights of the first MLP alone; without annotations all are divided."""
    program = compiled(found, Mesh(tensor=2))
    cuts = {name: cut.axis for name, cut in cuts_of(program.model.graph).items() if name in ("up", "bias", "down", "up2")}
    assert cuts == {"up": 1, "bias": 0, "down": 0}
    assert "up2" in cuts_of(compiled(model(), Mesh(tensor=2)).model.graph)
    losses, weights = run(compiled(model(), Mesh()))
    for mine, values in run_threads(2, lambda comm: run(program, comm)):
        np.testing.assert_allclose(mine, losses, rtol=1e-5)
        for name, array in weights.items():
            np.testing.assert_allclose(values[name], array, rtol=1e-5, atol=1e-6)


def test_groups_of_devices_are_replicas() -> None:
    """The shards of a mesh with a data axis: the first on ranks 0 and 2, the second on 1 and 3."""
    found = annotated(devices=(0, 1), count=4)
    spec = found.graph.node[0].device_configurations[0].sharding_spec[0]
    for key, ranks in enumerate([(0, 2), (1, 3)]):
        spec.index_to_device_group_map.add(key=key, value=ranks)
    assert set(cuts_of(compiled(found, Mesh(data=2, tensor=2)).model.graph)) >= {"up", "bias", "down"}
    spec.index_to_device_group_map[0].value[:] = (0, 1)
    with pytest.raises(
        UsageError, match=r"lie on .* in the file, and on the mesh data=2,tensor=2 they lie on \[\(0, 2\), \(1, 3\)\]"
    ):
        compiled(found, Mesh(data=2, tensor=2))


def test_options_come_before_the_file() -> None:
    assert set(cuts_of(compiled(annotated(), Mesh(tensor=2), shard=["up2=1"]).model.graph)) & {"up", "up2"} == {"up2"}


def test_wrong_shards_are_refused() -> None:
    staged = annotated()
    staged.graph.node[1].device_configurations.add(configuration_id="mine", pipeline_stage=1)
    for found, message in (
        (annotated(shards=4), "cuts axis 1 of 'up' into 4 shards, and the mesh data=1,tensor=2 divides by tensor=2"),
        (annotated(axis=2), "cuts axis 2 of 'up', which has 2"),
        (annotated(tensor="down"), "names the tensor 'down', which it neither reads nor makes"),
        (annotated(devices=(0, 7)), "names device 7 for 'up'; the configuration 'mine' has 0 … 1"),
        (annotated(devices=(1, 0)), "the shards of 'up' lie on"),
        (annotated(axis=0), "axis 0 of 'up' cannot be divided by 2: an input of the model is whole on every rank"),
        (staged, "puts it on pipeline stage 1, and the mesh data=1,tensor=2 has a tensor axis and no stages"),
    ):
        with pytest.raises(UsageError, match=message):
            compiled(found, Mesh(tensor=2))


def test_compile_writes_them(tmp_path: Path) -> None:
    """At every node that reads a shard, the updates too, with the sizes of whole tensors."""
    onnx.save(model(), tmp_path / "model.onnx")
    words = ["compile", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "t.onnx"), "--loss", "mse", "--optimizer", "sgd"]
    assert main([*words, "--mesh", "data=2,tensor=2", "--shard", "up=1", "--annotate"]) == 0
    written = onnx.load(tmp_path / "t.onnx")
    (configuration,) = written.configuration
    assert configuration.num_devices == 4
    found = {}
    for node in written.graph.node:
        for own in node.device_configurations:
            for spec in own.sharding_spec:
                assert {entry.key: list(entry.value) for entry in spec.index_to_device_group_map} == {0: [0, 2], 1: [1, 3]}
                (dim,) = spec.sharded_dim
                found[spec.tensor_name] = (dim.axis, dim.simple_sharding[0].num_shards, dim.simple_sharding[0].dim_value)
    assert found == {"up": (1, 2, 8), "bias": (0, 2, 8), "down": (0, 2, 8)}
    assert main([*words, "--annotate"]) == 2, "there is nothing to write"
