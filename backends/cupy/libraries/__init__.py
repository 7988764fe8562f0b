"""Calls of cuBLASLt and cuDNN, and the choice of their algorithms."""
