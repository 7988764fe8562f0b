"""Passes for precision, clipping and accumulation of gradients."""
