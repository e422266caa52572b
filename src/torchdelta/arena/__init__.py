"""Planned addresses for the allocations of steps that repeat."""
