"""Channels-last order between convolutions."""
