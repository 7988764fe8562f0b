"""Passes that give quantised files float weights to train."""
