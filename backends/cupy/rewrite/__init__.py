"""Graph rewrites inside a segment."""
