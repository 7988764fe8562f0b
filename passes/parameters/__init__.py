"""Passes' knowledge of parameters: which constants of a model train, and by which rule."""
