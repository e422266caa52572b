"""What a training step does: the trace, its file, and what can be read off it.

Nothing in here imports torch, so that a trace can be planned, simulated and pictured on any machine.
"""
