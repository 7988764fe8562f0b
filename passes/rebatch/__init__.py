"""Passes that give a model another batch size."""
