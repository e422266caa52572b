"""Listens to the runtime and writes the trace of a step."""
