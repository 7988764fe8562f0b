"""Communicators, and how ranks find each other."""
