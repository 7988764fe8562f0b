"""Gradient rules by family of ops; each module registers its rules through :func:`graphc.gradient.gradient`."""
