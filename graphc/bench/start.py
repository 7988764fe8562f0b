"""Measures the host time up to a GPU job's first step, without a GPU:

    graphc bench --start [gpt2 resnet50 …]

Each job is exported, then started in two processes: with an empty cache folder, then with the cache of the first start. The
figure is processor time: the interpreter, imports, reading the file, compiling, state, the plan, binding it, and the first call
of ``step``. It does not include the driver and its libraries (context, loading kernels, copies, plans of cuDNN), nor the
imports of CuPy, nvmath and cuDNN.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from graphc.bench.gpu_processes import Clock, export_all, once
from graphc.bench.gpu_specs import JOBS

LIMIT = 600.0
"""Maximum seconds of one start, and of the export of all models."""

Seconds = dict[str, float]
"""Processor seconds by part; ``total``: their sum."""


def starts(models: Sequence[str], *, tiny: bool = False) -> Iterator[tuple[str, Seconds, Seconds]]:
    """Yield (job, seconds of the first start, seconds of the second start) for each job.

    Raises:
        RuntimeError: a model cannot be exported, or a start failed.
    """
    with tempfile.TemporaryDirectory(prefix="graphc-start-") as name:
        for model in models:
            folder = Path(name) / model
            folder.mkdir()
            found = export_all([(model, 0)], folder, tiny=tiny, clock=Clock(LIMIT))[model, 0]
            if isinstance(found, str):
                raise RuntimeError(found)
            command = ("-m", __name__, model, str(found), str(folder / "kept"), *(["--tiny"] if tiny else []))
            environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(Path(name) / "compiled")}
            environment.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled modules, as in an installed package
            first, second = (once(command, environment, Clock(LIMIT)) for _ in range(2))
            found.unlink()
            yield model, first, second


def main() -> None:
    """Start once in this process; print the seconds as a line of JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", choices=sorted(JOBS))
    parser.add_argument("file")
    parser.add_argument("kept", type=Path, help="folder of compiled segments")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    job = JOBS[arguments.model].tiny() if arguments.tiny else JOBS[arguments.model]
    print(json.dumps(measured(job, arguments.file, arguments.kept)))


def measured(job: Any, path: str, kept: Path) -> Seconds:
    """Processor seconds by part of a start; ``import`` covers everything that the process did before."""
    import graphc
    from graphc.backend import BACKENDS, PLANNERS, backend_of
    from graphc.bench.gpu_worker import on_device

    backend_of("cupy")  # imports only this backend, as a trainer does
    planner = PLANNERS["cupy"]
    made: Callable[..., Any] = lambda threads, spin, **_: planner(cache=kept)  # noqa: E731
    BACKENDS.register("planned", made, origin=__name__)
    found, since = {"import": time.process_time()}, time.process_time()

    def passed(part: str) -> None:
        nonlocal since
        found[part], since = time.process_time() - since, time.process_time()

    program = graphc.compile(path, backend="planned", **job.options())
    passed("compile")
    trainer = graphc.Trainer(program)
    passed("trainer")
    feeds = on_device(trainer.backend.memory, job.feeds())
    since = time.process_time()
    trainer.step(feeds)
    passed("step")
    return {**found, "total": sum(found.values())}


if __name__ == "__main__":
    main()
