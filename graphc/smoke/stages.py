"""The stages of the smoke test, the cheapest first."""

from __future__ import annotations

from graphc.smoke.runner import Stage

HOST, GPU = "graphc.smoke.machine", ("driver",)
CUPY = "graphc.backends.cupy.smoke.calls"

STAGES = (
    Stage("imports", HOST, "imports", 120, remedy="docs/several-machines.md lists the packages"),
    Stage("driver", HOST, "driver", 60, remedy="'graphc doctor' says what is missing"),
    Stage("kernel", CUPY, "kernel", 60, GPU),
    Stage("products", CUPY, "products", 180, GPU),
    Stage("convolution", CUPY, "convolution", 120, GPU),
    Stage("attention", CUPY, "attention", 120, GPU),
    Stage("stored plans", CUPY, "stored_plans", 60, ("driver", "convolution", "attention")),
    Stage("nccl alone", HOST, "nccl_alone", 60, GPU),
    Stage("nccl together", HOST, "nccl_together", 120, ("driver", "nccl alone")),
    Stage("bandwidth", HOST, "bandwidth", 60, GPU),
    Stage("mlp", "graphc.smoke.training", "mlp", 120, GPU),
    Stage("gpt", "graphc.smoke.training", "gpt", 180, GPU),
)
"""All stages share one fresh cache folder, so ``stored plans`` reads what ``convolution`` and ``attention`` have stored."""
