"""Passes for several workers: reductions over ranks, buckets, schedules, sharding."""
