"""Handwritten kernels, one family of ops a file; importing a file registers its kernels."""

from graphc.backends.cupy.kernels import algebra, convolution, depthwise, pooling, sampling, scan, scatter, sorting

__all__ = ["algebra", "convolution", "depthwise", "pooling", "sampling", "scan", "scatter", "sorting"]
