"""Compiles one segment for a GPU, binds it to memory, and caches it on disk."""
