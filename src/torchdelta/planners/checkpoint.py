"""`checkpoint`: block by block activation checkpointing (Chen et al. 2016), as `torch.utils.checkpoint` users apply it.

The blocks are read off the module paths: `transformer.h.11.attn` belongs to block `transformer.h.11`, the first number
in a path being a block's place in its list. Blocks that follow each other are put together into segments of k; what a
segment hands to later ops stays, and whatever else was saved inside is dropped and made again in backward. Every k is
tried, and the fastest plan that fits is taken (ours: users try k by hand). Ops outside of blocks keep what they saved.
Where no segment fits and plain does (a replay can meet a wide op with more around it), everything stays.
"""

import numpy as np
from numpy.typing import NDArray

from torchdelta.machine.model import Machine
from torchdelta.plan.model import Plan
from torchdelta.planners.outcome import finished
from torchdelta.planners.registry import Effort, register
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import Problem
from torchdelta.trace.model import Trace

__all__ = ["block_of", "plan"]


@register("checkpoint")
def plan(trace: Trace, machine: Machine, budget_bytes: int, effort: Effort = "fast") -> Plan:  # noqa: ARG001
    """Drop what segments of blocks saved, with the segment length that is fastest within the budget.

    Raises:
        InfeasibleError: No segment length fits.
    """
    problem = Problem.of(trace, machine)
    order = _blocks(trace)
    best: NDArray[np.int8] | None = None
    best_s, smallest, least_bytes = float("inf"), problem.keep_all(), None
    for length in _lengths(len(order)):
        codes = _codes(problem, {block: place // length for block, place in order.items()})
        score = problem.score(codes, budget_bytes)
        if score.is_feasible and score.time_s < best_s:
            best, best_s = codes, score.time_s
        if least_bytes is None or score.peak_bytes < least_bytes:
            smallest, least_bytes = codes, score.peak_bytes
    keep = problem.keep_all()
    if best is None and problem.score(keep, budget_bytes).is_feasible:
        best = keep
    codes = smallest if best is None else best
    return finished(problem, codes, budget_bytes, planner="checkpoint", least_bytes=least_bytes)


def block_of(module: str) -> str:
    """Return the block that a module path lies in, `""` if it lies in none.

    Example:
        >>> block_of("transformer.h.11.attn")
        'transformer.h.11'
    """
    parts = module.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ""


def _blocks(trace: Trace) -> dict[str, int]:
    """Return each block's place in the order in which forward meets them first."""
    order: dict[str, int] = {}
    for op in trace.ops:
        block = block_of(op.module)
        if op.phase == "forward" and block:
            order.setdefault(block, len(order))
    return order


def _lengths(num_blocks: int) -> list[int]:
    """Return one length for each number of segments that there can be."""
    return sorted({-(-num_blocks // segments) for segments in range(1, num_blocks + 1)})


def _codes(problem: Problem, segment_of: dict[str, int]) -> NDArray[np.int8]:
    trace = problem.trace
    segment = [segment_of.get(block_of(op.module), -1) if op.phase == "forward" else -2 for op in trace.ops]
    handed_on = {
        id_
        for op in trace.ops
        if op.phase == "forward"
        for id_ in op.reads
        if trace.buffers[id_].birth_op >= 0 and segment[trace.buffers[id_].birth_op] != segment[op.index]
    }
    codes = problem.keep_all()
    for index, gap in enumerate(problem.gaps):
        inside = segment[trace.buffers[gap.buffer_id].birth_op] >= 0
        if inside and gap.can_recompute and gap.buffer_id not in handed_on:
            codes[index] = int(Code.RECOMPUTE)
    return codes
