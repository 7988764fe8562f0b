"""Helpers of all kernels: compilation by Numba, arrays, lines of images, scratch memory, elementary functions."""
