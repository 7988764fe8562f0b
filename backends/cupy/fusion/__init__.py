"""Grouping: which nodes become one kernel."""
