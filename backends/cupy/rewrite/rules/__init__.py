"""Decompositions of standard ops without a kernel; importing a file registers its rules."""

from graphc.backends.cupy.rewrite.rules import indexing, normalisation, products, quantisation, recurrent, signals

__all__ = ["indexing", "normalisation", "products", "quantisation", "recurrent", "signals"]
