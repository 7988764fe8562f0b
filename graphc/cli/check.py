"""``graphc check``: reports whether a model can be trained, what trains, and the command that trains it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphc.cli.terminal import options, output
from graphc.cli.terminal.output import Format
from graphc.options import CompileOptions

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphc.cli.training.trainability import Trainability
    from graphc.compiler import Program
    from graphc.losses import Loss

EXAMPLES = (
    "graphc check model.onnx",
    "graphc check model.onnx --loss softmax_cross_entropy:logits=logits,label=label --batch-size 8",
    "graphc check model.onnx --freeze 'encoder.*' --format json",
)


@options.takes_options
def command(
    model: options.Model,
    loss: Annotated[
        str | None, typer.Option("--loss", metavar="LOSS", help="As for 'train'. Default: the first that fits and trains.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Samples of the planned step. Default: that of the file, or 32.", min=1)
    ] = None,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="A line for each parameter, and the time of each stage.")
    ] = False,
    form: options.Format = Format.text,
    *,
    compilation: CompileOptions,
) -> None:
    """Compile and plan MODEL as 'train' does, without running it.

    Exit codes: 0 it trains; 1 the file is missing or broken; 2 wrong options; 3 nothing in it can train, or an op is unknown.
    """
    from graphc import frontends
    from graphc.cli.training.trainability import examine
    from graphc.compiler import check_untrained
    from graphc.errors import InternalError, NotTrainableError

    original = frontends.load(model, reading=compilation)
    check_untrained(original)
    result = examine(
        original,
        loss=options.loss_of(loss) if loss is not None else None,
        batch_size=batch_size,
        compilation=compilation,
    )
    report = _report(model, original, result, compilation, verbose=verbose)
    if form is Format.json:
        output.document(report)
    else:
        _print(report)
    if isinstance(result.error, InternalError):
        raise result.error
    if result.error is not None:
        raise NotTrainableError(report["error"]) from result.error


def _report(
    name: str, original: ir.Model, result: Trainability, compilation: CompileOptions, *, verbose: bool
) -> dict[str, Any]:
    from graphc.cli.terminal.summary import elements, op_counts
    from graphc.cli.training.check_warnings import warnings_of
    from graphc.ir.facts import describe_value

    parameters: list[dict[str, Any]] = result.found["parameters"]
    trained = {p["name"] for p in parameters if p["trains"]}
    values = result.legal.graph.initializers
    report = {
        "model": name,
        "trainable": result.trains,
        "opset": original.opset_imports.get("", original.opset_imports.get("ai.onnx")),
        "nodes": len(original.graph),
        "inputs": [describe_value(v) for v in result.legal.graph.inputs],
        "outputs": [describe_value(v) for v in result.legal.graph.outputs],
        "ops": op_counts(result.legal.graph),
        "parameters": len(values),
        "elements": sum(map(elements, values.values())),
        "trained_parameters": len(trained),
        "trained_elements": sum(elements(values[name]) for name in trained),
        "left_out": dict(Counter(p["reason"] for p in parameters if not p["trains"])),
        "batch": str(result.batch),
        "batch_size": result.batch_size,
        "missing": result.found["missing"] if not result.trains else [],
        "warnings": warnings_of(result.legal, parameters, result.log),
    }
    if result.program is not None and result.loss is not None:
        report |= _training(name, result, result.program, result.loss, compilation)
    if verbose:
        report |= {"each_parameter": parameters, "seconds": {k: round(v, 3) for k, v in result.seconds.items()}}
    if result.error is not None:
        report |= {"error": _missing(report["missing"]) or str(result.error), "stage": result.stage}
    return report


def _missing(missing: Sequence[Mapping[str, Any]]) -> str:
    """What to do about ops without a gradient; empty if there are none."""
    if not missing:
        return ""
    names = ", ".join(f"{entry['op']} ({entry['count']}×)" for entry in missing)
    return (
        f"no gradient for {names} on the path from a parameter to the loss; freeze the parameters in front of it with "
        "--freeze GLOB, or register a rule"
    )


def _training(name: str, result: Trainability, program: Program, loss: Loss, compilation: CompileOptions) -> dict[str, Any]:
    """What is known of a model that compiles: the loss, the data that it needs, the memory, the command."""
    import dataclasses

    from graphc.cli.training.trainability import OPTIMIZER, unfed
    from graphc.losses import LOSSES

    losses = (LOSSES[advice.kind](**advice.options()) for advice in result.found["losses"])
    found: dict[str, Any] = {
        "loss": str(loss),
        "other_losses": [str(other) for other in losses if other != loss],
        "optimizer": OPTIMIZER,
        "data": _arrays(program, result.shapes),
        "sizes_guessed": result.guessed,
    }
    if result.memory is not None:
        found["memory"] = {**dataclasses.asdict(result.memory), "total": result.memory.total}
        found["unfed"] = unfed(result)
        found["command"] = _command(name, result, compilation) if not found["unfed"] else None
    return found


def _arrays(program: Program, shapes: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Any]]:
    """The arrays that the data must hold: dtype, shape, the shape of one step (``example``), and the range of labels."""
    from graphc.ir.facts import dims, dtype_of
    from graphc.ir.ops.losses import label_checks

    graph = program.model.graph
    ranges = label_checks(graph)
    return {
        value.name or "": {
            "dtype": str(dtype_of(value).numpy()),
            "shape": [d if d is not None else "?" for d in dims(value) or ()],
            "example": list(shapes.get(value.name or "", ())),
            **({"low": ranges[value.name][0], "high": ranges[value.name][1] - 1} if value.name in ranges else {}),
        }
        for value in graph.inputs
    }


def _command(name: str, result: Trainability, compilation: CompileOptions) -> str:
    """The line that trains the model as it was checked."""
    import shlex

    from graphc.cli.training.trainability import OPTIMIZER

    words = ["graphc", "train", name, "--data", "data.npz", "--loss", str(result.loss), "--optimizer", OPTIMIZER]
    words += options.as_arguments(compilation)
    return shlex.join([*words, "--batch-size", str(result.batch_size), "-o", "trained.onnx"])


def _print(report: Mapping[str, Any]) -> None:
    shown = {
        "model": report["model"],
        "opset": report["opset"],
        "nodes": f"{report['nodes']:,}",
        "inputs": ", ".join(report["inputs"]),
        "outputs": ", ".join(report["outputs"]),
        "ops": ", ".join(f"{op} {number}" for op, number in report["ops"].items()),
        "trains": f"{output.counted(report['trained_parameters'], 'parameter')}, {report['trained_elements']:,} elements",
    }
    if report["left_out"]:
        shown["frozen"] = ", ".join(f"{number:,} × {reason}" for reason, number in report["left_out"].items())
    shown["batch"] = report["batch"]
    if "memory" in report:
        kinds = ("parameters", "gradients", "optimizer", "activations")
        parts = ", ".join(f"{kind} {output.size(report['memory'][kind])}" for kind in kinds)
        step = f"a step of {report['batch_size']} with {report['optimizer'].partition(':')[0]}"
        shown["memory"] = f"{output.size(report['memory']['total'])} for {step}: {parts}"
    if "loss" in report:
        shown["loss"] = " or ".join([report["loss"], *report["other_losses"][:3]])
        shown["data"] = ", ".join(_array(name, array) for name, array in report["data"].items())
    output.pairs(shown)
    for text in report["warnings"]:
        output.say(f"warning: {text}")
    if report["missing"]:
        rows = [(e["op"], e["count"], " → ".join(e["path"])) for e in report["missing"]]
        output.table(("op without gradient", "count", "path from a parameter"), rows)
    if "each_parameter" in report:
        columns = ("parameter", "shape", "dtype", "trains", "rule")
        output.table(columns, [_row(parameter) for parameter in report["each_parameter"]])
        output.say("time  " + ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in report["seconds"].items()))
    if report["trainable"]:
        _print_command(report)


def _print_command(report: Mapping[str, Any]) -> None:
    if report["sizes_guessed"]:
        sizes = " ".join(f"{name}={','.join(map(str, array['example']))}" for name, array in report["data"].items())
        output.say(f"sizes that the file leaves open were guessed for the memory: {sizes}; --shape gives others")
    if report["command"] is None:
        output.say("can be trained from a script with graphc.Trainer: it compiles, and a step can be planned")
        output.say(f"'graphc train' cannot feed it: {'; '.join(report['unfed'])}")
    else:
        output.say("can be trained: it compiles, and a step can be planned; with arrays as in 'data' this command trains it:")
        output.say(f"  {report['command']}")


def _array(name: str, array: Mapping[str, Any]) -> str:
    shape: Sequence[Any] = array["shape"]
    text = f"{name} {array['dtype']}[{','.join(map(str, shape))}]"
    return f"{text} from {array['low']} to {array['high']}" if "low" in array else text


def _row(parameter: Mapping[str, Any]) -> tuple[Any, ...]:
    shape = f"[{','.join(map(str, parameter['shape']))}]"
    return parameter["name"], shape, parameter["dtype"], "yes" if parameter["trains"] else "no", parameter["reason"]
