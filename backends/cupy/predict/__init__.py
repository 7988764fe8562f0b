"""Cost model and profile of a segment."""
