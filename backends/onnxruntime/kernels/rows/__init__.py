"""Kernels that sweep over rows: norms, activations, losses, running sums, orders, rows at indices, random numbers."""
