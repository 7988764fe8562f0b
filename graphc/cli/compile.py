"""``graphc compile``: writes a model's training graph as an ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from graphc.cli.terminal import options, output
from graphc.cli.terminal.output import Format
from graphc.options import CompileOptions, Option

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphc.pipeline import PassCall

EXAMPLES = (
    "graphc compile model.onnx -o training.onnx --loss mse --optimizer adam -n 2",
    "graphc compile model.onnx -o step.onnx --standard \\",
    "    --loss softmax_cross_entropy:logits=logits,label=label --optimizer sgd:lr=0.1",
)


@options.takes_options
def command(
    model: options.Model,
    out: Annotated[str, Option("'-' writes standard output.", "FILE", flags=("-o", "--output"))],
    loss: options.LossText,
    optimizer: options.OptimizerText,
    compilation: CompileOptions,
    workers: Annotated[int, Option("Replicas along the data axis.", "N", minimum=1, flags=("-n", "--workers"))] = 1,
    mesh: Annotated[str | None, Option("Axes over the workers, in place of -n: data=2,pipe=2.", "AXES")] = None,
    standard: Annotated[bool, Option("Only standard ONNX ops, for any runtime; one worker.")] = False,
    training_info: Annotated[bool, Option("As --standard, in ONNX's TrainingInfoProto beside the inference model.")] = False,
    annotate: Annotated[
        bool, Option("Write pipeline stages, or shards, as ONNX's own device annotations (IR 11) too.")
    ] = False,
    passes: Annotated[str | None, Option("Instead of the default pipeline.", "PIPELINE")] = None,
    dump_dir: options.DumpDir = None,
    time_passes: Annotated[bool, Option("Time and nodes of each pass, on standard error.")] = False,
    form: options.Format = Format.text,
) -> None:
    """Compile MODEL into one file with forward, loss, backward, AllReduces and updates."""
    from graphc import compiler, frontends, optim
    from graphc.cli.terminal.summary import print_training_graph, training_graph
    from graphc.cli.training.places import check_place
    from graphc.errors import UsageError
    from graphc.frontends import training_export
    from graphc.frontends.annotations import shards
    from graphc.mesh import Mesh

    check_place("--output", out, {"the model": model})
    axes = Mesh.parse(mesh) if mesh is not None else Mesh(data=workers)
    workers = axes.size
    if workers > 1 and (standard or training_info):
        form_of = "--standard" if standard else "--training-info"
        raise UsageError(
            f"{form_of} writes the graph of one worker, since standard ONNX has no AllReduce; leave -n {workers} out"
        )
    times = PassTimes()
    program = compiler.compile(
        model if model == "-" else Path(model),
        loss=options.loss_of(loss),
        optimizer=optim.parse(optimizer),
        mesh=axes,
        passes=passes,
        dump_dir=dump_dir,
        after=times.add,
        **vars(compilation),
    )
    if annotate:
        shards.annotate(program.model)
    found = training_graph(program.model)
    standard_nodes = None
    if training_info:
        proto = training_export.training_info(program)
        standard_nodes = len(proto.training_info[0].algorithm.node)
        training_export.save_proto(proto, out)
    else:
        written = training_export.standard_model(program.model) if standard else program.model
        standard_nodes = len(written.graph) if standard else None
        frontends.save(written, out)
    if time_passes:
        times.print()
    for line in program.log:
        output.note(line)
    if form is Format.json:
        result = {"output": out, "pipeline": program.pipeline, "passes": times.rows, **found}
        if standard_nodes is not None:
            result["standard_nodes"] = standard_nodes
        if out != "-":
            output.document(result)
    else:
        print_training_graph(found, to_stderr=out == "-")
        if out != "-":
            output.say(f"wrote {out}" + (f": {standard_nodes:,} standard nodes" if standard_nodes is not None else ""))


class PassTimes:
    """Collects time and node count of each pass; its :meth:`record` goes to ``after=``."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, step: PassCall, model: ir.Model, seconds: float) -> None:
        """Record that ``step`` took ``seconds`` and produced ``model``."""
        self.rows.append({"pass": step.name, "ms": round(seconds * 1e3, 2), "nodes": len(model.graph)})

    def print(self) -> None:
        """Print one line per pass on standard error."""
        for row in self.rows:
            output.note(f"{row['pass']:<16} {row['ms']:>10.2f} ms {row['nodes']:>8,} nodes")
        output.note(f"{'total':<16} {sum(r['ms'] for r in self.rows):>10.2f} ms")
