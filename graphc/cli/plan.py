"""``graphc plan``: proposes how to divide a training job over devices."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphc.cli.terminal import options, output
from graphc.cli.terminal.output import Format
from graphc.options import Option

if TYPE_CHECKING:
    from graphc.planner.search import Predicted

EXAMPLES = (
    "graphc plan gpt2.onnx --loss softmax_cross_entropy:axis=2 --optimizer adamw --precision bf16 \\",
    "    --devices 1024 --memory 80GB --network net.toml --gpu h100 --batch-size 4096 -o plan.json",
    "graphc plan model.onnx --loss mse --optimizer adam --devices 8 --memory 4GB --network net.toml \\",
    "    --batch-size 256 -o plan.json",
    "graphc train --config plan.json --data train.npz -o trained.onnx",
)

SHOWN = 10
"""Rows of the table."""


@options.takes_options
def command(
    model: options.Model,
    devices: Annotated[int, Option("Devices of the job, one worker on each.", "N", minimum=1)],
    memory: Annotated[str, Option("Memory of a device: 80GB, 16GiB.", "SIZE")],
    network: Annotated[str, Option("An AllReduce curve (CSV) or a description of nodes (TOML).", "FILE")],
    loss: options.LossText,
    optimizer: options.OptimizerText,
    batch_size: Annotated[int, Option("Samples of one step over all workers.", "N", minimum=1)],
    gpu: Annotated[
        str | None,
        Option("Model times on a100, h100, h200, b200, l4 or rtx4090; default: measure steps on this machine's CPU.", "NAME"),
    ] = None,
    profile: Annotated[
        str | None,
        Option("Times of this machine's CPU, or another's: used if the file is there, else measured and written.", "FILE.json"),
    ] = None,
    profile_seconds: Annotated[
        float, typer.Option(metavar="S", min=0.0, help="Measure that long at most; other steps are modelled from these.")
    ] = 20.0,
    precision: Annotated[str | None, Option("As for 'train': bf16 or fp16.", "TYPE")] = None,
    destination: Annotated[
        str | None, Option("Write the best plan here, for 'graphc train --config'.", "FILE", flags=("-o", "--output"))
    ] = None,
    simulate: Annotated[int, Option("Play N steps of the best plan on a simulated clock; needs --trace.", "N", minimum=0)] = 0,
    trace: Annotated[str | None, Option("Timeline of --simulate, all ranks, as of 'train --trace'.", "FILE.json")] = None,
    form: options.Format = Format.text,
) -> None:
    """Propose mesh, strategy, schedule, micro-batches and recomputation for MODEL on N devices."""
    from graphc import compiler, frontends, optim
    from graphc.atomic_files import whole_file
    from graphc.cli.training.places import check_place
    from graphc.errors import UsageError
    from graphc.planner.costs import on_host
    from graphc.planner.division import refused
    from graphc.planner.gpu_costs import on_gpu
    from graphc.planner.network import Network
    from graphc.planner.search import as_row, best, steps, timeline
    from graphc.planner.timing import profiled
    from graphc.report.trace import Lanes, write_events

    if bool(simulate) != (trace is not None):
        raise UsageError("--simulate N and --trace FILE go together: the first says how many steps the second shows")
    measured = profile if profile is not None and not Path(profile).exists() else None
    for option, place in (("--output", destination), ("--trace", trace), ("--profile", measured)):
        check_place(option, place, {"the model": model, "the network": network})
    if profile is not None and gpu is not None:
        raise UsageError("--profile and --gpu exclude each other: times are those of a profile, or of the GPU's model")
    limit, links = _bytes(memory), Network.read(network)
    links.check(devices)
    loaded = frontends.load(model)
    given = {"loss": options.loss_of(loss), "optimizer": optim.parse(optimizer), "precision": precision}

    def make(**more: object) -> compiler.Program:
        return compiler.compile(loaded.clone(), **{**given, **more})  # type: ignore[arg-type]

    stages, tensors = (tuple(n for n in ns if devices % n == 0) for ns in ((2, 4, 8), (2, 4)))
    if gpu is not None:  # predicted only, so fewer
        costs = on_gpu(make, gpu, stages[:2], tensors)
    else:
        costs = on_host(make, "auto", stages, tensors, profiled(profile, profile_seconds, output.note))
    found = best(costs, links, devices, limit, batch_size)
    chosen = {"model": model, "loss": loss, "optimizer": optimizer, **({"precision": precision} if precision else {})}
    if gpu is not None:
        chosen["backend"] = "cupy"
    if destination is not None:
        with whole_file(Path(destination)) as file:
            file.write((json.dumps(chosen | found[0].choice.options(), indent=2) + "\n").encode())
    if trace is not None:
        played = timeline(costs, links, found[0].choice)
        write_events(Path(trace), [Lanes(lane.computing, lane.communicating) for _, lane in steps(found[0], played, simulate)])
    if form is Format.json:
        output.document(
            {
                "machine": costs.machine,
                "plans": [as_row(p) for p in found[:SHOWN]],
                "refused": refused(costs),
                "not_modelled": list(costs.notes),
            }
        )
        return
    _show(found[:SHOWN], f"{devices} devices, each as {costs.machine}; batch {batch_size}")
    for note in costs.notes:
        output.say(f"Not modelled: {note}")
    for reason in refused(costs):
        output.say(f"Not proposed: {reason}")


def _show(rows: Sequence[Predicted], title: str) -> None:
    output.table(
        ("mesh", "strategy", "schedule", "micro-batches", "recompute", "step ms", "bubble", "exposed ms", "memory"),
        [
            (
                str(p.choice.mesh),
                p.choice.strategy,
                p.choice.schedule if p.choice.mesh.pipe > 1 else "-",
                f"{p.choice.micro_batches} of {p.choice.samples}",
                "all" if p.choice.recompute else "-",
                f"{p.seconds * 1e3:.2f}",
                f"{p.bubble:.1%}",
                f"{p.exposed * 1e3:.2f}",
                output.size(round(p.memory)),
            )
            for p in rows
        ],
        title=title,
    )


def _bytes(text: str) -> float:
    from graphc.errors import UsageError

    units = {"": 1e9, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MIB": 2.0**20, "GIB": 2.0**30}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if found is None or found[2].upper() not in units or not float(found[1]):
        raise UsageError(f"--memory {text!r}: write a size such as 80GB or 16GiB")
    return float(found[1]) * units[found[2].upper()]
