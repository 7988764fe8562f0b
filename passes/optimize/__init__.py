"""Fewer nodes, better nodes."""
