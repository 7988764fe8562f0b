"""``graphc show``: the plan of a training graph, and the flight logs of a run, as text."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from graphc.cli import flight, options, output
from graphc.cli.output import Format


class _PlanUnlessNamed(TyperGroup):
    """``graphc show MODEL`` is ``graphc show plan MODEL``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["plan", *args]
        return super().parse_args(ctx, args)


def group() -> typer.Typer:
    """The sub-commands."""
    app = typer.Typer(cls=_PlanUnlessNamed, help="Show a plan, or what the workers of a failed run did.")
    app.command("plan")(plan)
    app.command("flight")(flight.command)
    return app


def plan(
    model: options.Model,
    batch: Annotated[int, typer.Option("--batch", help="Size of every symbolic dimension.", min=1)] = 1,
    workers: Annotated[
        int | None, typer.Option("-n", "--workers", help="Default: the mesh the graph was compiled for.", min=1)
    ] = None,
    backend: options.Backend = "auto",
    form: options.Format = Format.text,
) -> None:
    """Show what one worker executes for a training graph that 'compile' wrote: its steps and buffers in order."""
    from graphc import frontends
    from graphc.cli.inspect import is_training_graph
    from graphc.errors import UsageError
    from graphc.ir.facts import dims
    from graphc.ir.names import MESH
    from graphc.mesh import Mesh
    from graphc.plan import make_plan
    from graphc.trainer import make_backend

    loaded = frontends.load(model)
    if not is_training_graph(loaded):
        raise UsageError(f"{model} is no training graph; 'graphc compile' makes one (without --standard)")
    size = workers or Mesh.parse(loaded.metadata_props.get(MESH, "data=1")).size
    shapes = {v.name or "": [d if isinstance(d, int) else batch for d in dims(v) or ()] for v in loaded.graph.inputs}
    engine = make_backend(backend, threads=1)
    try:
        found = make_plan(loaded, shapes, native=engine.prefers_native, world_size=size)
    finally:
        engine.close()
    if form is Format.text:
        output.say(found.text())
        return
    steps = [
        {
            "kind": step.kind,
            "name": step.name,
            "nodes": [node.name for node in step.nodes],
            "bytes": sum(found.places[v].nbytes for v in step.outputs if v in found.places),
        }
        for step in found.steps
    ]
    output.document({"workers": size, "inputs": shapes, "steps": steps, "buffers": found.buffers})
