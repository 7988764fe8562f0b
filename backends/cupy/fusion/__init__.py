"""Grouping: assigns nodes to fused kernels."""
