"""Starts worker processes and supervises them."""
