"""Planners of the literature, one file a planner, and what they have in common."""
