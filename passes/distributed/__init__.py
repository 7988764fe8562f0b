"""Reductions over ranks, buckets, schedules, sharding."""
