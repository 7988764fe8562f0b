"""Convolutions and pools: what runs before, within and in place of them."""
