"""Ops."""

REPAIRED: tuple[type, ...] = ()
