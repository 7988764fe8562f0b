"""Predicts how training scales over devices, and proposes how to divide it."""
