"""Health of a run: which rank hangs or died, and what it was doing."""
