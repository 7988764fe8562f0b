"""Passes that turn the forward graph into a training graph."""
