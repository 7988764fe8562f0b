"""Gives every symbolic dimension of a graph a size, and brings the graph into the form that a plan partitions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphc.backend import STANDARD, Capabilities
from graphc.errors import FeedError, ModelError
from graphc.ir.bound_inputs import how_to_choose
from graphc.ir.declare import SHARD, declaration_of, is_update
from graphc.ir.decomposition import decompose_graph, is_decomposed
from graphc.ir.dim_expressions import evaluate, is_name, symbols
from graphc.ir.facts import Dim, describe, dims, static_dims
from graphc.ir.infer import propagate
from graphc.ir.model_bytes import check_sizes
from graphc.ir.names import CLASSES
from graphc.ir.ops.accumulation import is_accumulation
from graphc.ir.symbolic_dims import product
from graphc.mesh import ALONE, Mesh
from graphc.pipeline import PASSES, Context, parse
from graphc.plan.group_places import group_of, settle_coordinates
from graphc.plan.half_precision import emulate_halves, narrow_storage

VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
"""Ops whose result is the same memory with another shape."""


def specialise(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> ir.Model:
    """Copy ``model`` with concrete ``shapes`` of the graph inputs; every value becomes static.

    Raises:
        FeedError: a shape that contradicts the graph input, two sizes for one symbol, an expression such as ``2*N`` that
            has another value, or shapes that some node of the model rejects.
        ModelError: a value larger than any machine holds.
    """
    _check_sizes(model.graph, shapes)
    try:
        copy = _static(model, shapes)
    except ModelError as error:
        given = ", ".join(f"{v.name} {list(shapes[v.name or ''])}" for v in model.graph.inputs)
        reason = str(error.__cause__ or error).partition("\n")[0]
        advice = _works_at_one(model, shapes) or how_to_choose(model.graph)
        raise FeedError(f"the feeds {given} do not fit together: {reason}{advice}") from error
    check_sizes(copy.graph)
    return copy


def _static(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> ir.Model:
    copy = model.clone()
    for value in copy.graph.inputs:
        value.shape = ir.Shape([int(d) for d in shapes[value.name or ""]])
    for node in copy.graph:
        for out in node.outputs:
            if node.op_type != "Constant":
                out.shape = None
    propagate(copy.graph)
    for node in copy.graph:
        if node.op_type in VIEWS and not node.domain and (source := node.inputs[0]) is not None:
            have, want = static_dims(source), static_dims(node.outputs[0])
            if have is not None and want is not None and math.prod(have) != math.prod(want):
                raise ModelError(f"{describe(node)} cannot give {math.prod(have)} elements this shape")
    return copy


def _works_at_one(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> str:
    """What to do about a file whose symbol is a promise that its nodes break: they were traced with that size 1."""
    declared = {value.name or "": dims(value) or () for value in model.graph.inputs}
    for symbol in dict.fromkeys(dim for want in declared.values() for dim in want if isinstance(dim, str) and is_name(dim)):
        ones = {
            name: [1 if dim == symbol else k for k, dim in zip(shapes[name], want, strict=True)]
            for name, want in declared.items()
        }
        if ones == {name: list(shapes[name]) for name in declared}:
            continue
        with contextlib.suppress(ModelError):
            _static(model, ones)
            return (
                f"; the model declares any {symbol} but computes with {symbol} = 1 only: train it at that size"
                " (--per-worker-batch 1, and --accumulate for larger batches), or export it with another example"
            )
    return ""


def _check_sizes(graph: ir.Graph, shapes: Mapping[str, Sequence[int]]) -> None:
    """Compare the fed shapes with the declared ones: their ranks, numbers, symbols, and arithmetic over symbols."""
    names: dict[str, int] = {}
    others: dict[str, int] = {}  # such as p2o.Dynamic-3: known by their text alone
    derived: list[tuple[str, int, str, int]] = []
    for value in graph.inputs:
        name, declared = value.name or "", dims(value)
        shape = tuple(shapes[name])
        found = value.metadata_props.get(CLASSES)
        hint = f"; the loss found the classes on {found}: say axis= to it for another" if found else ""
        if declared is not None and len(declared) != len(shape):
            raise FeedError(
                f"feed {name!r} has shape {list(shape)}, the model wants rank {len(declared)}: {_show(declared)}{hint}"
            )
        for axis, (have, want) in enumerate(zip(shape, declared or (), strict=False)):
            if isinstance(want, str):
                known = names if is_name(want) else others
                size = known.setdefault(str(product((want,))), have)
                if size != have:
                    raise FeedError(
                        f"feed {name!r} has shape {list(shape)}: its {want!r} is {have} here, {size} elsewhere{hint}"
                    )
                if known is others:
                    derived.append((name, axis, want, have))
            elif want is not None and want != have:
                raise FeedError(f"feed {name!r} has shape {list(shape)}, the model wants {_show(declared or ())}{hint}")
    for name, axis, text, have in derived:
        wanted = evaluate(text, names)
        if wanted is not None and wanted != have:
            own = not set("+-/%()") & set(text)  # graphc writes products only
            raise FeedError(
                f"feed {name!r} has shape {list(shapes[name])}: the model wants {text} = {wanted} on axis {axis}, where"
                f" {', '.join(f'{symbol} = {names[symbol]}' for symbol in symbols(text) if symbol in names)} in these feeds"
                + ("" if own else f"; if the file is wrong there, give that size another name: --shape {name}=…, shapes={{…}}")
            )


def _show(declared: Sequence[Dim]) -> str:
    return "[" + ", ".join("?" if d is None else str(d) for d in declared) + "]"


def prepare(
    model: ir.Model,
    shapes: Mapping[str, Sequence[int]],
    capabilities: Capabilities = STANDARD,
    *,
    mesh: Mesh = ALONE,
    rank: int = 0,
    regions: bool = False,
) -> ir.Model:
    """Specialise, decompose ops for which the backend has no kernel, and simplify.

    Args:
        capabilities: the backend's; ops that it does not compute in half precision run in float32
            (:mod:`graphc.plan.half_precision`).
        mesh, rank: the axes of the world, and the rank that will run it; in a group of one rank there are no collectives.
        regions: keep the nodes that only matter to a plan: the marks before recomputed regions, without which the regions would
            be merged away, and the sums over micro-batches.
    """
    copy = specialise(model, shapes)
    settle_coordinates(copy.graph, mesh, rank)
    ctx = Context()
    PASSES["late_gradients"].function(copy, ctx)
    simplify = PASSES["simplify"].function
    simplify(copy, ctx)
    emulated = emulate_halves(copy.graph, capabilities.computes_halves)

    def keep(node: ir.Node) -> bool:
        if is_update(node) or (regions and (node.op_type == "Recompute" or is_accumulation(node))):
            return True
        declaration = declaration_of(node)
        if declaration is not None and declaration.effect:
            return mesh.extent(group_of(node)) > 1
        if declaration is not None and declaration.combine and node.attributes.get_string(SHARD, ""):
            return mesh.data > 1 or capabilities.prefers_native(node)
        return capabilities.prefers_native(node) or capabilities.holds(node)

    def decompose() -> bool:
        found = False
        while not is_decomposed(copy.graph, keep):
            decompose_graph(copy.graph, keep)
            found |= emulate_halves(copy.graph, capabilities.computes_halves)
            simplify(copy, ctx)
        return found

    emulated |= decompose()
    if capabilities.rewrites:
        rewritten = False
        for step in parse(capabilities.rewrites):
            rewritten |= PASSES[step.name].function(copy, ctx, **PASSES[step.name].bind(step.options))
        if rewritten:
            simplify(copy, ctx)
            emulated |= decompose()
    if emulated:
        simplify(copy, ctx)
        narrow_storage(copy.graph)
    return copy
