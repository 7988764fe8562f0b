"""Gradient rules, one module per family of ops, registered through :func:`graphc.gradient.gradient`."""
