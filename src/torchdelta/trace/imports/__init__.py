"""Traces from others' records: event logs of an allocator, and torch's CUDA memory snapshots."""
