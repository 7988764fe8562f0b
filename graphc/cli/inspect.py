"""``graphc inspect``: shows a model's nodes, parameters (and why they train), collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from graphc.cli.terminal import options, output
from graphc.cli.terminal.output import Format
from graphc.options import Option, ParameterChoice, ReadOptions

if TYPE_CHECKING:
    import onnx_ir as ir

EXAMPLES = (
    "graphc inspect model.onnx",
    "graphc inspect model.onnx --show params,nodes",
    "graphc inspect training.onnx --memory --batch-size 64",
)


PARTS = ("nodes", "params", "collectives")

SELDOM = ("masters", "scratch", "workspace", "bound", "host", "pinned", "context", "evaluation")
"""Kinds of memory that are shown only if they are not 0."""

LAST = ("host", "total", "pinned", "context", "evaluation")
"""The last rows: parts of the total, and memory outside it."""


@options.takes_options
def command(
    model: options.Model,
    show: Annotated[str | None, Option("Comma-separated: nodes, params, collectives.", "LIST")] = None,
    memory: Annotated[bool, Option("Bytes of a step on one worker; of a plain model, of its forward pass.")] = False,
    batch: options.Batch = 1,
    mesh: Annotated[str, Option("With --memory: the workers, data=N or node=M,data=N.", "AXES")] = "data=1",
    backend: options.Backend = "auto",
    form: options.Format = Format.text,
    *,
    chosen: ParameterChoice,
    reading: ReadOptions,
) -> None:
    """Show the contents of MODEL, a model or a training graph that 'compile' wrote."""
    from graphc import frontends
    from graphc.errors import UsageError, nearest

    parts = [part.strip() for part in (show or "").split(",") if part.strip()]
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"--show {part!r}{nearest(part, PARTS)}; it takes {', '.join(PARTS)}")
    loaded = frontends.load(model, reading=reading)
    if memory:
        _show_memory(loaded, batch, backend, mesh, form)
        return
    found: dict[str, Any] = {}
    if not parts:
        found["summary"] = _summary(loaded)
    if "nodes" in parts:
        found["nodes"] = _nodes(loaded)
    if "params" in parts:
        found["params"] = _parameters(loaded, chosen)
    if "collectives" in parts:
        from graphc.cli.terminal.summary import collectives

        found["collectives"] = collectives(loaded.graph)
    if form is Format.json:
        output.document(found["summary"] if not parts else found)
        return
    if "summary" in found:
        _print_summary(found["summary"])
    for part in parts:
        rows = found[part]
        columns = list(rows[0]) if rows else ["name"]
        cells = [[_cell(row[column]) for column in columns] for row in rows]
        output.table(columns, cells, title=part if len(parts) > 1 else "")
        if not rows:
            output.say(f"no {part}")


def _show_memory(model: ir.Model, batch: int, backend: str, mesh: str, form: Format) -> None:
    """Bytes by kind on each worker; a graph with recomputation is also measured without it."""
    import dataclasses

    from graphc.mesh import Mesh
    from graphc.pipeline import PassCall, run
    from graphc.report.memory import feed_shapes, has_recomputation, memory_of, without_recomputation
    from graphc.report.pipe_memory import has_stages, memory_of_stages, mesh_of

    inference = not is_training_graph(model)
    if inference:
        model = model.clone()
        run(model, [PassCall("legalize"), PassCall("simplify")])
    compiled = mesh_of(model)
    axes = compiled if compiled.tensor > 1 and not has_stages(model) else Mesh.parse(mesh)
    workers = axes.size
    graphs = {"": model}
    if has_recomputation(model):
        graphs = {"before": without_recomputation(model), "after": model}
    shapes = feed_shapes(model, batch)
    found: dict[str, dict[str, int]] = {}
    if has_stages(model):
        workers, graphs = mesh_of(model).size, {}
        for place, measured in enumerate(memory_of_stages(model, shapes, backend=backend)):
            found[f"pipe {place}"] = {**dataclasses.asdict(measured), "total": measured.total}
    for name, graph in graphs.items():
        ranks = [memory_of(graph, shapes, backend=backend, mesh=axes, rank=rank) for rank in sorted({0, workers - 1})]
        for title, measured in zip(("rank 0", "other ranks"), ranks, strict=False):
            rank = title if len(set(ranks)) > 1 else ""
            found[f"{name} {rank}".strip() or "bytes"] = {**dataclasses.asdict(measured), "total": measured.total}
    if form is Format.json:
        step = "inference" if inference else "training"
        output.document({"batch": batch, "workers": workers, "step": step, **found.get("bytes", found)})
        return
    columns = list(found)
    shown = [kind for kind in found[columns[0]] if kind not in SELDOM or any(found[c][kind] for c in columns)]
    shown.sort(key=lambda kind: LAST.index(kind) if kind in LAST else -1)
    names = {
        "host": "of it on the host",
        "bound": "constants and temporaries",
        "pinned": "pinned on the host",
        "context": "CUDA context, about",
        "evaluation": "evaluation, besides",
    }
    cells = [[names.get(kind, kind.replace("_", " ")), *(output.size(found[c][kind]) for c in columns)] for kind in shown]
    title = "one worker" if workers == 1 else f"each of {workers} workers"
    output.table(["memory", *columns], cells, title=f"{title}, batch {batch}")
    if inference:
        output.say("This is the forward pass alone. For a training step, inspect the file that 'graphc compile' writes.")


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else value


def is_training_graph(model: ir.Model) -> bool:
    """Whether ``compile`` wrote the model: it has graphc nodes that update state."""
    from graphc.ir.declare import is_update

    return any(is_update(node) for node in model.graph)


def _summary(model: ir.Model) -> dict[str, Any]:
    from graphc.cli.terminal.summary import elements, op_counts, training_graph
    from graphc.ir.facts import describe_value

    found: dict[str, Any] = {
        "name": model.graph.name,
        "producer": " ".join(filter(None, (model.producer_name, model.producer_version))),
        "ir_version": model.ir_version,
        "opsets": dict(model.opset_imports),
        "nodes": len(model.graph),
        "functions": len(model.functions),
        "inputs": [describe_value(v) for v in model.graph.inputs if not v.is_initializer()],
        "outputs": [describe_value(v) for v in model.graph.outputs],
        "initializers": len(model.graph.initializers),
        "elements": sum(elements(v) for v in model.graph.initializers.values()),
        "ops": op_counts(model.graph),
    }
    if is_training_graph(model):
        found["training"] = training_graph(model)
    return found


def _print_summary(found: dict[str, Any]) -> None:
    shown = {
        "name": found["name"],
        "producer": found["producer"],
        "opsets": ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in found["opsets"].items()),
        "nodes": f"{found['nodes']:,}",
        "inputs": ", ".join(found["inputs"]),
        "outputs": ", ".join(found["outputs"]),
        "initializers": f"{found['initializers']:,}, {found['elements']:,} elements",
        "ops": ", ".join(f"{op} {number}" for op, number in found["ops"].items()),
    }
    training = found.get("training")
    if training is not None:
        shown["training"] = (
            f"{training['trained_parameters']:,} parameters ({training['trained_elements']:,} elements), "
            f"{training['allreduces']} AllReduces of {output.size(training['allreduce_bytes'])}"
        )
    output.pairs(shown)


def _nodes(model: ir.Model) -> list[dict[str, Any]]:
    from graphc.gradient import key_of
    from graphc.ir.facts import describe_value

    return [
        {
            "name": node.name or "",
            "op": key_of(node.domain, node.op_type),
            "inputs": ", ".join("-" if v is None else str(v.name) for v in node.inputs),
            "outputs": ", ".join(describe_value(v) if v.dtype is not None else str(v.name) for v in node.outputs),
        }
        for node in model.graph
    ]


def _parameters(model: ir.Model, chosen: ParameterChoice) -> list[dict[str, Any]]:
    if is_training_graph(model):
        return _state(model)
    from graphc.pipeline import Context, PassCall, run

    working, ctx = model.clone(), Context()
    chosen_too = {"train": chosen.train}
    steps = [PassCall("legalize", chosen_too), PassCall("dequantize", chosen_too), PassCall("check", vars(chosen))]
    run(working, steps, ctx)
    rows: list[dict[str, Any]] = ctx.values["check"]["parameters"]
    return rows


def _state(model: ir.Model) -> list[dict[str, Any]]:
    """Return the initializers of a training graph with the op that updates each."""
    from graphc.cli.terminal.summary import is_trained
    from graphc.ir.facts import dims, state_updates

    by = {state.name: (node, state) for node, state, _ in state_updates(model.graph)}
    return [
        {
            "name": name,
            "shape": list(dims(value) or ()),
            "dtype": value.dtype.name.lower() if value.dtype is not None else "?",
            "trains": name in by and is_trained(*by[name]),
            "reason": f"updated by {by[name][0].op_type}" if name in by else "not updated",
        }
        for name, value in model.graph.initializers.items()
    ]
