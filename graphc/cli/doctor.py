"""``graphc doctor``: checks the installation."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from graphc import __version__
from graphc.cache_folder import CACHE_VARIABLE, cache_folder
from graphc.cli.backends import READY
from graphc.cli.diagnosis import gpu, versions
from graphc.cli.diagnosis.finding import Finding
from graphc.cli.terminal import options, output
from graphc.cli.terminal.output import Format
from graphc.errors import UsageError, nearest
from graphc.options import Option

EXAMPLES = ("graphc doctor", "graphc doctor --smoke", "graphc doctor --smoke --format json >smoke.jsonl")


CORE = ("numpy", "onnx", "onnx_ir", "ml_dtypes", "typer", "rich")
EXTRAS = {
    "cpu": ("onnxruntime", "numba"),
    "mpi": ("mpi4py",),
    "torch": ("torch", "onnxscript"),
    "demo": ("sklearn",),
}
"""Extra → its modules; the first missing one is reported for the extra."""

DISTRIBUTIONS = {"onnx_ir": "onnx-ir", "sklearn": "scikit-learn"}
TIMEOUT = 60.0  # maximum seconds to start two workers


def command(
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Try the GPUs: kernels, libraries, NCCL and training steps, stage by stage.")
    ] = False,
    stages: Annotated[str, Option("Run only these stages of --smoke, separated by commas.", "NAMES")] = "",
    limit: Annotated[float, Option("Most seconds of a stage of --smoke; 0: those of each.", "SECONDS")] = 0.0,
    form: options.Format = Format.text,
) -> int:
    """Check the installation; exit code 1 when graphc cannot work here, or with --smoke when a GPU is not fit."""
    if smoke:
        return smoke_test(stages, limit, form)
    if stages or limit:
        raise UsageError("--stages and --limit belong to --smoke")
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _core, _extras, _registries, _cores, _workers, gpu.findings, _backends, _cache,
    )  # fmt: skip
    findings = [finding for check in checks for finding in check()]
    usable = all(f.state != "broken" for f in findings)
    if form is Format.json:
        output.document({"usable": usable, "findings": [asdict(f) for f in findings]})
    else:
        output.table(("what", "state", "detail"), [(f.what, f.state, f.detail) for f in findings])
        output.say("graphc can be used here" if usable else "graphc cannot be used here")
    return 0 if usable else 1


def smoke_test(names: str, limit: float, form: Format) -> int:
    """Run the stages; JSON as soon as one has ended, or a table at the end. Exit code 1 if one failed or could not run."""
    from graphc.smoke import runner
    from graphc.smoke.stages import STAGES

    wanted = [name.strip() for name in names.split(",") if name.strip()] or [stage.name for stage in STAGES]
    known = {stage.name: stage for stage in STAGES}
    for name in wanted:
        if name not in known:
            raise UsageError(f"there is no stage {name!r}{nearest(name, known)}; the stages are: {', '.join(known)}")
    results = []
    with tempfile.TemporaryDirectory(prefix="graphc-smoke-") as folder:
        environment = {**os.environ, CACHE_VARIABLE: folder}
        for result in runner.run([stage for stage in STAGES if stage.name in wanted], environment, limit):
            results.append(result)
            if form is Format.json:
                output.event(result)
            else:
                output.note(f"{result['stage']}: {result['state']} ({result['seconds']:.0f} s)")
    fit = runner.usable(results)
    if form is not Format.json:
        rows = [(r["stage"], r["state"], f"{r['seconds']:.1f} s", r["detail"]) for r in results]
        output.table(("stage", "state", "time", "detail"), rows)
        bad = ", ".join(result["stage"] for result in results if result["state"] not in ("ok", "skipped"))
        output.say("every stage succeeded" if fit else f"not fit for training on a GPU: {bad}")
    return 0 if fit else 1


def _core() -> Iterator[Finding]:
    yield Finding("graphc", "ok", __version__)
    version = platform.python_version()
    yield Finding("python", "ok" if sys.version_info >= (3, 11) else "broken", f"{version}, {sys.executable}")
    for name in CORE:
        yield _module(name, "broken", "pip install graphc")


def _extras() -> Iterator[Finding]:
    for extra, names in EXTRAS.items():
        for name in names:
            yield _module(name, "missing", f"pip install 'graphc[{extra}]'")


def _module(name: str, absent: str, remedy: str) -> Finding:
    distribution = DISTRIBUTIONS.get(name, name)
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "version unknown" if importlib.util.find_spec(name) else ""
    if not version:
        return Finding(distribution, absent, f"not installed; {remedy}")
    return versions.installed(distribution, version, remedy)


def _registries() -> Iterator[Finding]:
    """Check that every pass, op, gradient and backend can be imported."""
    from graphc.backend import BACKENDS
    from graphc.gradient import GRADIENTS
    from graphc.ir.declare import OPS
    from graphc.optim import OPTIMIZERS
    from graphc.pipeline import PASSES
    from graphc.registry import BROKEN, Registry

    registries: tuple[Registry[object], ...] = (PASSES, OPS, GRADIENTS, OPTIMIZERS, BACKENDS)  # type: ignore[assignment]
    for registry in registries:
        try:
            number = len(registry)
        except Exception as error:
            yield Finding(registry.group, "broken", f"{type(error).__name__}: {error}")
        else:
            yield Finding(registry.group, "ok" if number else "broken", f"{number} registered")
    for problem in BROKEN.values():
        yield Finding("plugin", "missing", problem)


def _cores() -> Iterator[Finding]:
    from graphc.distributed.world import available_cores

    yield Finding("cores", "ok", f"{available_cores()} usable of {os.cpu_count()}, affinity {sorted(os.sched_getaffinity(0))}")


def _workers() -> Iterator[Finding]:
    """Check that two real MPI processes meet at a barrier."""
    from graphc.errors import GraphcError
    from graphc.launch.local import find_mpiexec

    try:
        mpiexec = find_mpiexec()
    except GraphcError as error:
        yield Finding("workers over MPI", "missing", str(error))
        return
    text = (
        "from graphc.distributed.world import find_world\n"
        "from graphc.distributed.choose import open_communicator\n"
        "comm = open_communicator(find_world())\n"
        "comm.barrier()\n"
        "print('met', comm.size, flush=True) if comm.rank == 0 else None\n"
        "comm.close()\n"
    )
    # In a separate process, so that MPI's messages do not mix with this command's output.
    start = [sys.executable, "-m", "graphc", "launch", "-n", "2", "-c", text]
    try:
        done = subprocess.run(start, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        yield Finding("workers over MPI", "missing", f"two processes did not meet within {TIMEOUT:.0f} s ({mpiexec})")
        return
    if done.returncode == 0 and "met 2" in done.stdout:
        yield Finding("workers over MPI", "ok", f"two processes met at a barrier ({mpiexec})")
    else:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding("workers over MPI", "missing", f"{reason} ({mpiexec}); 'pip install graphc[mpi]' brings a working one")


def _backends() -> Iterator[Finding]:
    """Start every backend once, as a trainer does."""
    from graphc.cli.backends import statuses

    for name, status, remark in statuses():
        detail = "; ".join(filter(None, (status, remark)))
        yield Finding(f"backend {name}", "ok" if status == READY else "missing", detail)


def _cache() -> Iterator[Finding]:
    """Check the folder of compiled kernels."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = cache_folder()
    if caught:
        yield Finding("kernel cache", "missing", str(caught[0].message))
    else:
        yield Finding("kernel cache", "ok", os.environ.get("NUMBA_CACHE_DIR", str(folder)))
