"""Decompositions of standard ops without a kernel; importing a file registers its rules."""

from graphc.backends.fusion.rules import indexing, losses, normalisation, quantisation, recurrent, signals

__all__ = ["indexing", "losses", "normalisation", "quantisation", "recurrent", "signals"]
