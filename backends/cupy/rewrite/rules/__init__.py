"""Standard ops without a kernel of their own, by simpler ones; importing a file adds its rules to the records."""

from graphc.backends.cupy.rewrite.rules import indexing, normalisation, products, quantisation, recurrent, signals

__all__ = ["indexing", "normalisation", "products", "quantisation", "recurrent", "signals"]
