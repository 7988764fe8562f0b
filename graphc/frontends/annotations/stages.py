"""ONNX's own multi-device annotations (IR 11): read as a request for pipeline stages or devices, checked, and written.

``ModelProto.configuration`` declares devices, ``NodeProto.device_configurations`` says where a node runs: a ``pipeline_stage``,
or tensors that lie whole on one device. ONNX's checker does not look at either.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator

import onnx_ir as ir

from graphc.errors import UsageError, nearest
from graphc.ir.facts import describe
from graphc.ir.names import PLACED, SCHEDULE, STAGE
from graphc.mesh import Mesh

IR_VERSION = 11
"""The first version of the format with annotations."""

NAME = "graphc"
"""The configuration that :func:`annotate_stages` writes."""


def read(original: ir.Model, working: ir.Model) -> list[str]:
    """Mark the nodes of ``working``, a copy of ``original``, with their pipeline stages.

    Returns:
        The placements, as ``GLOB=DEVICE``, where the file puts nodes on devices and not on stages.

    Raises:
        UsageError: an unknown configuration, device or tensor, or a tensor that is cut into shards.
    """
    placed: list[str] = []
    staged = False
    copies = dict(zip(original.graph, working.graph, strict=True))
    for node, found, _ in checked_configurations(original):
        if found.pipeline_stage is not None:
            copies[node].metadata_props[STAGE] = str(found.pipeline_stage)
            staged = True
        devices = set(_devices(node, found))
        if len(devices) == 1 and node.outputs:
            placed.append(f"{glob.escape(node.outputs[0].name or node.name or '')}={devices.pop()}")
    return [] if staged else placed


def checked_configurations(
    model: ir.Model,
) -> Iterator[tuple[ir.Node, ir.NodeDeviceConfiguration, ir.ModelConfiguration]]:
    """Every annotation of a node with the configuration that it names.

    Raises:
        UsageError: an unknown configuration, device or tensor, or a negative stage.
    """
    known = {configuration.name: configuration for configuration in model.device_configurations}
    for node in model.graph:
        for found in node.device_configurations:
            name = found.configuration.name if found.configuration is not None else ""
            if name not in known:
                raise UsageError(
                    f"{describe(node)}: its device annotation names the configuration {name!r}, which the model does not"
                    f" declare{nearest(name, known)}"
                )
            if found.pipeline_stage is not None and found.pipeline_stage < 0:
                raise UsageError(f"{describe(node)}: pipeline_stage {found.pipeline_stage} is negative")
            for spec in found.sharding_specs:
                _check_spec(node, spec, known[name])
            yield node, found, known[name]


def _check_spec(node: ir.Node, spec: ir.ShardingSpec, declared: ir.ModelConfiguration) -> None:
    if spec.value is None or spec.value not in (*node.inputs, *node.outputs):
        tensor = spec.value.name if spec.value is not None else ""
        raise UsageError(
            f"{describe(node)}: its device annotation names the tensor {tensor!r}, which it neither reads nor makes"
        )
    for device in devices_of(spec):
        if not 0 <= device < declared.num_devices:
            raise UsageError(
                f"{describe(node)}: its device annotation names device {device} for {spec.value.name!r};"
                f" the configuration {declared.name!r} has 0 … {declared.num_devices - 1}"
            )


def devices_of(spec: ir.ShardingSpec) -> list[int]:
    """The devices on which a tensor lies."""
    groups = {entry.key: entry.value for entry in spec.index_to_device_group_map}
    return [device for key in spec.device for device in groups.get(key, (key,))]


def _devices(node: ir.Node, found: ir.NodeDeviceConfiguration) -> Iterator[int]:
    """The devices on which the results of a node lie."""
    for spec in found.sharding_specs:
        name = spec.value.name if spec.value is not None else ""
        if any(part.num_shards > 1 for dim in spec.sharded_dims for part in dim.simple_shardings):
            raise UsageError(
                f"{describe(node)}: the file cuts {name!r} into shards, and a mesh with pipeline stages puts whole"
                " tensors on devices; remove the sharded dimensions, or give --cut or --place instead of the annotations"
            )
        devices = set(devices_of(spec))
        if len(devices) == 1 and spec.value in node.outputs:
            yield devices.pop()


def annotate_stages(model: ir.Model) -> None:
    """Write the stages (or devices) of a training graph as annotations of the format."""
    mesh = Mesh.parse(model.metadata_props.get("graphc.mesh", "data=1"))
    devices = tuple(f"pipe:{place}" for place in range(mesh.pipe))
    configuration = ir.ModelConfiguration(NAME, len(devices), devices)
    placed = model.metadata_props[SCHEDULE] == PLACED
    model.device_configurations = (configuration,)
    for node in model.graph:
        node.device_configurations = ()
        stage = node.metadata_props.get(STAGE)
        if stage is None:
            continue
        device = int(stage) % mesh.pipe
        specs = tuple(ir.ShardingSpec(value=value, device=(device,)) for value in node.outputs if value.name)
        number = None if placed else int(stage)
        node.device_configurations = (ir.NodeDeviceConfiguration(configuration, specs, number),)
    model.ir_version = max(model.ir_version, IR_VERSION)
