"""Kernels for the host: the text of generated kernels, compiled by LLVM at run time."""
