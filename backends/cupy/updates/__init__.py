"""Optimizer updates and the NaN check over flat arrays."""
