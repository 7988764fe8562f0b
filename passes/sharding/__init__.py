"""Tensor parallelism: which axes of which values are divided among the ranks of the tensor axis, and the graph of one rank."""
