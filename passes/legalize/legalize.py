"""legalize: convert any ONNX model of opset 6 to 28 to the form that all other passes require.

    before  opset 9:   shape ─► ConstantOfShape ─► W;  Dropout(x, ratio=0.5);  Softmax(x, axis=1);  Conv(auto_pad=SAME_UPPER)
    after   opset 26:  W is an initializer;  Dropout(x, 0.5);  Softmax(x, axis=-1);  Conv(pads=[1, 1, 1, 1])

The result has one opset, no functions, parameters as initializers (none of them a graph input), constants as ``Constant``
nodes, a type for every value, and a unique name for every node and value. Names of inputs, outputs and parameters stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from graphc.errors import ModelError, NewerOpsetError, UnsupportedOpError, counted
from graphc.gradient import key_of
from graphc.ir import DOMAIN, IR_VERSION, OPSET
from graphc.ir.bound_inputs import how_to_choose
from graphc.ir.builder import Builder
from graphc.ir.control_flow import type_body_inputs
from graphc.ir.declare import declaration_of
from graphc.ir.exporter_records import is_detached, padding_row
from graphc.ir.facts import describe, dims, input_of
from graphc.ir.functions import emit_body, has_body
from graphc.ir.infer import apply, fold
from graphc.ir.model_bytes import check_sizes
from graphc.ir.opset_adapters import adapt
from graphc.ir.parameters import DECISIONS
from graphc.ir.state import not_finite
from graphc.ir.subgraphs import CONTROL, reachable_bodies, remove_with_bodies
from graphc.ir.toposort import sort_and_link
from graphc.ir.unknown_sizes import forget_unknown_sizes
from graphc.ir.verify import refused_type
from graphc.passes.gradients.attention import by_parts as attention_by_parts
from graphc.passes.legalize.annotations import Annotations
from graphc.passes.legalize.canonical import canonicalise, explicit_pads
from graphc.passes.legalize.contrib_ops import adapt_contributed
from graphc.passes.legalize.embedding_bags import compute_bags_at_once
from graphc.passes.legalize.evaluation_export import lost_dropout, lost_normalization
from graphc.passes.legalize.gradient_op import derivatives, is_gradient, put_gradients_last
from graphc.passes.legalize.input_shapes import fix_input_shapes
from graphc.passes.legalize.loop_variables import carry_less
from graphc.passes.legalize.mapped_loops import compute_mapped_loops_at_once
from graphc.passes.legalize.sequences import dissolve
from graphc.passes.legalize.structure import (
    initializers_are_no_inputs,
    inline_functions,
    is_placed,
    name_everything,
    normalise_domains,
    opset_of,
    remove_dead,
    untyped,
)
from graphc.passes.legalize.subgraphs import (
    decided_branch,
    hoist_initializers,
    name_constants,
    name_inputs,
    scalar_branches,
    scalar_counts,
    scalar_results,
)
from graphc.passes.parameters.promote import filler_nodes, promote
from graphc.pipeline import Context, graph_pass

_WINDOW = frozenset({"left_window_size", "right_window_size"})
"""Attributes that newer opsets added to Attention; onnxruntime rejects them."""


@graph_pass("legalize", changes="form")
def legalize(model: ir.Model, ctx: Context, *, train: Sequence[str] | None = None, shapes: Sequence[str] | None = None) -> bool:
    """Convert ``model`` to the form that the other passes take.

    Args:
        train: glob patterns of float constants that are parameters whatever the rules say, scalars and ``Constant`` nodes too.
        shapes: dimensions of graph inputs, as ``x=2;3;48;192``; ``?`` leaves a dimension as the file says.

    ``ctx.values["parameters"]`` becomes the list of a :class:`~graphc.ir.parameters.Decision` per float constant of the file.

    Raises:
        UsageError: a shape that does not fit its input.
        ModelError: an opset that cannot be converted, a cycle, a value without source or type, a node that rejects its inputs.
        UnsupportedOpError: an operator of a domain without declarations.
    """
    graph, version, before = model.graph, opset_of(model), len(model.graph)
    placed = is_placed(model)
    normalise_domains(model)
    sort_and_link(graph)
    lost = lost_normalization(model) or lost_dropout(model)
    inside = name_constants(graph)
    hoist_initializers(graph)
    name_everything(graph)
    initializers_are_no_inputs(graph)
    # before functions are inlined: the user's file does not contain the names inside their bodies
    fillers = [*filler_nodes(graph), *inside]
    inline_functions(model)
    name_everything(graph)
    name_inputs(graph)
    if not any(is_gradient(node) for node in graph):  # a Gradient names values in an attribute
        carry_less(graph)
    ctx.values[DECISIONS], parameters = promote(model, fillers, train)
    remove_dead(graph)
    put_gradients_last(graph)
    forget_unknown_sizes(graph)
    fix_input_shapes(graph, shapes or ())
    annotations = Annotations(graph)
    _convert(graph, version, model.opset_imports, annotations)
    compute_bags_at_once(graph)
    dissolve(graph)
    compute_mapped_loops_at_once(graph)
    annotations.finish(OPSET)
    check_sizes(graph)  # before ONNX's inference, which walks over the elements of what it takes for a shape
    _complete_shapes(model, version)
    remove_dead(graph)
    check_sizes(graph)
    _refuse_untyped(graph)
    used = {node.domain for node in graph.all_nodes()} - {"", DOMAIN}
    extra = {d: v for d, v in model.opset_imports.items() if d in used or d == DOMAIN}
    model.opset_imports.clear()
    model.opset_imports.update({"": OPSET, **extra})
    model.ir_version = IR_VERSION
    if lost is not None:
        ctx.warn("legalize", lost)
    broken = not_finite(graph)
    if broken:
        names = ", ".join(map(repr, broken[:8])) + (f" and {len(broken) - 8} more" if len(broken) > 8 else "")
        ctx.warn("legalize", f"NaN or infinity in {names}; training stops at the first step")
    if placed:
        ctx.warn("legalize", "the file places nodes on devices and shards tensors over them; that is not followed")
    wrong = annotations.warning()
    if wrong:
        ctx.warn("legalize", wrong)
    ctx.note(
        f"legalize: opset {version} → {OPSET}, {before} → {len(graph)} nodes, "
        f"{counted(parameters, 'parameter')} taken from nodes"
    )
    return True


def _convert(
    graph: ir.Graph, version: int, imports: dict[str, int], annotations: Annotations, inner: Builder | None = None
) -> None:
    """Convert, canonicalise and type every node, in order, so that each adapter sees typed inputs."""
    op = inner or Builder(graph)
    for node in list(graph):
        op.before, op.scope = node, node.name or node.op_type
        loops = node.domain == "" and node.op_type == "Loop"
        if loops:
            scalar_counts(op, node)
        if node.domain == "" and node.op_type in CONTROL and not (node.op_type == "Scan" and version < 9):
            type_body_inputs(node.op_type, node.inputs, node.attributes)
        try:
            for body in reachable_bodies(node):
                _convert(body, version, imports, annotations, op.inside(body))
        except ModelError as error:
            if inner is None and node.op_type == "If":
                message, *where = str(error).split("\n", 1)
                error.args = ("\n".join([message + how_to_choose(graph), *where]),)
            raise
        if loops:
            scalar_results(op, node)
        replaced = _replacement(op, node, version, annotations)
        if replaced is not None:
            for old, new in zip(node.outputs, replaced, strict=False):
                annotations.compare(old.name, new)
            _substitute(graph, op, node, replaced)
            annotations.complete(replaced, node.inputs)
            continue
        _check_known(node, version)
        if all(v is None or v.type is not None for v in node.inputs):
            _type(node, OPSET if node.domain == "" else imports.get(node.domain, 1), annotations)
        annotations.complete(node.outputs, node.inputs)


def _type(node: ir.Node, version: int, annotations: Annotations) -> None:
    try:
        apply(node, version=version)
    except ModelError:
        if not annotations.doubt(node.inputs):
            raise
        apply(node, version=version)
    fold(node)
    for value in node.outputs:
        annotations.compare(value.name, value)


def _replacement(op: Builder, node: ir.Node, version: int, annotations: Annotations) -> Sequence[ir.Value] | None:
    if node.op_type == "If" and node.domain == "":
        decided = decided_branch(op, node, annotations.rank)
        if decided is None:
            scalar_branches(op, node)
        return decided
    if is_detached(node):
        return [op.graphc.StopGradient(input_of(node))]
    padding = padding_row(node)
    if padding is not None:
        rows, ids = (input_of(node, k) for k in range(2))
        hidden = op.Equal(ids, op.const(padding, ids.dtype))
        return [op.graphc.MaskGradient(op.Gather(rows, ids, axis=0), op.Unsqueeze(hidden, [-1]))]
    if node.domain != DOMAIN and declaration_of(node) is not None:
        return None  # the declaration of an op decides its type
    if node.domain == "com.microsoft" or node.op_type == "SimplifiedLayerNormalization":
        return adapt_contributed(op, node)
    if is_gradient(node):
        return derivatives(op, node)
    if node.domain != "" or not onnx.defs.has(node.op_type, OPSET) or (version > OPSET and refused_type(node, OPSET)):
        return _body(op, node)
    if node.op_type == "Attention" and _WINDOW & set(node.attributes):
        return attention_by_parts(op, node)
    if version < OPSET:
        replaced = adapt(op, node, version)
        if replaced is not None:
            return replaced
    return canonicalise(op, node)


def _body(op: Builder, node: ir.Node) -> Sequence[ir.Value] | None:
    """Emit the function body of an op that the legal opset lacks; None when the standard defines no body."""
    if node.domain not in ("", "ai.onnx.preview") or not has_body(node.op_type, node.domain):
        return None
    before = {id(n) for n in op.graph}
    try:
        values = emit_body(op, node)
    except ModelError as error:
        if onnx.defs.has(node.op_type, OPSET):
            return None  # the body itself needs a newer opset
        raise NewerOpsetError(
            f"{node.op_type} is newer than opset {OPSET}, and the ops that stand for it do not accept its operands:"
            f" {describe(node)}: {error}"
        ) from None
    if values is None or None in values:
        return None
    meant: dict[ir.Value, ir.Value] = {}
    for made in [n for n in op.graph if id(n) not in before]:
        op.before = made
        replaced = canonicalise(op, made)
        if replaced is not None:
            meant.update(zip(made.outputs, replaced, strict=False))
            for old, new in zip(made.outputs, replaced, strict=False):
                old.replace_all_uses_with(new)
            op.graph.remove(made, safe=True)
    op.before = node
    return [meant.get(v, v) for v in values if v is not None]


def _check_known(node: ir.Node, version: int) -> None:
    """Reject undeclared ops and, in files of a newer opset, features that the legal opset lacks."""
    if declaration_of(node) is None and not (node.domain != DOMAIN and onnx.defs.has(node.op_type, node.domain)):
        name = key_of(node.domain, node.op_type)
        how = (
            f"; declare it with @graphc.custom_op({name!r}, …), see docs/custom-ops.md"
            if node.domain not in ("", DOMAIN)
            else ""
        )
        raise UnsupportedOpError(f"unknown operator {name}: {describe(node)}{how}")
    if node.domain != "" or version <= OPSET:
        return
    if not onnx.defs.has(node.op_type, OPSET):
        raise NewerOpsetError(f"{node.op_type} is newer than opset {OPSET}: {describe(node)}; export with opset {OPSET}")
    schema = onnx.defs.get_schema(node.op_type, OPSET)
    new = [name for name in node.attributes if name not in schema.attributes]
    if new or len(node.inputs) > schema.max_input or len(node.outputs) > schema.max_output:
        what = f"attribute {new[0]!r}" if new else "number of inputs or outputs"
        raise NewerOpsetError(f"the {what} of {describe(node)} is newer than opset {OPSET}; export with opset {OPSET}")
    refused = refused_type(node, OPSET)
    if refused is not None:
        raise NewerOpsetError(
            f"{node.op_type} takes {refused} only in opsets newer than {OPSET}: {describe(node)}; cast it to another type"
        )


def _substitute(graph: ir.Graph, op: Builder, node: ir.Node, values: Sequence[ir.Value]) -> None:
    """Replace the node by ``values``, which inherit the names of its outputs."""
    for old, new in zip(list(node.outputs), values, strict=False):
        if not old.uses() and not old.is_graph_output():
            continue
        if new.producer() is None or new.is_graph_output() or new.name == old.name:
            (new,) = op.emit("Identity", [new])
        name, old.name = old.name, op.unique(f"{old.name}.replaced", value=True)
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        new.name = name
        new.metadata_props.update(old.metadata_props)
    remove_with_bodies(graph, node)


def _complete_shapes(model: ir.Model, version: int) -> None:
    """Type values that our inference left open; ONNX's whole-graph inference follows symbolic dimensions further."""
    graph = model.graph
    if not any(_incomplete(v) for node in graph.all_nodes() for v in node.outputs):
        return
    model.opset_imports[""], model.ir_version = OPSET, IR_VERSION
    found = _whole_graph_inference(model)
    for node in graph.all_nodes():
        for value in node.outputs:
            known = found.get(value.name or "")
            if known is not None and _incomplete(value):
                _merge(value, known)
    for node in graph:
        if "auto_pad" in node.attributes:
            explicit_pads(node)


