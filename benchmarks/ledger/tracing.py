"""Traces the steps of the ledger, once each: a trace is kept in the user's cache directory."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec
import torch

from benchmarks.ledger.zoo import builder
from torchdelta.machine.cache import cache_directory
from torchdelta.trace.file import read_trace, write_trace
from torchdelta.trace.model import FORMAT_VERSION
from torchdelta.trace.symbolic.step import trace_step

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.ledger.figures import Step
    from torchdelta.trace.model import Trace

__all__ = ["step_trace"]


def step_trace(step: Step) -> Trace:
    """Return the trace of a step, from the cache if it was traced before by this torch and this trace format."""
    path = _path(step)
    if path.exists():
        return read_trace(path)
    trace = trace_step(builder(step), batch_size=step.batch, device="cuda", comment=f"{step.family} {step.model}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_trace(trace, path)
    return trace


def _path(step: Step) -> Path:
    key = msgspec.json.encode([step, str(torch.__version__), FORMAT_VERSION])
    return cache_directory() / "ledger" / f"{hashlib.sha256(key).hexdigest()[:20]}.trace"
