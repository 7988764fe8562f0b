"""Precision, clipping and accumulation of gradients."""
