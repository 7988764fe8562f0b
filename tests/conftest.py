"""Fixtures that several test files share."""

from __future__ import annotations

import copy
import functools
import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.results import Results
from tests.tiers import listed

# Failed asserts of shared cases show their operands, as those of tests do.
pytest.register_assert_rewrite(*(f"tests.{path.parent.name}" for path in Path(__file__).parent.glob("*/__init__.py")))

# PyTorch is an oracle here; one thread keeps it from fighting with the code under test on small machines.
os.environ.setdefault("OMP_NUM_THREADS", "1")


ALL_FULL = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.full\b", re.MULTILINE)
"""What marks all tests of a file."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", metavar="FILE", help="write what became of the tests to this JSON file, after every test")
    parser.addoption("--unlisted", action="store_true", help="tests bear no marks of tests/slow_tests.txt")


MARKS = ("full", "large", "mpi", "faults", "gpu", "alone")
"""Marks whose meaning pyproject.toml tells; they are known in a folder without it too."""


def pytest_configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", f"{mark}: see pyproject.toml")
    if wants_gpu(config):  # a file that needs a missing package is one error among the results
        config.option.continue_on_collection_errors = True
    if config.getoption("--results") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(Path(config.getoption("--results"))))


def wants_gpu(config: pytest.Config) -> bool:
    """Whether only tests of a GPU are asked for (``-m gpu``)."""
    return str(config.option.markexpr).split()[:1] == ["gpu"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without tests of a GPU or of MPI are not even imported for ``-m gpu`` or ``-m mpi``, nor full ones for a quick one.

    Importing all takes 8 to 12 s in every process of pytest-xdist.
    """
    if collection_path.suffix != ".py":
        return None
    if wants_gpu(config) and "mark.gpu" not in collection_path.read_text(encoding="utf-8"):
        return True
    if "not full" in str(config.option.markexpr) and ALL_FULL.search(collection_path.read_text(encoding="utf-8")):
        return True
    if str(config.option.markexpr).startswith("mpi") and "mark.mpi" not in collection_path.read_text(encoding="utf-8"):
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives listed tests the marks of their tiers, and skips tests that need a GPU or MPI on machines without."""
    tiers = {} if config.getoption("--unlisted") else listed()
    for item in items:
        if item.nodeid in tiers:
            item.add_marker(tiers[item.nodeid])
    for marker, there, reason in (
        ("gpu", has_gpu, "needs an NVIDIA GPU and the gpu extra"),
        ("mpi", has_mpi, "needs an mpiexec that fits mpi4py, which the mpi extra brings"),
    ):
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and not there():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep Python's cycle collector from walking over PyTorch and the collected tests again and again: 8 % of a run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 100)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """A process whose GPU a kernel has broken fails whatever comes next: with xdist, a new one goes on with the rest."""
    result = yield
    if hasattr(item.config, "workerinput") and item.get_closest_marker("gpu") and gpu_is_lost():
        os._exit(70)
    return result


@pytest.fixture(autouse=True)
def parsed_once() -> None:
    """PyTorch's exporter parses its 500 functions for every model, which takes most of a small model's export; here only when
    there are more of them."""
    registration = sys.modules.get("torch.onnx._internal.exporter._registration")
    if registration is None or "parsed_once" in vars(registration):
        return
    whole = registration.ONNXRegistry.from_torchlib

    @functools.cache
    def parse(count: int, *version: int, **named: int) -> Any:
        return whole(*version, **named)

    def fresh(*version: int, **named: int) -> Any:
        from onnxscript.function_libs.torch_lib.registration import default_registry

        count = sum(len(found.overloads) + len(found.complex) for found in default_registry.values())
        registry = copy.copy(parse(count, *version, **named))
        registry.functions = {target: list(found) for target, found in registry.functions.items()}
        return registry

    registration.ONNXRegistry.from_torchlib = staticmethod(fresh)
    registration.parsed_once = True


@pytest.fixture(autouse=True)
def listed_once() -> None:
    """PyTorch's exporter makes a list of all operators for each of their namespaces, 54 times for a model; here once a test."""
    utils = sys.modules.get("torch._export.utils")
    if utils is None:
        return
    if "listed_once" not in vars(utils):
        utils.listed_once = utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)
    utils.listed_once.cache_clear()


FINAL = (214, 999, *range(700, 720))
"""CUDA's errors that every later call of the process returns again: of memory, kernels, links, and those it cannot name."""


def gpu_is_lost() -> bool:
    """Whether a kernel's error has made CUDA useless to this process."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return False
    try:
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return error.status in FINAL
    return False


def has_mpi() -> bool:
    """Whether processes can be started that meet by MPI."""
    from graphc.errors import MissingExtraError
    from graphc.launch.local import find_mpiexec

    try:
        mpiexec = find_mpiexec()
    except MissingExtraError:
        return False
    return mpiexec.is_relative_to(sys.prefix) or meets(mpiexec)


def meets(mpiexec: Path) -> bool:
    """Whether an mpiexec of the machine is that of the MPI that mpi4py loads; else processes fail before they meet."""
    command = [mpiexec, "-n", "1", sys.executable, "-c", "from mpi4py import MPI"]
    allowed = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    try:
        return subprocess.run(command, env=os.environ | allowed, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def has_gpu() -> bool:
    """Whether CuPy finds a GPU."""
    return gpus() > 0


def gpus() -> int:
    """How many GPUs CuPy finds."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy, no driver, or one that does not fit
        return 0


def emulated() -> bool:
    """Whether the GPUs are made up on the host (tests/hostcuda), where what is large takes long."""
    return "HOSTCUDA_KERNELS" in os.environ


@pytest.fixture(scope="session", autouse=True)
def flight_logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs that fail on purpose leave their logs here."""
    folder: Path = tmp_path_factory.mktemp("flights")
    os.environ["GRAPHC_FLIGHT_DIR"] = str(folder)
    yield folder
    del os.environ["GRAPHC_FLIGHT_DIR"]


@pytest.fixture
def register_backend() -> Iterator[Callable[[str, Callable[..., Any]], None]]:
    """``register_backend(name, make)``: a backend for this test, in place of one of the same name."""
    from graphc.backend import BACKENDS

    def register(name: str, make: Callable[..., Any]) -> None:
        BACKENDS.register(name, make, origin=__name__, override=True)

    with BACKENDS.restored():
        yield register


@pytest.fixture
def det_without_gradient() -> Iterator[None]:
    """Every differentiable op of ONNX has a gradient; tests of what happens without one take that of Det away."""
    from graphc.gradient import GRADIENTS

    with GRADIENTS.restored():
        GRADIENTS.remove("Det")
        yield


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """``exported("lenet")``: path of that benchmark model as ONNX, exported once per test session."""
    folder: Path = tmp_path_factory.mktemp("models")

    def get(name: str) -> str:
        from graphc.bench.models import export

        path = folder / f"{name}.onnx"
        if not path.exists():
            export(name, str(path))
        return str(path)

    return get


@pytest.fixture
def registries() -> Iterator[None]:
    """Custom ops, gradient rules and kernels that a test registers are gone after it, and what it replaced is back."""
    from graphc.backend import KERNELS
    from graphc.gradient import GRADIENTS
    from graphc.ir.declare import CUSTOM

    kernels = dict(KERNELS)
    with CUSTOM.restored(), GRADIENTS.restored():
        yield
    for backend, op in list(KERNELS):
        if "::" in op and not op.startswith("graphc::"):  # those of a backend that was imported meanwhile stay
            del KERNELS[backend, op]
    KERNELS.update(kernels)
