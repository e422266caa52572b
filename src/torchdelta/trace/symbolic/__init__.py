"""Traces without a machine: one training step on fake tensors, and its price at any other batch size."""

from torchdelta.trace.scale import scale
from torchdelta.trace.symbolic.step import OPTIMIZERS, OptimizerName, TracedStep, trace_step, traced_step

__all__ = ["OPTIMIZERS", "OptimizerName", "TracedStep", "scale", "trace_step", "traced_step"]
