"""The forward graph becomes a training graph."""
