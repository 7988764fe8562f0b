"""One segment on a GPU: compiled, bound, cached on disk."""
