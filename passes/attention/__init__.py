"""Attention: one op for softmax(scale·Q·Kᵀ + mask)·V, and kernels that never store scores."""
