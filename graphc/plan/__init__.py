"""Turns the training graph into the steps of one rank, with a buffer for every value."""
