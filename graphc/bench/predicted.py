"""``graphc bench --predict``: predicts step times of GPU jobs or training graphs."""

from __future__ import annotations

import tempfile
from pathlib import Path

from graphc.backend import make_backend
from graphc.bench.gpu_specs import JOBS, BenchJob
from graphc.errors import UsageError, nearest
from graphc.plan.partition import make_plan
from graphc.plan.state_rewrites import adapted
from graphc.report.memory import feed_shapes
from graphc.report.step_profile import StepProfile, prediction_of
from graphc.report.step_time import PREDICTIONS, Prediction


def predicted(
    model: str, *, batch: int = 1, gpu: str = "h200", backend: str = "cupy", job: BenchJob | None = None
) -> Prediction:
    """Predict a named job, which PyTorch exports first, or a file that ``graphc compile`` wrote.

    Args:
        batch: size of every symbolic dimension of a file.
        gpu: ``a100``, ``h100``, ``h200``, ``b200``, ``l4`` or ``rtx4090``.
        job: replaces the named job, for other sizes.

    Raises:
        UsageError: ``model`` is neither a job nor a training graph, or no such GPU is described.
    """
    from graphc import frontends

    if model not in JOBS and not Path(model).exists():
        raise UsageError(f"there is no job and no file {model!r}{nearest(model, JOBS)}; jobs are {', '.join(JOBS)}")
    if model not in JOBS:
        graph = frontends.load(model)
        return PREDICTIONS[backend](graph, feed_shapes(graph, batch), gpu)
    from graphc.bench.gpu_models import export
    from graphc.compiler import compile

    sizes = job or JOBS[model]
    with tempfile.TemporaryDirectory(prefix="graphc-predict-") as folder:
        path = Path(folder) / f"{model}.onnx"
        export(model, path, sizes)
        graph = compile(path, backend=backend, **sizes.options()).model
        return PREDICTIONS[backend](graph, feed_shapes(graph, 1) | sizes.shapes(), gpu)


def profiled(model: str, *, batch: int, profile: str) -> Prediction:
    """Predict a file that ``graphc compile`` wrote, with the times of a file that ``graphc plan --profile`` wrote.

    Raises:
        UsageError: one of the two files is none.
    """
    from graphc import frontends

    known, graph = StepProfile.read(profile), frontends.load(model)
    engine = make_backend(known.backend, threads=1, spin=False)
    try:
        return prediction_of(make_plan(adapted(graph, engine), feed_shapes(graph, batch), engine), known)
    finally:
        engine.close()
