"""Passes that simplify, fuse and re-layout the graph."""
