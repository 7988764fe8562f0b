"""Prepares a bundle for a machine with a GPU and no network, and runs everything there.

    python scripts/gpu_machine.py prepare --python 3.12 --output bundle [--cache cache.tar.gz]      where there is an index
    python bundle/run.py run --bundle bundle --output results [--minutes 28]                        on that machine

``run`` works in four parts: A installs and tries the GPU (``graphc doctor --smoke``); B measures graphc alone, the smallest job
first; C runs the tests, a file at a time; D measures PyTorch beside graphc for the two jobs that are furthest from their goals.
B comes before C, since a table of measured and predicted calls says more than tests that pass elsewhere. If A fails, the rest
is left out, unless ``--keep-going`` is given. Everything is killed at its time limit. At most 8 files are left, in any case:

    summary.json  doctor.json  smoke.jsonl  bench.json  tests.json  torch.json  log.txt  cache.tar.gz
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

LARGEST = 64 << 20
"""Bytes of a bundle."""

PACKED, LOG = 8 << 20, 400_000
"""Most bytes of the cache and characters of the log that are brought home."""

PLATFORMS = (
    *(f"manylinux_2_{k}_x86_64" for k in (39, 35, 34, 31, 28, 27, 24, 17)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)

WORKERS = 14
"""Most processes that share the GPU for tests: each holds a context of half a gigabyte."""

FIRST = ("test_cuda.py", "test_on_a_gpu.py", "test_gemm.py", "test_cudnn", "test_cuda_execution.py")
"""Test files in the order of what else depends on them."""


def main(given: Sequence[str] | None = None) -> int:
    """Prepare a bundle, or run one; exit code 1 if something failed."""
    parser = argparse.ArgumentParser(description="Prepare a bundle for a machine with a GPU, or run one there.")
    actions = parser.add_subparsers(dest="action", required=True)
    one = actions.add_parser("prepare", help="collect wheels, tests and models without weights")
    one.add_argument("--output", type=Path, required=True)
    one.add_argument("--python", default="3.12", help="version of that machine's Python")
    one.add_argument("--cache", type=Path, help="cache.tar.gz of an earlier run")
    one.add_argument("--jobs", default="mlp-wide,bert,gpt2,resnet50", help="jobs of the benchmark")
    one.add_argument("--tiny", action="store_true", help="tiny models, to try the script")
    one.add_argument("--skip", default="", help="wheels that are there already, separated by commas, or 'all'")
    two = actions.add_parser("run", help="run a bundle and pack the results")
    two.add_argument("--bundle", type=Path, default=Path(__file__).parent)
    two.add_argument("--output", type=Path, required=True)
    two.add_argument("--minutes", type=float, default=28.0)
    two.add_argument("--parts", default="ABCD")
    two.add_argument("--keep-going", action="store_true", help="go on if part A fails")
    two.add_argument("--no-install", action="store_true", help="use what is installed")
    arguments = parser.parse_args(given)
    return prepare(arguments) if arguments.action == "prepare" else Run(arguments).everything()


# Here -------------------------------------------------------------------------------------------------------------------


def prepare(arguments: argparse.Namespace) -> int:
    """Fill the folder of the bundle; fails if it is too large."""
    from graphc.bench.bundle import CARRIED
    from graphc.bench.gpu import SMALL

    root, folder = Path(__file__).resolve().parents[1], arguments.output
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "wheels").mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    print("building graphc's wheel", file=sys.stderr)
    with tempfile.TemporaryDirectory() as source:  # building in place would leave a folder in the repository
        ignored = shutil.ignore_patterns(".*", "build", "tests", "docs", "*.egg-info", "__pycache__")
        copy = shutil.copytree(root, Path(source) / "graphc", ignore=ignored)
        subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder / "wheels", copy], check=True)
    wanted = [f"{name}=={version}" for name, (version, _) in CARRIED.items() if name not in arguments.skip.split(",")]
    if arguments.skip != "all":
        print(f"downloading {len(wanted)} wheels", file=sys.stderr)
        target = ["--python-version", arguments.python, "--implementation", "cp", *(f"--platform={p}" for p in PLATFORMS)]
        subprocess.run(
            [*pip, "download", "--no-deps", "--only-binary=:all:", *target, "-d", folder / "wheels", *wanted], check=True
        )
    shutil.copytree(root / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    (folder / "models").mkdir()
    for job in arguments.jobs.split(","):
        for layers in sorted({0, SMALL[job][0]}):
            print(f"exporting {job}", file=sys.stderr)
            with tempfile.TemporaryDirectory() as made:
                whole = [sys.executable, "-m", "graphc.bench.gpu_models", job, f"{made}/m.onnx", "--layers", str(layers)]
                subprocess.run([*whole, *(["--tiny"] if arguments.tiny else [])], check=True, stdout=sys.stderr)
                target_file = folder / "models" / f"{job}-{layers}.onnx"
                subprocess.run(
                    [sys.executable, "-m", "graphc.bench.skeleton", "strip", f"{made}/m.onnx", target_file], check=True
                )
    if arguments.cache is not None:
        shutil.copy(arguments.cache, folder / "cache.tar.gz")
    shutil.copy(__file__, folder / "run.py")
    manifest = {"jobs": arguments.jobs.split(","), "tiny": arguments.tiny, "python": arguments.python}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return check_size(folder)


def check_size(folder: Path) -> int:
    """Print the bytes of the bundle; 1 if it is too large to carry."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    total = sum(sizes.values())
    print(f"{folder}: {len(sizes)} files, {total / 2**20:.1f} MiB")
    if total <= LARGEST:
        return 0
    largest = sorted(sizes, key=lambda path: -sizes[path])[:5]
    print(f"that is more than {LARGEST >> 20} MiB; the largest are", file=sys.stderr)
    for path in largest:
        print(f"  {sizes[path] / 2**20:.1f} MiB  {path}", file=sys.stderr)
    return 1


