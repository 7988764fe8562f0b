"""Sharded tensors in ONNX's multi-device annotations (IR 11): read as a request for shards, checked, and written.

A ``sharding_spec`` of a node says into how many shards an axis of a tensor is cut, and on which devices they lie. Over a mesh
with a tensor axis, shard k lies on the rank at place k of that axis; of several replicas, a device group lists them all.
"""

from __future__ import annotations

import glob

import onnx_ir as ir

from graphc.errors import UsageError
from graphc.frontends.annotations.stages import IR_VERSION, NAME, annotate_stages, checked_configurations
from graphc.ir.facts import describe, is_parameter
from graphc.ir.names import MESH, SCHEDULE
from graphc.ir.shards import cuts_of
from graphc.mesh import Mesh


def read_shards(model: ir.Model, mesh: Mesh) -> list[str]:
    """The shards that a file asks for, as ``NAME=AXIS``; parameters first, because they decide what follows.

    Raises:
        UsageError: an unknown configuration, device, tensor or axis; shards that the mesh does not have; a pipeline stage.
    """
    found: dict[tuple[ir.Value, int], None] = {}
    for node, own, declared in checked_configurations(model):
        if own.pipeline_stage is not None:
            raise UsageError(
                f"{describe(node)}: the file puts it on pipeline stage {own.pipeline_stage}, and the mesh {mesh} has a tensor"
                " axis and no stages; give a mesh with pipe=N, or --shard instead of the annotations"
            )
        for spec in own.sharding_specs:
            for dim in spec.sharded_dims:
                parts = [part.num_shards for part in dim.simple_shardings if part.num_shards > 1]
                if not parts:
                    continue
                assert spec.value is not None
                rank = len(spec.value.shape) if spec.value.shape is not None else None
                if rank is not None and not -rank <= dim.axis < rank:
                    raise UsageError(
                        f"{describe(node)}: the file cuts axis {dim.axis} of {spec.value.name!r}, which has {rank}"
                    )
                if parts != [mesh.tensor]:
                    raise UsageError(
                        f"{describe(node)}: the file cuts axis {dim.axis} of {spec.value.name!r} into"
                        f" {' x '.join(map(str, parts))} shards, and the mesh {mesh} divides by tensor={mesh.tensor}; change"
                        " one of the two, or give --shard instead of the annotations"
                    )
                _check_devices(node, spec, declared, mesh)
                found[spec.value, dim.axis if dim.axis >= 0 or rank is None else dim.axis + rank] = None
    ordered = sorted(found, key=lambda one: not is_parameter(one[0]))
    return [f"{glob.escape(value.name or '')}={axis}" for value, axis in ordered]


def _check_devices(node: ir.Node, spec: ir.ShardingSpec, declared: ir.ModelConfiguration, mesh: Mesh) -> None:
    """Shard k is held by the ranks whose place on the tensor axis is k."""
    groups = {entry.key: entry.value for entry in spec.index_to_device_group_map}
    held = [groups.get(key, (key,)) for key in spec.device]
    of_mesh = [tuple(r for r in range(mesh.size) if mesh.coordinate("tensor", r) == k) for k in range(mesh.tensor)]
    if held and held not in ([(k,) for k in range(mesh.tensor)], of_mesh):
        name = spec.value.name if spec.value is not None else ""
        raise UsageError(
            f"{describe(node)}: the shards of {name!r} lie on {held} in the file, and on the mesh {mesh} they lie on {of_mesh};"
            f" number the devices of {declared.name!r} so, or give --shard instead of the annotations"
        )


def annotate(model: ir.Model) -> None:
    """Write the stages, devices or shards of a training graph as annotations of the format.

    Raises:
        UsageError: the model has none of them.
    """
    mesh = Mesh.parse(model.metadata_props.get(MESH, "data=1"))
    if SCHEDULE in model.metadata_props:
        annotate_stages(model)
    elif mesh.tensor > 1:
        _annotate_shards(model, mesh)
    else:
        raise UsageError("--annotate writes pipeline stages or shards, and the model has none; give --mesh pipe=N or tensor=N")


def _annotate_shards(model: ir.Model, mesh: Mesh) -> None:
    """Write each divided tensor, with the size of the whole, at every node that reads it."""
    cuts = cuts_of(model.graph)
    names = tuple(f"data:{r // mesh.tensor},tensor:{r % mesh.tensor}" for r in range(mesh.size))
    configuration = ir.ModelConfiguration(NAME, mesh.size, names)
    model.device_configurations = (configuration,)
    members = [tuple(r for r in range(mesh.size) if r % mesh.tensor == k) for k in range(mesh.tensor)]
    groups = tuple(ir.IndexToDeviceGroupMapEntry(k, ranks) for k, ranks in enumerate(members)) if mesh.data > 1 else ()
    for node in model.graph:
        specs = []
        for value in dict.fromkeys(v for v in node.inputs if v is not None and v.name in cuts):
            cut = cuts[value.name or ""]
            size = value.shape[cut.axis] if value.shape is not None else None
            whole = size * cut.ranks if isinstance(size, int) else ir.SymbolicDim(None)
            sharded = ir.ShardedDim(cut.axis, (ir.SimpleShardedDim(whole, cut.ranks),))
            specs.append(ir.ShardingSpec(value, tuple(range(cut.ranks)), groups, (sharded,)))
        node.device_configurations = (ir.NodeDeviceConfiguration(configuration, tuple(specs), None),) if specs else ()
    model.ir_version = max(model.ir_version, IR_VERSION)
