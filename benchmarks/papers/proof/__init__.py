"""A proved lower bound for steps whose gaps nest: a dynamic program from both ends, pruned by linear programs."""