# There ------------------------------------------------------------------------------------------------------------------


class Run:
    """Runs the parts of a bundle, and packs the results whatever becomes of them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.bundle, self.output = arguments.bundle.resolve(), arguments.output.resolve()
        self.parts, self.keep_going, self.install = arguments.parts, arguments.keep_going, not arguments.no_install
        self.end = time.monotonic() + 60 * arguments.minutes
        self.summary: dict[str, Any] = {"parts": {}, "failed": []}
        self.manifest: dict[str, Any] = json.loads((self.bundle / "manifest.json").read_text())
        shutil.rmtree(self.output, ignore_errors=True)
        self.output.mkdir(parents=True)
        self.work = Path(tempfile.mkdtemp(prefix="graphc-gpu-"))
        self.cache, self.logs = self.work / "cache", self.work / "logs"
        self.logs.mkdir()
        site = self.work / "site"
        path = os.pathsep.join(filter(None, [str(site) if self.install else "", os.environ.get("PYTHONPATH", "")]))
        self.environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        self.site = site

    def everything(self) -> int:
        """Run the parts in order; return 1 if something failed."""
        try:
            fit = self._part_a()
            steps: dict[str, Callable[[], None]] = {"B": self._part_b, "C": self._part_c, "D": self._part_d}
            for name, step in steps.items():
                if name in self.parts and (fit or self.keep_going):
                    step()
            if not fit and not self.keep_going:
                self.summary["stopped"] = "after part A, which failed; --keep-going runs the others nevertheless"
        except Exception as error:  # what is known so far is brought home
            self._note("script", "failed", 0.0, f"{type(error).__name__}: {error}")
        finally:
            self._pack()
        for name, found in self.summary["parts"].items():
            print(f"{found['state']:8}{found['seconds']:8.1f} s  {name}  {found['detail'][-300:]}")
        print(self.summary.get("stopped", ""))
        return 1 if self.summary["failed"] else 0

    def _part_a(self) -> bool:
        """Install, then doctor and smoke test; whether the machine is fit."""
        if self.install:
            pip = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", self.site]
            wheels = sorted((self.bundle / "wheels").glob("*.whl"))
            if self._run("A install", [*pip, *wheels], 180) != 0:
                return False
        if (self.bundle / "cache.tar.gz").exists():
            with tarfile.open(self.bundle / "cache.tar.gz") as archive:
                archive.extractall(self.work, filter="data")
        self._run("A doctor", ["-m", "graphc", "doctor", "--format", "json"], 120, to="doctor.json", may_fail=True)
        smoke = ["-m", "graphc", "doctor", "--smoke", "--format", "json"]
        if "A" not in self.parts:
            return True
        code = self._run("A smoke", smoke, 600, to="smoke.jsonl")
        stages = [json.loads(line) for line in (self.output / "smoke.jsonl").read_text().splitlines() if line.startswith("{")]
        bad = [f"{stage['stage']} {stage['state']}" for stage in stages if stage["state"] in ("failed", "hung", "crashed")]
        idle = sum(stage["state"] == "cannot run" for stage in stages)
        self.summary["parts"]["A smoke"]["detail"] = ", ".join([*bad, *([f"{idle} stages cannot run"] if idle else [])])
        return code == 0

    def _part_b(self) -> None:
        """graphc's own step times, without PyTorch."""
        self._measure("B graphc alone", "bench.json", 480, [], ["--modes", "none"])

    def _part_c(self) -> None:
        """The tests of a GPU: all files at once on many workers, then those that need the GPU to themselves.

        Without pytest-xdist each file has a process of its own, since a kernel that breaks CUDA breaks it for its process.
        """
        tests = self.work / "empty"
        tests.mkdir()
        shutil.copytree(self.bundle / "tests", tests / "tests")  # beside a folder 'graphc' the installed one would be hidden
        files = [path for path in (tests / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")]
        order = {path: next((k for k, name in enumerate(FIRST) if path.name.startswith(name)), len(FIRST)) for path in files}
        names = [str(path.relative_to(tests)) for path in sorted(files, key=lambda path: (order[path], str(path)))]
        self.environment["PYTHONPATH"] = f"{tests}{os.pathsep}{self.environment['PYTHONPATH']}"
        options = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
        if importlib.util.find_spec("pytest_timeout") or (self.site / "pytest_timeout.py").exists():
            options += ["--timeout", "100", "--timeout-method", "thread"]
        runs = {name: ["-m", "gpu", name] for name in names}
        if importlib.util.find_spec("xdist") or (self.site / "xdist").exists():
            workers = max(2, min(WORKERS, len(os.sched_getaffinity(0)) - 2))
            many = ["-n", workers, "--dist", "load", "--max-worker-restart", "40"]
            runs = {"side by side": ["-m", "gpu and not alone", *many, *names], "alone": ["-m", "gpu and alone", *names]}
        end, found = min(self.end - 60, time.monotonic() + 480), dict[str, Any]()
        for name, words in runs.items():
            left, result = end - time.monotonic(), self.work / "result.json"
            result.unlink(missing_ok=True)
            if left < 5:
                found[name] = {"not run": "the time of part C is spent"}
                continue
            most = 150 if name in names else 400
            code = self._run(f"C {name}", [*options, "--results", result, *words], min(most, left), cwd=tests)
            with contextlib.suppress(OSError, ValueError):
                found[name] = {**json.loads(result.read_text()), "exit": code}
            found.setdefault(name, {"exit": code, "failed": {name: "it wrote no results"}})
            self._write("tests.json", found)

    def _part_d(self) -> None:
        """PyTorch beside graphc, for the two jobs that are furthest from their goals."""
        self._measure("D beside PyTorch", "torch.json", 400, self._doubtful(), ["--kernels", "0"])

    def _measure(self, name: str, target: str, budget: float, jobs: Sequence[str], more: Sequence[str]) -> None:
        """Run the benchmark; one that is skipped counts as failed."""
        budget = max(30.0, min(budget, self.end - time.monotonic() - 30))
        command = ["-m", "graphc.bench.gpu", "--output", self.output / target, "--skeletons", self.bundle / "models"]
        command += ["--cache", self.cache, "--rounds", 2, "--budget", budget, "--limit", budget / 2, *more]
        command += ["--only", ",".join(jobs or self.manifest["jobs"]), *(["--tiny"] if self.manifest["tiny"] else [])]
        self._run(name, command, budget + 40)
        with contextlib.suppress(OSError, ValueError):
            reason = json.loads((self.output / target).read_text()).get("skipped")
            if reason:
                self._note(name, "skipped", 0.0, reason)

    def _doubtful(self) -> list[str]:
        """The two jobs with the largest measured time over their goals in part B."""
        with contextlib.suppress(OSError, ValueError):
            jobs = json.loads((self.output / "bench.json").read_text()).get("jobs", {})
            late = {name: job["graphc_ms"] / job["goal_ms"] for name, job in jobs.items() if job.get("graphc_ms")}
            if len(late) > 1:
                return sorted(late, key=lambda name: -late[name])[:2]
        return [name for name in self.manifest["jobs"] if name in ("bert", "mlp-wide")] or self.manifest["jobs"][:1]

    # Processes and results ------------------------------------------------------------------------------------------------

    def _run(
        self, name: str, command: Sequence[Any], limit: float, *, to: str = "", cwd: Path | None = None, may_fail: bool = False
    ) -> int | None:
        """Run Python with ``command``, killed with its children after ``limit`` seconds; None if it was."""
        limit = max(1.0, min(limit, self.end - time.monotonic()))
        log, begin = self.logs / f"{len(list(self.logs.iterdir())):03}.txt", time.monotonic()
        words = [sys.executable, *map(str, command)]
        with log.open("w") as errors, (self.output / to if to else log).open("a") as out:
            print(f"== {name}: {' '.join(words[1:])[:300]}", file=errors, flush=True)
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, cwd=cwd or self.work, env=self.environment,
                start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        state = "killed" if code is None else "ok" if code == 0 or (code == 5 and "pytest" in words) else "failed"
        last = " ".join(log.read_text(errors="replace").splitlines()[-3:])
        self._note(name, state, time.monotonic() - begin, last if state != "ok" else "", may_fail=may_fail)
        return 0 if state == "ok" else code

    def _note(self, name: str, state: str, seconds: float, detail: str, *, may_fail: bool = False) -> None:
        self.summary["parts"][name] = {"state": state, "seconds": round(seconds, 1), "detail": detail[-600:]}
        if state != "ok" and not may_fail:
            self.summary["failed"].append(name)
        self._write("summary.json", self.summary)

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        (self.output / name).write_text(json.dumps(value, indent=1) + "\n")

    def _pack(self) -> None:
        """Leave the ends of all logs, and the cache if it is small enough."""
        texts = [path.read_text(errors="replace") for path in sorted(self.logs.iterdir())]
        share = LOG // max(1, len(texts))
        (self.output / "log.txt").write_text("\n".join(text if len(text) <= share else f"…{text[-share:]}" for text in texts))
        if self.cache.is_dir():
            packed = self.output / "cache.tar.gz"
            with tarfile.open(packed, "w:gz") as archive:
                for path in sorted(self.cache.rglob("*")):
                    if path.is_file() and "inductor" not in path.parts:
                        archive.add(path, Path("cache") / path.relative_to(self.cache))
            if packed.stat().st_size > PACKED:
                self.summary["cache"] = f"left behind: {packed.stat().st_size} bytes"
                packed.unlink()
        self._write("summary.json", self.summary)
        shutil.rmtree(self.work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
