"""Pipelines of stages: schedules, the tasks of a stage, and the part of a graph that a rank runs."""
