"""The networks that are measured and traced, written out where torch has none."""
