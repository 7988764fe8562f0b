"""``graphc check``: reports whether a model can be trained and which ops prevent it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphc.cli import options, output
from graphc.cli.output import Format
from graphc.options import ParameterChoice

if TYPE_CHECKING:
    import onnx_ir as ir

EXAMPLES = (
    "graphc check model.onnx",
    "graphc check model.onnx --loss softmax_cross_entropy:logits=logits,label=label",
    "graphc check model.onnx --freeze 'encoder.*' --json",
)


@options.takes_options
def command(
    model: options.Model,
    loss: Annotated[
        str | None, typer.Option("--loss", metavar="LOSS", help="Check the path to this loss; default: to all float outputs.")
    ] = None,
    form: options.Format = Format.text,
    *,
    chosen: ParameterChoice,
) -> None:
    """Report whether MODEL can be trained; exit code 3: some ops have no gradient and are listed."""
    from graphc import frontends
    from graphc.compiler import check_untrained
    from graphc.errors import UnsupportedOpError
    from graphc.pipeline import Context, PassCall, run

    original = frontends.load(model)
    check_untrained(original)
    working, ctx = original.clone(), Context()
    run(working, [PassCall("legalize", {"train": chosen.train})], ctx)
    if loss is not None:
        run(working, [options.loss_of(loss).step()], ctx)
    run(working, [PassCall("check", vars(chosen))], ctx)
    report = _report(original, working, ctx.values["check"], ctx.log)
    if form is Format.json:
        output.document(report)
    else:
        _print(model, report)
    if report["missing"]:
        names = ", ".join(f"{entry['op']} ({entry['count']}×)" for entry in report["missing"])
        raise UnsupportedOpError(
            f"no gradient for {names} on the path from a parameter to the loss; freeze the parameters in front of it with "
            "--freeze GLOB, or register a rule"
        )


def _report(original: ir.Model, legal: ir.Model, found: dict[str, Any], log: Sequence[str]) -> dict[str, Any]:
    from graphc.cli.summary import elements, op_counts
    from graphc.ir.facts import describe_value

    trains = {p["name"] for p in found["parameters"] if p["trains"]}
    values = legal.graph.initializers
    return {
        "trainable": bool(trains) and not found["missing"],
        "opset": original.opset_imports.get("", original.opset_imports.get("ai.onnx")),
        "nodes": len(original.graph),
        "inputs": [describe_value(v) for v in legal.graph.inputs],
        "outputs": [describe_value(v) for v in legal.graph.outputs],
        "ops": op_counts(legal.graph),
        "parameters": len(values),
        "elements": sum(map(elements, values.values())),
        "trained_parameters": len(trains),
        "trained_elements": sum(elements(values[name]) for name in trains),
        "missing": found["missing"],
        "warnings": _warnings(legal, trains, log),
    }


def _warnings(model: ir.Model, trains: set[str], log: Sequence[str]) -> list[str]:
    """Collect warnings about the model before training; ``log``: what the passes said of the file."""
    from graphc.ir.facts import dims
    from graphc.ir.state import repeats_one_value
    from graphc.pipeline import warnings_in

    warnings = warnings_in(log)
    if not trains:
        warnings.append("nothing to train: no float initializer of rank ≥ 1 lies on a differentiable path to the loss")
    constant = []
    for name in sorted(trains):
        tensor = model.graph.initializers[name].const_value
        if tensor is None or (len(tensor.shape) >= 2 and tensor.size > 1 and repeats_one_value(tensor)):
            constant.append(name)
    if constant:
        warnings.append(
            f"{output.counted(len(constant), 'weight')} (first: {constant[0]!r}) hold one repeated value, so the file was saved"
            " without trained weights; train with --initialize he"
        )
    warnings.extend(_folded_normalization(model.graph))
    warnings.extend(_rewritten_weights(model.graph, trains))
    for value in model.graph.inputs:
        found = dims(value)
        if found and isinstance(found[0], int):
            warnings.append(
                f"input {value.name!r} has the fixed batch size {found[0]}; 'train' makes it dynamic, 'compile' with --batch N"
            )
    return warnings


_MADE_NAMES = re.compile(r"val_\d+|onnx::\w+_\d+")
"""Names that PyTorch's exporters give to results of constant folding."""

_UNFOLDED = "export with optimize=False (dynamo) or do_constant_folding=False, or give the module itself to graphc.compile"


def _rewritten_weights(graph: ir.Graph, trains: set[str]) -> list[str]:
    """Warn about weights that an exporter folded or merged, which changes training but not inference."""
    from graphc.ir.state import repeats_one_value

    warnings = []
    made = sorted(name for name in trains if _MADE_NAMES.fullmatch(name))
    if made:
        warnings.append(
            f"{output.counted(len(made), 'weight')} (first: {made[0]!r}) came out of the exporter's constant folding: names are"
            f" lost, and a weight that was shared may be several now; {_UNFOLDED}"
        )
    merged = []
    for name in sorted(trains):
        value = graph.initializers[name]
        if value.const_value is not None and len(value.uses()) > 1 and repeats_one_value(value.const_value):
            merged.append(name)
    if merged:
        warnings.append(
            f"{output.counted(len(merged), 'weight')} of one repeated value (first: {merged[0]!r}) serve several nodes: if the"
            f" exporter has merged equal weights, they train as one here; {_UNFOLDED}"
        )
    return warnings


def _folded_normalization(graph: ir.Graph) -> list[str]:
    """Warn if BatchNormalization seems folded into convolutions: all have a bias and nothing is normalised."""
    convolutions = [node for node in graph if node.op_type == "Conv" and node.domain == ""]
    with_bias = [node for node in convolutions if len(node.inputs) > 2 and node.inputs[2] is not None]
    normalised = any(node.op_type.endswith("Normalization") for node in graph.all_nodes())
    if len(convolutions) < 3 or len(with_bias) < len(convolutions) or normalised:
        return []
    return [
        f"all {len(convolutions)} convolutions have a bias and nothing is normalised: if the network had BatchNormalization, "
        "its exporter folded it in evaluation mode, and it cannot train; export with training=TrainingMode.TRAINING"
    ]


def _print(name: str, report: dict[str, Any]) -> None:
    shown = {
        "model": name,
        "opset": report["opset"],
        "nodes": f"{report['nodes']:,}",
        "inputs": ", ".join(report["inputs"]),
        "outputs": ", ".join(report["outputs"]),
        "ops": ", ".join(f"{op} {number}" for op, number in report["ops"].items()),
        "parameters": f"{report['parameters']:,} initializers, {report['elements']:,} elements",
        "trains": f"{report['trained_parameters']:,} of them, {report['trained_elements']:,} elements",
    }
    output.pairs(shown)
    for text in report["warnings"]:
        output.say(f"warning: {text}")
    if report["missing"]:
        rows = [(e["op"], e["count"], " → ".join(e["path"])) for e in report["missing"]]
        output.table(("op without gradient", "count", "path from a parameter"), rows)
    elif report["trainable"]:
        output.say("can be trained: every op on the way to the loss has a gradient")
