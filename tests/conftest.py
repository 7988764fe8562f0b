"""Fixtures that several test files share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.results import Results

# PyTorch is an oracle here; one thread keeps it from fighting with the code under test on small machines.
os.environ.setdefault("OMP_NUM_THREADS", "1")


LARGE = (
    "test_whoever_takes_the_advice_has_enough_memory[transformer-small",
    "test_training_gives_the_same_bits_from_less_memory[{}-1]",
    "tests/backends/cupy/training/test_device_mixed.py",
    "test_every_way_to_write_it_is_found_and_trains_as_in_pytorch[logsumexp]",
    "test_dropped_probabilities_train_as_in_pytorch_with_the_same_masks[True-probabilities]",
    "test_a_plan_that_does_not_fit_changes_nothing",
    "vgg19",
    "zfnet512",
    "bvlc_alexnet",
    "plain_onnxruntime[light_densenet121]",
    "test_large_exported_models_step_alike_in_plain_onnxruntime",
    "two_workers[light_densenet121]",
    "stays_symbolic[light_shufflenet]",
    "stays_symbolic[light_inception_v1]",
    "plain_onnxruntime[light_inception_v1]",
    "plain_onnxruntime[light_inception_v2]",
    "plain_onnxruntime[light_resnet50]",
    "plain_onnxruntime[light_shufflenet]",
    "smooth_zoo_models[light_resnet50]",
    "smooth_zoo_models[light_shufflenet]",
    "two_workers[light_inception_v2]",
    "two_workers[light_resnet50]",
    "test_ten_steps_follow_pytorch[resnet18-smooth-sgd-momentum]",
    "in_float64_are_those_of_pytorch[resnet18-small-adam]",
    "test_a_transformer_follows_one_worker[2]",
    "test_the_whole_benchmark_runs_at_tiny_sizes",
    "are_those_of_onnxruntime[transformer-small-1]",
    "are_those_of_onnxruntime[mlp-1]",
    "are_those_of_onnxruntime[lenet-1]",
    "test_networks_run_as_cuda[transformer-small-3]",
    "test_networks_run_as_cuda[mlp-",
    "test_networks_run_as_cuda[lenet-3]",
    "in_float64_are_those_of_pytorch[mlp-adam]",
    "step_alike_in_plain_onnxruntime[resnet18-small-adam]",
    "compute_the_same_for_each_sample[densenet121]",
    "compute_the_same_for_each_sample[inception_v2]",
    "test_the_same_bits_from_less_memory[transformer-cheap]",
    "test_twenty_steps_follow_autocast[transformer-small-fp16]",
    "tell_where[stopped-at-the-end]",
    "tell_where[slow-two]",
    "names_the_rank[abort]",
    "names_the_rank[killed-in-computation]",
    "names_the_rank[os._exit]",
    "names_the_rank[rank-0]",
    "names_the_rank[same-error]",
    "names_the_rank[sys.exit-text]",
    "without_a_killed_worker[parameter_server:servers=2-2]",
    "test_mpi.py::test_every_collective[2]",
    "test_killed[kill-1]",
    "test_killed_from_outside_among_four",
    "test_the_same_bits_over_mpi",
    "test_mpi_processes_do_what_threads_do",
    "test_uneven_accumulation_over_mpi",
    "test_mpi_workers_follow_one[transformer-small]",
    "test_mpi_workers_follow_one[lenet]",
    "test_replicas_are_bit_identical_after_fifty_steps[resnet18-small]",
)
"""Models of 240 to 550 MB, which meet no op that the others lack, slow cases of what a quicker one of the full tier shows,
and over MPI what it shows with threads."""


STRATEGIES = (
    "test_zero.py", "test_any_world", "test_accumulate", "test_averaging", "test_parameter_server", "test_compress",
    "test_adasum", "test_local_sgd", "test_clip", "test_nonfinite", "test_sync_batchnorm", "test_attention", "test_trace",
    "tests/data/test_training", "tests/data/test_torch_data", "test_parity", "training/test_recurrent", "test_workers",
    "test_transforms_converge", "test_recompute", "test_mixed_precision", "test_rebatch", "frontends/test_torch.py",
    "test_tcp", "test_nccl", "test_staged", "test_device_", "test_emulated", "fusion/test_threads", "cupy/kernels/test_kernels",
    "test_update_kernels", "training/test_channels_last", "test_convolutions", "test_cupy_suite", "test_cudnn_attention",
    "test_cudnn_convolution",
)  # fmt: skip
"""Files whose tests train on several workers or for many steps, or compile many kernels: of the full tier as a whole."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", metavar="FILE", help="write what became of the tests to this JSON file, after every test")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--results") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(Path(config.getoption("--results"))))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of large models are of a tier of their own; tests of the GPU and of MPI are skipped where there is none."""
    for item in items:
        if any(name in item.nodeid for name in LARGE):
            item.add_marker(pytest.mark.large)
        if any(name in item.nodeid for name in STRATEGIES):
            item.add_marker(pytest.mark.full)
    for marker, there, reason in (
        ("gpu", has_gpu, "needs an NVIDIA GPU and the gpu extra"),
        ("mpi", has_mpi, "needs mpiexec, which the mpi extra brings"),
    ):
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and not there():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """A process whose GPU a kernel has broken fails whatever comes next: with xdist, a new one goes on with the rest."""
    result = yield
    if hasattr(item.config, "workerinput") and item.get_closest_marker("gpu") and gpu_is_lost():
        os._exit(70)
    return result


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
        find_mpiexec()
    except MissingExtraError:
        return False
    return True


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
def det_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every differentiable op of ONNX has a gradient; tests of what happens without one take that of Det away."""
    from graphc.gradient import GRADIENTS

    assert "Det" in GRADIENTS
    monkeypatch.delitem(GRADIENTS._items, "Det")


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
    from graphc.registry import Registry

    tables: tuple[Registry[Any], ...] = (CUSTOM, GRADIENTS)
    for table in tables:
        table.load()
    held = [(dict(t._items), dict(t._origin), set(t._overrides)) for t in tables]
    kernels = dict(KERNELS)
    yield
    for table, (items, origin, overrides) in zip(tables, held, strict=True):
        table._items, table._origin, table._overrides = items, origin, overrides
    for backend, op in list(KERNELS):
        if "::" in op and not op.startswith("graphc::"):  # those of a backend that was imported meanwhile stay
            del KERNELS[backend, op]
    KERNELS.update(kernels)
