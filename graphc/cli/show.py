"""``graphc show``: prints a training graph's plan, or a run's flight logs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperGroup

from graphc.cli.diagnosis import flight
from graphc.cli.terminal import options, output, usage
from graphc.cli.terminal.output import Format
from graphc.options import Option, ReadOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    import onnx_ir as ir

    from graphc.backend import Backend, Fallback, Planner, SegmentPart
    from graphc.plan.partition import Plan
    from graphc.plan.steps import PlanStep

    Parts: TypeAlias = Callable[[PlanStep], Sequence[SegmentPart]]


EXAMPLES = ("graphc show training.onnx", "graphc show plan training.onnx -n 2 --batch-size 8")


class _PlanUnlessNamed(TyperGroup):
    """``graphc show MODEL`` is ``graphc show plan MODEL``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["plan", *args]
        return super().parse_args(ctx, args)


def group() -> typer.Typer:
    """The sub-commands."""
    app = typer.Typer(cls=_PlanUnlessNamed, help="Show a plan, or what the workers of a failed run did.")
    app.callback(invoke_without_command=True)(options.help_unless_named)
    app.command("plan", cls=usage.with_examples(EXAMPLES))(plan)
    app.command("flight", cls=usage.with_examples(flight.EXAMPLES))(flight.command)
    return app


@options.takes_options
def plan(
    model: options.Model,
    batch: options.Batch = 1,
    workers: Annotated[
        int | None, Option("Default: the mesh the graph was compiled for.", "N", minimum=1, flags=("-n", "--workers"))
    ] = None,
    backend: options.Backend = "auto",
    form: options.Format = Format.text,
    *,
    reading: ReadOptions,
) -> None:
    """Show the workers' plan of a training graph that 'compile' wrote: overlap, steps and buffers in order."""
    from graphc import frontends
    from graphc.cli.inspect import is_training_graph
    from graphc.errors import UsageError
    from graphc.ir.facts import dims
    from graphc.ir.names import MESH
    from graphc.ir.ops.parameter_server import server_options
    from graphc.mesh import Mesh
    from graphc.parameter_server.split import role_plans
    from graphc.plan.overlap_view import flights, grid
    from graphc.plan.partition import make_plan
    from graphc.plan.state_rewrites import adapted
    from graphc.report.pipe_memory import has_stages, stage_plans

    loaded = frontends.load(model, reading=reading)
    if not is_training_graph(loaded):
        raise UsageError(f"{model} is no training graph; 'graphc compile' makes one (without --standard)")
    axes = Mesh.parse(loaded.metadata_props.get(MESH, "data=1"))
    axes = axes if workers in (None, axes.size) else Mesh(data=workers)
    size = axes.size
    shapes = {v.name or "": [d if isinstance(d, int) else batch for d in dims(v) or ()] for v in loaded.graph.inputs}
    engine = _engine(backend)
    loaded, guarded = adapted(loaded, engine), not engine.memory.on_host  # as a trainer does
    if server_options(loaded.graph) is not None:
        try:
            _show_roles(role_plans(loaded, shapes, engine), form, _parts(engine))
        finally:
            engine.close()
        return
    if has_stages(loaded):
        try:
            _show_stages(loaded, stage_plans(loaded, shapes, engine), form, _parts(engine))
        finally:
            engine.close()
        return
    try:
        found = make_plan(loaded, shapes, engine, mesh=axes, guarded=guarded)
        host = _on_host(found, engine)
        plans = [found] * size
        if any(step.transfer is not None and step.transfer.parts for step in found.steps):  # else all ranks have the same plan
            ranks = range(1, size)
            plans[1:] = [make_plan(loaded, shapes, engine, mesh=axes, rank=rank, guarded=guarded) for rank in ranks]
        if form is Format.text:
            if size > 1:
                output.say(grid(plans) + "\n")
            output.say("\n".join([found.text(_parts(engine)), *_host_lines(host)]))
            return
        steps = _steps(found, _parts(engine))
    finally:
        engine.close()
    collectives = [
        {"tag": f.tag, "start": f.start, "wait": f.wait, "bytes": f.nbytes, "computing": f.computing} for f in flights(found)
    ]
    document = {"workers": size, "inputs": shapes, "steps": steps, "collectives": collectives, "buffers": found.buffers}
    if host is not None:
        document["host_fallbacks"] = [asdict(fallback) for fallback in host]
    output.document(document)


def _engine(backend: str) -> Backend:
    """Return the backend, or its planner if it needs a device."""
    from graphc.backend import BACKENDS, PLANNERS, check_backend, make_backend, name_of

    BACKENDS.load()
    check_backend(backend)
    name = name_of(backend)
    return PLANNERS[name]() if name in PLANNERS else make_backend(backend, threads=1)


def _parts(engine: Backend) -> Parts:
    """What runs the nodes of a segment; for a device that may be absent, only what runs on the host is known."""
    from graphc.backend import PLANNERS
    from graphc.plan.segment_model import segment_model

    return (lambda step: ()) if engine.name in PLANNERS else (lambda step: engine.segment_parts(segment_model(step)))


def _on_host(found: Plan, engine: Backend) -> list[Fallback] | None:
    """Nodes inside device segments that run on the host; None for a host backend."""
    from graphc.backend import PLANNERS
    from graphc.plan.segment_model import segment_model

    if engine.name not in PLANNERS:
        return None
    planner = cast("Planner", engine)
    return [f for step in found.steps if step.kind == "segment" for f in planner.fallbacks(segment_model(step))]


def _host_lines(found: Sequence[Fallback] | None) -> list[str]:
    if found is None:
        return []
    lines = [f"      host   {f.op:<24} {f.node:<40} {f.nbytes / 1e6:9.3f} MB to and fro" for f in found]
    return lines or ["      nothing runs on the host"]


def _show_roles(plans: Mapping[str, Plan], form: Format, parts: Parts) -> None:
    """Print the plan of a worker and of each parameter server."""
    if form is Format.text:
        for role, found in plans.items():
            _, *lines = found.text(parts).splitlines()
            output.say("\n".join([f"plan of {role}: {len(found.steps)} steps", *lines]))
        return
    output.document(
        {"roles": {role: {"steps": _steps(found, parts), "buffers": found.buffers} for role, found in plans.items()}}
    )


def _show_stages(model: ir.Model, plans: Sequence[Plan], form: Format, parts: Parts) -> None:
    """Print the schedule of a pipeline, and the plan of each rank along its axis."""
    from graphc.pipe.clock import grid, play
    from graphc.report.pipe_memory import table_of

    table = table_of(model)
    if form is Format.text:
        output.say(f"{grid(table)}\n{play(table).idle():.1%} idle if all tasks take as long\n")
        for rank, found in enumerate(plans):
            output.say(f"pipe {rank}: {found.text(parts)}\n")
        return
    rows = [[str(action) for action in row] for row in table]
    ranks = [
        {"schedule": row, "steps": _steps(found, parts), "buffers": found.buffers}
        for row, found in zip(rows, plans, strict=True)
    ]
    output.document({"ranks": ranks})


def _steps(found: Plan, parts: Parts) -> list[dict[str, Any]]:
    return [
        {
            "kind": step.kind,
            "name": step.name,
            "nodes": [node.name for node in step.nodes],
            "parts": [asdict(part) for part in parts(step)] if step.kind == "segment" else [],
            "bytes": sum(found.places[v].nbytes for v in step.outputs if v in found.places),
        }
        for step in found.steps
    ]
