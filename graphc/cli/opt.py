"""``graphc opt``: runs a pipeline over a model, for writing and testing passes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from graphc.cli.compile import PassTimes
from graphc.cli.terminal import options, output
from graphc.cli.terminal.output import Format
from graphc.options import Option, ReadOptions

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphc.pipeline import PassCall

EXAMPLES = (
    "graphc opt model.onnx -p legalize,simplify",
    "graphc opt model.onnx -p 'legalize,initialize{method=he}' -o fresh.onnx --time-passes",
)


@options.takes_options
def command(
    model: options.Model,
    pipeline: Annotated[str, Option("e.g. 'legalize,autodiff{of=loss},simplify'", "PIPELINE", flags=("-p", "--passes"))],
    out: Annotated[
        str | None,
        Option(
            "'-' writes the model to standard output, a name in .onnxtxt its text, with large tensors in NAME.data. Default: "
            "print the text.",
            "FILE",
            flags=("-o", "--output"),
        ),
    ] = None,
    print_after: Annotated[list[str] | None, Option("Print the text after this pass (repeatable).", "PASS")] = None,
    time_passes: Annotated[bool, Option("Time and nodes of each pass, on standard error.")] = False,
    verify_each: Annotated[bool, Option("Verify the graph after every pass.")] = False,
    dump_dir: options.DumpDir = None,
    form: options.Format = Format.text,
    *,
    reading: ReadOptions,
) -> None:
    """Run PIPELINE over MODEL ('graphc passes' lists the passes)."""
    from graphc import frontends
    from graphc.cli.training.places import check_place
    from graphc.errors import UsageError, nearest
    from graphc.ir.text import elided, to_text
    from graphc.pipeline import parse, run

    steps = parse(pipeline)
    names = [step.name for step in steps]
    for name in print_after or ():
        if name not in names:
            raise UsageError(f"--print-after {name!r}: the pipeline has no such pass{nearest(name, names)}")
    check_place("--output", out, {})
    times = PassTimes()

    def after(step: PassCall, current: ir.Model, seconds: float) -> None:
        times.add(step, current, seconds)
        if step.name in (print_after or ()):
            print(f"// after {step}\n{to_text(current, large=elided)}", file=sys.stderr, flush=True)

    working = frontends.load(model, reading=reading)
    ctx = run(working, steps, verify_each=verify_each, dump_dir=dump_dir, after=after)
    if time_passes:
        times.print()
    for line in ctx.log:
        output.note(line)
    if out is None:
        if form is Format.json:
            output.document(
                {"pipeline": ",".join(map(str, steps)), "passes": times.rows, "text": to_text(working, large=elided)}
            )
        else:
            output.say(to_text(working, large=elided).rstrip("\n"))
    else:
        if out.endswith(frontends.TEXT):
            frontends.save_text(working, out)
        else:
            frontends.save(working, out)
        if form is Format.json and out != "-":
            output.document({"output": out, "pipeline": ",".join(map(str, steps)), "passes": times.rows})
