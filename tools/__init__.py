"""Long checks of the whole library that are no measurements: `python -m tools.sweep`."""
