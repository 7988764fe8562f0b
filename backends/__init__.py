"""Backends: each compiles compute segments of a plan and runs them."""
