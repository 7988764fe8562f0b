"""Published throughputs of synchronous data parallelism, and what the scaling model predicts for them.

``data/scaling_rows.csv`` names the source of each row; ``data/allreduce_8xH200.csv`` is an nccl-tests AllReduce among the eight
H200s of one node (NVLink 4). Each series gives its one-worker row as the time of computation. Everything else is a constant of
the hardware (data sheets) or of the model (number of parameters), the same for all rows.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from graphc.planner.network import Curve, Link, Network
from graphc.planner.scaling import BACKWARD, overlapped, server_exposed

FOLDER = Path(__file__).parent / "data"
CURVE = Curve.read(FOLDER / "allreduce_8xH200.csv")

NVLINK_4 = 450e9
"""H200: 18 links of 25 GB/s in each direction; the rate that the curve stands for."""


def nvlink(bandwidth: float) -> Link:
    """A link of another generation: the curve with its bandwidth scaled by the data sheets' rates."""
    return Link(CURVE, bandwidth / NVLINK_4)


P100, V100, A100 = nvlink(80e9), nvlink(150e9), nvlink(300e9)
"""4 links of 20 GB/s, 6 of 25 GB/s, 12 of 25 GB/s in each direction."""

PCIE = 15.75e9 / 2
"""PCIe 3.0 x16, shared by two devices (DGX-1: a switch for two; K80: two on a board)."""

EC2 = 10e9 / 8
"""p2.8xlarge: 10 Gbit/s."""

ROCE = 25e9 / 8
"""25 Gbit/s a server."""

PARAMETERS = {
    "InceptionV3": 23.8e6, "ResNet-50": 25.6e6, "ResNet-152": 60.2e6, "AlexNet": 61.1e6, "VGG16": 138.4e6, "BERT-large": 336e6,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A published row with more than one worker.

    Attributes:
        setting: hardware, software, model and batch.
        measured, predicted: throughput, in the row's unit.
        linear: that of one worker times the number of workers.
    """

    setting: str
    workers: int
    measured: float
    predicted: float
    linear: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


def rows() -> Iterator[Row]:
    """Every row of synchronous data parallelism with a one-worker row in its series, and Horovod's with P100s."""
    with (FOLDER / "scaling_rows.csv").open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    alone: dict[tuple[str, ...], float] = {}
    for row in found:
        series = tuple(row[name] for name in ("source", "hardware", "model", "batch_per_gpu"))
        workers = int(row["gpus"])
        if workers == 1:
            alone[series] = float(row["value"])
        elif series in alone and row["unit"] in ("img/s", "sentences/s"):
            one, measured = alone[series], float(row["value"])
        elif row["source"].startswith("horovod") and not row["value"] and row["model"].replace("-", "") in PARAMETERS:
            one = next(v for k, v in alone.items() if k[1:] == ("P100 DGX-1", row["model"].replace("-", ""), "64"))
            measured = one * workers * float(row["efficiency"])
        else:
            continue
        if workers > 1:
            batch = float(row["batch_per_gpu"].split()[0]) if row["batch_per_gpu"] else _batch(row["hardware"])
            step = batch / one
            predicted = workers * batch / (step + exposed(row, workers, step))
            yield Row(f"{row['hardware']}, {row['model']}, batch {batch:g}", workers, measured, predicted, one * workers)


def _batch(hardware: str) -> float:
    """NVIDIA's PyTorch ResNet-50 README: 256 images a GPU, 128 in FP32 on V100s with 16 GB."""
    return 128 if "16GB FP32" in hardware else 256


def exposed(row: dict[str, str], workers: int, step: float) -> float:
    """Predicted seconds of communication that computation does not hide."""
    hardware, model = row["hardware"], row["model"].replace("-16", "16")
    nbytes = PARAMETERS[model] * (2 if model == "BERT-large" and "FP16" in hardware else 4)
    if "K80" in hardware:  # variables on servers beside the workers, fetched at the end of the step
        nodes = workers // 8
        local, remote = nbytes / PCIE, 2 * (nodes - 1) / nodes * nbytes / EC2
        return server_exposed(step, local + remote / 2, local + remote / 2, copies_at_end=nodes > 1)
    if "P100 DGX-1" in hardware and model not in ("AlexNet", "VGG16"):  # variables in the host's memory
        return server_exposed(step, nbytes / PCIE, nbytes / PCIE, copies_at_end=False)
    if row["network"].startswith("RoCE"):
        network = Network(4, Link(Curve.line(PCIE, 20e-6)), Link(Curve.line(ROCE / 4, 20e-6)))
    else:
        network = Network(16, P100 if "P100" in hardware else V100 if "V100" in hardware else A100)
    return overlapped(step * BACKWARD, nbytes, lambda size: network.allreduce(size, workers)).exposed
