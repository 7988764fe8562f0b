"""oneDNN: the library, and its primitives over fixed arrays."""
