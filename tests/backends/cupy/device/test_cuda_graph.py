"""Recording queued work: walked through, then captured, then replayed; on a device of which a list plays the part."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from graphc.backends.cupy.device.cuda_graph import CaptureRefusedWarning, Recording
from graphc.backends.cupy.device.cuda_memory import explain
from graphc.device import Choice, Variants
from graphc.errors import DeviceError, DeviceMemoryError

Run = Callable[[], None]


class Tape:
    """Like a stream: work runs when it is queued, unless a capture is going on, which only takes note of it."""

    def __init__(self) -> None:
        self.launched = 0
        self._noted: list[Run] | None = None

    def queue(self, work: Run) -> Run:
        def run() -> None:
            self.launched += 1
            work() if self._noted is None else self._noted.append(work)

        return run

    def capture(self, runs: Sequence[Run]) -> Run:
        self._noted = noted = []
        try:
            for run in runs:
                run()
        finally:
            self._noted = None
        return lambda: [work() for work in noted] and None


def add(target: Any, amount: float) -> Run:
    return lambda: np.add(target, amount, out=target)  # type: ignore[return-value,func-returns-value]


def test_a_recording_is_launched_captured_and_replayed_and_every_call_does_the_work_once() -> None:
    tape, total = Tape(), np.zeros(3)
    recording = Recording([tape.queue(add(total, 1.0)), tape.queue(lambda: np.multiply(total, 2.0, out=total))], tape.capture)
    launched = []
    for call in range(1, 6):
        recording()
        launched.append(tape.launched)
        np.testing.assert_array_equal(total, np.full(3, 2.0 ** (call + 1) - 2))
    assert launched == [2, 4, 4, 4, 4], "from the third call on Python launches nothing"


def test_a_refused_capture_is_reported_once_and_changes_no_result() -> None:
    tape, total = Tape(), np.zeros(2)

    def refuse(runs: Sequence[Run]) -> Run:
        tape.capture(runs)
        raise RuntimeError("cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing")

    recording = Recording([tape.queue(add(total, 1.0))], refuse)
    recording()
    with pytest.warns(CaptureRefusedWarning, match="StreamCaptureUnsupported"):
        recording()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            recording()
    assert recording.refusal is not None
    np.testing.assert_array_equal(total, [5.0, 5.0])


def test_without_capture_the_calls_are_made_one_by_one_and_nothing_is_reported() -> None:
    tape, total = Tape(), np.zeros(1)
    recording = Recording([tape.queue(add(total, 1.0))], None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            recording()
    assert total[0] == 4.0
    assert tape.launched == 4


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("cudaErrorIllegalAddress: an illegal memory access was encountered", "outside its memory"),
        ("CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure", "hardware exception"),
        ("cudaErrorECCUncorrectable: uncorrectable ECC error encountered", "another GPU"),
        ("CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered", "another GPU"),
        ("cudaErrorMisalignedAddress: misaligned address", "not aligned"),
        ("CUDA_ERROR_MISALIGNED_ADDRESS: misaligned address", "not aligned"),
        ("cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable", "the GPU is gone"),
        ("CUDA_ERROR_DEVICE_UNAVAILABLE: CUDA-capable device(s) is/are busy or unavailable", "the GPU is gone"),
        ("cudaErrorUnknown: unknown error", "Xid"),
        ("something that nobody has seen", "something that nobody has seen"),
    ],
)
def test_an_error_of_the_device_says_what_it_means_and_what_to_do(text: str, meaning: str) -> None:
    def fail() -> None:
        raise RuntimeError(text)

    with pytest.raises(DeviceError, match=meaning) as caught:
        Recording([fail], None)()
    assert "checkpoint" in str(caught.value)
    assert text in str(caught.value), "the cause itself stays readable"


def test_a_lack_of_memory_names_both_figures() -> None:
    error = DeviceMemoryError(3 << 30, 1 << 30)
    assert "3,221,225,472" in str(error)
    assert "1,073,741,824" in str(error)
    assert isinstance(explain(RuntimeError("x")), DeviceError)


def test_a_row_with_choices_is_recorded_once_for_each_combination_that_occurs() -> None:
    tape, total, turn = Tape(), np.zeros(1), [0]
    parts = [tape.queue(add(total, 1.0)), tape.queue(add(total, 10.0))]
    recorded: list[Recording] = []

    def record(runs: Sequence[Run]) -> Run:
        recorded.append(Recording(runs, tape.capture))
        return recorded[-1]

    pick = lambda: turn[0]  # noqa: E731
    row = Variants([tape.queue(add(total, 100.0)), Choice(parts, pick), Choice(parts, pick)], record)
    for turn[0] in (0, 1, 0, 1, 0, 1):
        row()
    assert total[0] == 3 * 102 + 3 * 120
    assert len(recorded) == 2
    assert tape.launched == 2 * 2 * 3, "from the third call of each on Python launches nothing"
