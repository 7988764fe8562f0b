"""How the fastest of a library's proposals is found: on a device that keeps time, with a library that answers from a table."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest

from graphc.backends.cupy.libraries import cudnn
from graphc.backends.cupy.libraries.cublaslt import Products
from graphc.backends.cupy.libraries.cudnn import Dnn, Tensor
from graphc.backends.cupy.libraries.noise import sets_for
from graphc.errors import DeviceError, GraphcError
from tests.backends.timed_device import CUDARuntimeError, TimedDevice


@dataclass(frozen=True)
class Call:
    """A call with one operand and one result."""

    size: int = 8

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {name: Tensor.dense((self.size,), ir.DataType.FLOAT16) for name in ("x", "y")}

    @property
    def operands(self) -> tuple[str, ...]:
        return ("x",)

    repeatable = False
    variants = ()

    def emit(self, cudnn: Any, graph: Any, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"y": Result()}


class Result:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: self


class NotSupportedError(Exception):
    pass


class Library:
    """cuDNN with plans from a table.

    Args:
        plans: the names that each heuristic proposes.
        milliseconds: of each plan on the device; an exception: how it fails there.

    Attributes:
        built, ran: names of plans, in order.
        asked: heuristics, in order.
    """

    cudnnGraphNotSupportedError = NotSupportedError  # noqa: N815
    heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
    data_type = SimpleNamespace(FLOAT=0, HALF=1)
    numerical_note = SimpleNamespace(REDUCED_PRECISION_REDUCTION=0, NONDETERMINISTIC=1)

    def __init__(self, device: TimedDevice, plans: Mapping[str, list[str]], milliseconds: Mapping[str, Any]) -> None:
        self.device, self.plans, self.milliseconds = device, plans, milliseconds
        self.built, self.ran, self.asked = list[str](), list[str](), list[str]()

    def create_handle(self) -> int:
        return 1

    def set_stream(self, **_: Any) -> None:
        """There is one stream."""

    def backend_version(self) -> int:
        return 91100

    def pygraph(self, **_: Any) -> Graph:
        return Graph(self)


class Graph:
    def __init__(self, library: Library) -> None:
        self._library, self._names, self._built = library, list[str](), ""

    def tensor(self, **_: Any) -> None:
        """Operands need no description here."""

    def validate(self) -> None:
        """Every graph is valid."""

    build_operation_graph = validate

    def deselect_numeric_notes(self, notes: Any) -> None:
        """No plan has notes."""

    def create_execution_plans(self, modes: list[str]) -> None:
        assert not self._names, "planning is done once a graph"
        self._library.asked += modes
        self._names = [name for mode in modes for name in self._library.plans.get(mode, [])]
        if not self._names:
            raise NotSupportedError("no engine")

    def get_execution_plan_count(self) -> int:
        return len(self._names)

    def get_plan_name_at_index(self, index: int) -> str:
        return self._names[index]

    def build_plan_at_index(self, index: int) -> None:
        assert not self._built, "a graph keeps every plan that it has built"
        self._built = self._names[index]
        self._library.built.append(self._built)

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return 0

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, pointers: Any, workspace: int, handle: int) -> None:
        self._library.ran.append(self._built)
        takes = self._library.milliseconds[self._built]
        if isinstance(takes, str):
            self._library.device.lost = takes
        elif isinstance(takes, Exception):
            self._library.device.fault = takes
        else:
            self._library.device.now += takes

    def serialize(self) -> bytes:
        return self._built.encode()

    def deserialize(self, handle: int, data: bytes) -> None:
        self._built = data.decode()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TimedDevice:
    monkeypatch.setenv("GRAPHC_CACHE_DIR", str(tmp_path))
    return TimedDevice()


def bound(device: TimedDevice, library: Library, monkeypatch: pytest.MonkeyPatch, call: Call | None = None) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", library)
    Dnn(device).bind(call or Call(), {name: device.zeros(16) for name in ("x", "y")})


def test_a_slow_plan_is_left_after_one_measurement(
    device: TimedDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = Library(device, {"A": ["eng1", "eng2", "eng3"], "FALLBACK": ["eng9"]}, {"eng1": 1.0, "eng2": 50.0, "eng3": 0.5})
    bound(device, library, monkeypatch)
    assert library.ran.count("eng2") == 2, "once to load it, once to measure it"
    assert library.ran.count("eng3") > 3
    assert library.built == ["eng1", "eng2", "eng3"], "nothing is built twice"
    assert set(library.asked) == {"A"}
    (kept,) = tmp_path.glob("cudnn-H200-*.json")
    assert list(json.loads(kept.read_text()).values()) == ["eng3"]


def test_a_call_whose_plans_take_long_to_build_keeps_the_best_so_far(
    device: TimedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "PATIENCE", 0.0)
    failing = CUDARuntimeError("cudaErrorInvalidValue")
    library = Library(device, {"A": ["eng1", "eng2", "eng3"]}, {"eng1": failing, "eng2": 1.0, "eng3": 0.5})
    bound(device, library, monkeypatch)
    assert library.built == ["eng1", "eng2"], "until one runs"


def test_no_more_plans_are_tried_after_some_that_were_no_faster(device: TimedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"eng{k}" for k in range(12)]
    library = Library(device, {"A": names}, {name: 0.5 if name == "eng1" else 1.0 for name in names})
    bound(device, library, monkeypatch)
    assert library.built == names[: 2 + cudnn.FRUITLESS]


def test_a_variant_of_a_call_is_tried_and_found_again(
    device: TimedDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Call, "variants", (Call(),))
    library = Library(device, {"A": ["eng1"]}, {"eng1": 1.0})
    times = iter([1.0, 1.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(Dnn, "_time", lambda self, plan, *_: 0.5 if plan.name == "1 eng1" else next(times))
    bound(device, library, monkeypatch)
    (kept,) = tmp_path.glob("cudnn-H200-*.json")
    assert list(json.loads(kept.read_text()).values()) == ["1 eng1"]
    for plan in tmp_path.glob("**/*.plan"):
        plan.unlink()
    bound(device, library, monkeypatch)
    assert library.built == ["eng1", "eng1", "eng1"], "the second time the variant's alone"


def test_fallback_plans_are_for_calls_without_others(device: TimedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(device, {"FALLBACK": ["eng9"]}, {"eng9": 1.0})
    bound(device, library, monkeypatch)
    assert library.built == ["eng9"]
    with pytest.raises(GraphcError, match="no plan"):
        bound(device, Library(device, {}, {}), monkeypatch, Call(9))


def test_a_plan_that_faults_behind_the_hosts_back_is_passed_over(
    device: TimedDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing = CUDARuntimeError("cudaErrorInvalidValue")
    library = Library(device, {"A": ["eng1", "eng2"]}, {"eng1": failing, "eng2": 1.0})
    bound(device, library, monkeypatch)
    (kept,) = tmp_path.glob("cudnn-H200-*.json")
    assert list(json.loads(kept.read_text()).values()) == ["eng2"]


def test_a_plan_that_breaks_the_gpu_is_named(device: TimedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(device, {"A": ["eng1", "eng2"]}, {"eng1": "cudaErrorIllegalAddress", "eng2": 1.0})
    with pytest.raises(DeviceError, match=r"eng1 for Call.* failed while it was measured: cudaErrorIllegalAddress"):
        bound(device, library, monkeypatch)


def test_a_stored_plan_that_does_not_run_is_built_anew(device: TimedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(device, {"A": ["eng1"]}, {"eng1": 1.0})
    bound(device, library, monkeypatch)
    library.built.clear()
    bound(device, library, monkeypatch)
    assert not library.built, "the stored plan is used"
    failing = Library(device, {"A": ["eng1"]}, {"eng1": 1.0})
    device.fault = CUDARuntimeError("cudaErrorNotReady")
    bound(device, failing, monkeypatch)
    assert failing.built == ["eng1"]


def test_a_measurement_that_the_host_was_too_late_for_is_repeated_behind_a_longer_hold(device: TimedDevice) -> None:
    timer = device.timer
    held = device.holds
    device.late = 2

    def call() -> None:
        device.now += 1.0 if device.late > 0 else 0.25

    assert timer.seconds([call, call]) == pytest.approx(0.5e-3)
    assert device.holds - held == 1 + 2 + 4


def test_calls_of_one_measurement_take_turns_on_different_memory(device: TimedDevice) -> None:
    ran: list[int] = []

    def on(k: int) -> Any:
        def call() -> None:
            ran.append(k)
            device.now += 0.2

        return call

    assert device.timer.trial("a call", [on(k) for k in range(4)]) == pytest.approx(0.2e-3)
    assert ran[2:10] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert sets_for(1 << 30) == 1, "more than the cache holds"
    assert sets_for(40 << 20) * (40 << 20) > 2 * (60 << 20), "together more than the cache of an H200"


def test_an_epilogue_that_no_algorithm_has_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    products = object.__new__(Products)
    products._deterministic = False
    seconds = {"joined": math.inf, "apart": math.inf}
    monkeypatch.setattr(products, "seconds", seconds.__getitem__, raising=False)
    assert not products.pays(["joined"], ["apart"], 0)  # type: ignore[list-item]
    seconds["joined"] = 1.0
    assert products.pays(["joined"], ["apart"], 0)  # type: ignore[list-item]