def _incomplete(value: ir.Value) -> bool:
    found = dims(value)
    return bool(value.name) and (value.type is None or found is None or None in found)


def _merge(value: ir.Value, proto: onnx.TypeProto) -> None:
    if value.type is None:
        value.type = ir.serde.deserialize_type_proto_for_type(proto)
    shape = ir.serde.deserialize_type_proto_for_shape(proto)
    if shape is None or not isinstance(value.type, ir.TensorType):
        return
    have = dims(value)
    if have is None or len(have) != len(shape):
        value.shape = shape
        return
    theirs = [d if isinstance(d, int) else d.value for d in shape.dims]
    value.shape = ir.Shape([h if h is not None else t for h, t in zip(have, theirs, strict=True)])


_PROPAGATED = 1 << 17
"""Elements of a vector; ONNX's propagation of data makes an object for each, whatever the vector is for."""


def _whole_graph_inference(model: ir.Model) -> dict[str, onnx.TypeProto]:
    """Value name → type by ``onnx.shape_inference``, with parameters passed as types only."""
    graph, held = model.graph, list(model.graph.initializers.values())
    inputs = list(graph.inputs)
    values = [*inputs, *held, *(out for node in graph.all_nodes() for out in node.outputs)]
    long = any(len(d) == 1 and isinstance(d[0], int) and d[0] > _PROPAGATED for v in values if (d := dims(v)) is not None)
    graph.initializers.clear()
    graph.inputs.extend(held)
    try:
        proto = onnx.shape_inference.infer_shapes(ir.to_proto(model), data_prop=not long)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        return {}  # each node has been checked on its own; this inference is stricter than the runtimes
    finally:
        graph.inputs.clear()
        graph.inputs.extend(inputs)
        for value in held:
            graph.register_initializer(value)
    found: dict[str, onnx.TypeProto] = {}
    pending = [proto.graph]
    while pending:
        part = pending.pop()
        found.update((v.name, v.type) for v in [*part.value_info, *part.output])
        for node in part.node:
            pending.extend(a.g for a in node.attribute if a.HasField("g"))
            pending.extend(g for a in node.attribute for g in a.graphs)
    return found


def _refuse_untyped(graph: ir.Graph) -> None:
    missing = list(untyped(graph))
    if missing:
        names = ", ".join(repr(v.name) for v in missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        node = missing[0].producer()
        where = f": {describe(node)}" if node is not None else ""
        raise ModelError(f"the element types of {names} cannot be inferred{where}; run the exporter's shape inference")
