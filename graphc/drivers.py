"""What is known of NVIDIA's drivers without asking one."""

from __future__ import annotations

LEAST_DRIVER = {12: "525", 13: "580"}
"""CUDA version → the oldest driver for Linux that runs it (NVIDIA's table of minor version compatibility)."""
