"""On a GPU: same bits, the budget by active bytes, transfers beside compute, and the peers in turns.

Bits are compared in deterministic mode with fixed algorithms. The peak is the allocator's own figure of active bytes.
Overlap is read from the profiler's device events: how much of the time in which bytes travel a kernel runs as well.
Nothing but torch is needed. `--device cpu` with `--tiny` tries the harness where there is no GPU; its figures say
nothing about one.
"""

from benchmarks.gpu.command import add_arguments, run

__all__ = ["add_arguments", "run"]
