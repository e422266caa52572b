"""The default planner and its moves."""
