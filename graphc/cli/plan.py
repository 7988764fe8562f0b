"""``graphc plan``: proposes how to divide a training job over devices."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

from graphc.cli.terminal import options, output
from graphc.cli.terminal.output import Format
from graphc.options import Option

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
    from graphc.planner.costs import on_gpu, on_this_machine
    from graphc.planner.network import Network
    from graphc.planner.search import as_row, best, refused, steps
    from graphc.report.trace import Lanes, write_events

    if bool(simulate) != (trace is not None):
        raise UsageError("--simulate N and --trace FILE go together: the first says how many steps the second shows")
    for option, place in (("--output", destination), ("--trace", trace)):
        check_place(option, place, {"the model": model, "the network": network})
    limit, links = _bytes(memory), Network.read(network)
    links.check(devices)
    loaded = frontends.load(model)
    given = {"loss": options.loss_of(loss), "optimizer": optim.parse(optimizer), "precision": precision}

    def make(**more: object) -> compiler.Program:
        return compiler.compile(loaded.clone(), **{**given, **more})  # type: ignore[arg-type]

    if gpu is not None:
        costs = on_gpu(make, gpu)
    else:
        pipes = tuple(p for p in (2, 4, 8) if devices % p == 0)
        costs = on_this_machine(make, "auto", pipes, tuple(t for t in (2, 4) if devices % t == 0))
    found = best(costs, links, devices, limit, batch_size)
    chosen = {"model": model, "loss": loss, "optimizer": optimizer, **({"precision": precision} if precision else {})}
    if gpu is not None:
        chosen["backend"] = "cupy"
    if destination is not None:
        with whole_file(Path(destination)) as file:
            file.write((json.dumps(chosen | found[0].choice.options(), indent=2) + "\n").encode())
    if trace is not None:
        write_events(Path(trace), [Lanes(lane.computing, lane.communicating) for _, lane in steps(found[0], simulate)])
    if form is Format.json:
        output.document({"machine": costs.machine, "plans": [as_row(p) for p in found[:SHOWN]], "refused": refused(costs)})
        return
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
            for p in found[:SHOWN]
        ],
        title=f"{devices} devices, each as {costs.machine}; batch {batch_size}",
    )
    for reason in refused(costs):
        output.say(f"Not proposed: {reason}")


def _bytes(text: str) -> float:
    from graphc.errors import UsageError

    units = {"": 1e9, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MIB": 2.0**20, "GIB": 2.0**30}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if found is None or found[2].upper() not in units or not float(found[1]):
        raise UsageError(f"--memory {text!r}: write a size such as 80GB or 16GiB")
    return float(found[1]) * units[found[2].upper()]
