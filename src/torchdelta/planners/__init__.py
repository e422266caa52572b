"""How to choose a plan: one file a planner, and the bounds that no plan can beat."""
