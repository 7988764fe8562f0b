"""Kernels written by hand, one family of ops a file; importing a file registers its kernels in :mod:`..nodes`."""

from graphc.backends.cupy.kernels import convolution, pooling, scan, scatter, sorting

__all__ = ["convolution", "pooling", "scan", "scatter", "sorting"]
