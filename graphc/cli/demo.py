"""``graphc demo``: trains a small ONNX model on real data with two workers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from graphc.cli.terminal import options, output
from graphc.cli.terminal.output import Format
from graphc.options import Option

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphc.cli.training.job import Job, Prepared
    from graphc.demo import Digits
    from graphc.device import Array

EXAMPLES = (
    "graphc demo",
    "graphc demo --epochs 3 -n 1 -o trained.onnx",
)


@options.takes_options
def command(
    epochs: Annotated[int, Option("Passes over the data.", "N", minimum=1)] = 10,
    workers: Annotated[int, Option("Processes that compute.", "N", minimum=1, flags=("-n", "--workers"))] = 2,
    out: Annotated[str, Option("The trained model.", "FILE", flags=("-o", "--output"))] = "trained.onnx",
    transport: options.Transport = "auto",
    form: options.Format = Format.text,
) -> int:
    """Train a small CNN on handwritten digits with two MPI workers, and run the result in plain onnxruntime."""
    from graphc import demo
    from graphc.cli.train import run_job
    from graphc.cli.training.job import Job
    from graphc.launch.folders import job_folder
    from graphc.launch.signals import termination_interrupts

    start = time.perf_counter()
    digits = demo.load_digits()
    with termination_interrupts(), job_folder() as folder:
        job = Job(
            model=str(demo.MODEL),
            data=_save(folder / "train.npz", digits.train),
            eval_data=_save(folder / "test.npz", digits.test),
            loss="softmax_cross_entropy:logits=logits,label=label",
            optimizer="adam:lr=2e-3",
            epochs=epochs,
            batch_size=64,
            workers=workers,
            output=out,
            transport=transport,
            form=form,
        )
        prepared = _show_compilation(job, digits, form)
        code = run_job(job, prepared=prepared)
    if code:
        return code
    accuracy = onnxruntime_accuracy(out, digits.test)
    seconds = time.perf_counter() - start
    if form is Format.json:
        output.event({"event": "demo", "onnxruntime_accuracy": accuracy, "output": out, "seconds": round(seconds, 2)})
    else:
        output.say(f"plain onnxruntime runs {out} with a test accuracy of {accuracy:.2%}")
        output.say(f"finished in {seconds:.1f} s")
    return 0


def _save(path: Path, arrays: Mapping[str, Array]) -> str:
    import numpy as np

    np.savez(path, **arrays)  # type: ignore[arg-type]
    return str(path)


def _show_compilation(job: Job, digits: Digits, form: Format) -> Prepared:
    """Compile, and print what each pass did."""
    from graphc import demo, frontends
    from graphc.cli.compile import PassTimes
    from graphc.cli.terminal.summary import training_graph
    from graphc.cli.training import job as jobs

    nodes = len(frontends.load(demo.MODEL).graph)
    counts = Injected()
    times = PassTimes()

    def after(step: Any, model: ir.Model, seconds: float) -> None:
        times.add(step, model, seconds)
        counts.look(step.name, model)

    prepared = jobs.prepare(job, after=after)
    found = training_graph(prepared.program.model)
    summary = {
        "event": "compiled",
        "nodes_before": nodes,
        "nodes_after": found["nodes"],
        "allreduces_injected": counts.injected,
        "allreduces_per_step": found["allreduces"],
        "buckets": counts.buckets,
        "bytes_per_step": found["allreduce_bytes"],
        "passes": times.rows,
    }
    if form is Format.json:
        output.event(summary)
        return prepared
    samples, tests = len(digits.train["label"]), len(digits.test["label"])
    output.say(f"{demo.MODEL.name}: {found['trained_parameters']} parameters, {found['trained_elements']:,} elements")
    output.say(f"digits: {samples} images of 8×8 to train on, {tests} to test with\n")
    before = [nodes, *(row["nodes"] for row in times.rows)]
    rows = [(row["pass"], b, row["nodes"], round(row["ms"], 1)) for b, row in zip(before, times.rows, strict=False)]
    output.table(("pass", "nodes before", "nodes after", "ms"), rows)
    output.say(
        f"\n{nodes} nodes became {found['nodes']}: {found['compute']} compute, {found['collectives']} collectives, "
        f"{found['updates']} updates"
    )
    output.say(
        f"{counts.injected} AllReduces injected, gathered into {output.counted(found['allreduces'], 'AllReduce')} a step "
        f"({output.counted(counts.buckets, 'bucket')}, and the loss with its metrics): "
        f"{output.size(found['allreduce_bytes'])}\n"
    )
    return prepared


class Injected:
    """Counts the AllReduces that ``allreduce`` inserts and the buckets that ``bucket`` makes of them."""

    def __init__(self) -> None:
        self.injected = 0
        self.buckets = 0

    def look(self, name: str, model: ir.Model) -> None:
        """Count after pass ``name``."""
        if name == "allreduce":
            self.injected = sum(n.op_type == "AllReduce" and n.domain == "graphc" for n in model.graph)
        elif name == "bucket":
            from graphc.ir.declare import is_update
            from graphc.ir.names import BUCKET

            self.buckets = len(
                {n.attributes[BUCKET].as_string() for n in model.graph if is_update(n) and BUCKET in n.attributes}
            )


def onnxruntime_accuracy(path: str, test: Mapping[str, Array]) -> float:
    """Accuracy of the file when plain onnxruntime runs it."""
    import numpy as np

    from graphc.errors import MissingExtraError

    try:
        import onnxruntime
    except ImportError:
        raise MissingExtraError("onnxruntime is not installed; run: pip install 'graphc[cpu]'") from None
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"image": test["image"]})
    return float(np.mean(np.argmax(logits, axis=1) == test["label"]))
