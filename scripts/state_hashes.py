"""Prints the state hash after ten steps of the demo's model, for every strategy: what a change that keeps the bits leaves
equal.

    python scripts/state_hashes.py > before.txt      # then change something
    python scripts/state_hashes.py | diff before.txt -

Each line is a name and the SHA-256 of parameters and optimizer state, as ``graphc train --format json`` reports it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from graphc import demo

SAMPLES = 640
"""Ten steps of 64 samples."""

ADAM = ("--optimizer", "adam:lr=2e-3")

RUNS: dict[str, tuple[str, ...]] = {
    "demo": (*ADAM, "-n", "2"),
    "one worker": ADAM,
    "numpy": (*ADAM, "--backend", "numpy"),
    "sgd": ("--optimizer", "sgd:lr=0.05,momentum=0.9,weight_decay=1e-4,nesterov=true", "-n", "2"),
    "adamw": ("--optimizer", "adamw:lr=2e-3", "-n", "2"),
    "adagrad": ("--optimizer", "adagrad:lr=1e-2", "-n", "2"),
    "rmsprop": ("--optimizer", "rmsprop:lr=1e-3,momentum=0.9,centered=true", "-n", "2"),
    "mirrored, threads": (*ADAM, "-n", "2", "--transport", "threads"),
    "zero 1": (*ADAM, "-n", "2", "--strategy", "zero:stage=1"),
    "zero 2": (*ADAM, "-n", "2", "--strategy", "zero:stage=2"),
    "zero 3": (*ADAM, "-n", "2", "--strategy", "zero:stage=3"),
    "zero 2, offload": (*ADAM, "-n", "2", "--strategy", "zero:stage=2,offload=true"),
    "central storage": (*ADAM, "-n", "2", "--strategy", "central_storage"),
    "parameter server": (*ADAM, "-n", "2", "--strategy", "parameter_server:staleness=0"),
    "local sgd": (*ADAM, "-n", "2", "--strategy", "local_sgd:every=4"),
    "adasum": (*ADAM, "-n", "2", "--strategy", "adasum"),
    "accumulate": (*ADAM, "-n", "2", "--accumulate", "4"),
    "accumulate, zero 2": (*ADAM, "-n", "2", "--accumulate", "4", "--strategy", "zero:stage=2"),
    "sync batchnorm": (*ADAM, "-n", "2", "--sync-batchnorm"),
    "clip": (*ADAM, "-n", "2", "--clip-norm", "1.0"),
    "clip, zero 3": (*ADAM, "-n", "2", "--clip-norm", "1.0", "--strategy", "zero:stage=3"),
    "skip": (*ADAM, "-n", "2", "--nonfinite", "skip"),
    "fp16 compression": (*ADAM, "-n", "2", "--compress", "fp16"),
    "powersgd": (*ADAM, "-n", "2", "--compress", "powersgd:rank=2"),
    "topk": (*ADAM, "-n", "2", "--compress", "topk:ratio=0.05"),
    "any-world": (*ADAM, "-n", "2", "--deterministic", "any-world"),
    "bf16": (*ADAM, "-n", "2", "--precision", "bf16"),
    "fp16": (*ADAM, "-n", "2", "--precision", "fp16"),
    "bf16, zero 2": (*ADAM, "-n", "2", "--precision", "bf16", "--strategy", "zero:stage=2"),
    "recompute": (*ADAM, "-n", "2", "--recompute", "cheap"),
}


def state_hash(data: Path, options: tuple[str, ...]) -> str:
    """The hash that ``graphc train`` reports, or the last line of what it complains of."""
    command = [sys.executable, "-m", "graphc", "train", str(demo.MODEL), "--data", str(data), "--batch-size", "64"]
    command += ["--loss", "softmax_cross_entropy:logits=logits,label=label", "--format", "json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return "failed: " + (done.stderr.strip().splitlines() or ["no message"])[-1]
    return str(json.loads(done.stdout.splitlines()[-1])["state_sha256"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="runs to do; all, when none is named")
    names = parser.parse_args().names or list(RUNS)
    digits = demo.load_digits().train
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.npz"
        np.savez(data, **{name: array[:SAMPLES] for name, array in digits.items()})  # type: ignore[arg-type]
        for name in names:
            print(f"{name:22} {state_hash(data, RUNS[name])}", flush=True)


if __name__ == "__main__":
    main()
