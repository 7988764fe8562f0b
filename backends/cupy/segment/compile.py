"""Compiles a segment to a list of calls: kernels, library calls, host nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import onnx
import onnx_ir as ir

from graphc.backends.cupy.codegen import vectorize
from graphc.backends.cupy.codegen.launch_shape import Shape, blocks, host, keeps_busy, render, shared_rows, spread
from graphc.backends.cupy.codegen.memory_order import ordered
from graphc.backends.cupy.codegen.row_column import Crossed, cross, sources
from graphc.backends.cupy.kernels.scatter import omit_fills, scatter_into_sums
from graphc.backends.cupy.libraries import registry
from graphc.backends.cupy.libraries.gemm import Choose, by_rule
from graphc.backends.cupy.rewrite.cast_order import small_casts_first, small_casts_last
from graphc.backends.cupy.rewrite.gemm_epilogues import join_products
from graphc.backends.cupy.rewrite.sign_bits import pack_masks
from graphc.backends.cupy.segment.control_flow import body_models
from graphc.backends.cupy.segment.inplace import overwrite
from graphc.backends.cupy.segment.program import Call, Control, KernelCall, NodeCall, Segment
from graphc.backends.fusion.generator import Generator
from graphc.backends.fusion.graph_queries import INTO, results, sweep
from graphc.backends.fusion.grouping import group, in_place_of
from graphc.backends.fusion.groups import SMALL, FusedKernel, Opaque
from graphc.backends.fusion.kernel_source import Form, KernelSource
from graphc.backends.fusion.op_kernels import is_expression
from graphc.backends.fusion.rules.decompose import take_apart
from graphc.ir.decomposition import decompose_graph
from graphc.ir.facts import size_of
from graphc.ir.infer import propagate
from graphc.ir.subgraphs import CONTROL


def compile_segment(
    model: onnx.ModelProto,
    *,
    device: bool = True,
    splits: Callable[[int, int, bool], int] | None = None,
    choose: Choose = by_rule,
    loose_gelu: bool = False,
) -> Segment:
    """Compile a segment of standard ops with static shapes.

    Args:
        device: generate CUDA C; otherwise C++ for the host.
        splits: (rows, columns, whether columns are contiguous) → blocks that share a row; None: enough to keep a device busy.
        choose, loose_gelu: how products get epilogues (:func:`.gemm_epilogues.join_products`).
    """
    graph = ir.from_proto(model).graph
    graph.initializers.clear()  # their values stay: a segment treats initializers of any type and rank as constants
    propagate(graph)
    take_apart(graph, _is_special)
    propagate(graph)
    sweep(graph)
    scatter_into_sums(graph)
    join_products(graph, choose, loose_gelu=loose_gelu)
    if decompose_graph(graph, lambda node: _is_special(node) or is_expression(node)):
        propagate(graph)
        take_apart(graph, _is_special)
    omit_fills(graph)
    sweep(graph)
    small_casts_first(graph, SMALL)
    small_casts_last(graph, SMALL)
    pack_masks(graph, SMALL)
    grouping = group(graph, _is_special, keeps_busy)
    calls: list[Call] = []
    for launch in cross(grouping):
        if isinstance(launch, Opaque) and launch.node.op_type in CONTROL and not launch.node.domain:
            models = body_models(launch.node)
            within = functools.partial(compile_segment, device=device, splits=splits, choose=choose, loose_gelu=loose_gelu)
            calls.append(Control(launch.node, tuple(map(within, models))) if models is not None else NodeCall(launch.node))
        elif isinstance(launch, Opaque):
            calls += _node_calls(launch.node, grouping.aliases, device)
        elif isinstance(launch, Crossed):
            calls += _crossed_calls(launch, grouping.memory, device)
        else:
            calls += _kernel_calls(launch, grouping.memory, device, splits)
    in_place = {in_place_of(n.inputs[0]): n.outputs[0] for n in graph if INTO in n.meta and n.inputs[0] is not None}
    return Segment(graph, *overwrite(graph, calls, {**grouping.aliases, **in_place}, device=device))


def _is_special(node: ir.Node) -> bool:
    """Whether a library or a handwritten kernel runs the node."""
    return registry.special(node) is not None


def _node_calls(node: ir.Node, aliases: dict[ir.Value, ir.Value], device: bool) -> list[KernelCall | NodeCall]:
    if not any(size_of(out) for out in results(node)):
        return []  # every result is empty
    found = registry.special(node)
    if not isinstance(found, registry.NodeKernel):
        return [NodeCall(node, found)]
    calls: list[KernelCall | NodeCall] = []
    for launch in found.build(node):
        if not launch.rows:
            continue
        source = launch.source()
        source = replace(source, operands=tuple(aliases.get(v, v) for v in source.operands))
        if not device:
            shape = host(source.rows, source.columns)
        elif launch.block:
            shape = blocks(source.rows, source.columns)
        elif launch.lanes:
            shape = shared_rows(source.rows, launch.lanes)
        elif source.columns == 1:
            shape = shared_rows(source.rows, 1)  # a thread does more work than storing one number
        else:
            shape = spread(source.rows, source.columns)
        name, text = render(source, shape, device=device)
        calls.append(KernelCall(source, name, text, shape))
    return calls


def _kernel_calls(
    kernel: FusedKernel, memory: set[ir.Value], device: bool, splits: Callable[[int, int, bool], int] | None
) -> list[KernelCall | NodeCall]:
    own = set(kernel.stores) | {out for node in kernel.reductions for out in node.outputs}

    def in_memory(value: ir.Value) -> bool:
        producer = value.producer()
        if value in own or value in kernel.recomputed:
            return False
        return value in memory or producer is None or producer.op_type == "Constant"

    spec = kernel.spec
    plain = Generator(spec, in_memory)
    source = plain.source()
    loops = ordered(spec, source, lambda loops: Generator(spec, in_memory, Form(loops=loops)).source())
    if loops:
        plain = Generator(spec, in_memory, Form(loops=loops))
        source = plain.source()
    form = vectorize.choose(plain, source, wide=device)
    generator = Generator(spec, in_memory, form)
    wanted = splits(spec.rows, spec.columns, not form.strided) if splits else None
    if not kernel.axes or not generator.divides() or vectorize.parts_of(spec, form, wanted) == 1:
        return [_call(generator.source(), vectorize.shape_of_form(spec, form), device)]
    first, second = generator.halves()
    parts, shape, finishes = vectorize.divided(spec, first, wanted)
    if finishes:  # with all that follows from the totals: it is as little as they are, one element a row
        return [_call(Generator(spec, in_memory, form).finished(), shape, device, parts)]
    return [
        _call(first, shape, device, parts),
        _call(second, vectorize.parts_sum(spec.rows, parts), device, parts),
    ]


def _crossed_calls(launch: Crossed, memory: set[ir.Value], device: bool) -> list[KernelCall | NodeCall]:
    first, second, shape = sources(launch, memory, wide=device)
    name, text = render(first, shape, device=device)
    parts = shape.blocks
    return [
        KernelCall(first, name, text, shape, parts),
        _call(second, vectorize.parts_sum(launch.sums.spec.rows, parts), device, parts),
    ]


def _call(source: KernelSource, shape: Shape, device: bool, parts: int = 1) -> KernelCall:
    if not device:
        form, columns = source.form, source.columns if shape.splits == 1 else 1
        shape = host(source.rows, columns, splits=shape.splits, vector=form.vector, strided=form.strided)
    name, text = render(source, shape, device=device, parts=parts)
    return KernelCall(source, name, text, shape, parts)
