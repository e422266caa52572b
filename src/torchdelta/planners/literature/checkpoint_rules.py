"""The rules by which people checkpoint, each as the decisions that it makes on a step.

A *block* is read off the module paths: `transformer.h.11.attn` belongs to block `transformer.h.11`, the first number in
a path being a block's place in its list. A checkpointed segment keeps what it hands to later ops, and recomputes
whatever else was saved inside. Ops outside of checkpointed blocks keep what they saved.

- **Segments** of k blocks, for every k (Chen et al. 2016), and k segments as `torch.utils.checkpoint.
  checkpoint_sequential` makes them, which checkpoints all but the last one.
- **The first n blocks**, each by itself, for every n: the usual way to spend what memory is left.
- **Every k-th block**, from the k-th on (torchtitan's `selective` with a number) or from the first.
- **Selective checkpointing** of the first n blocks: as above, but the outputs of matrix products, convolutions and
  attention are kept (`torch.utils.checkpoint.create_selective_checkpoint_contexts` with such a policy).
- **A memory budget** (`torch._functorch.config.activation_memory_budget`, `partitioners.choose_saved_values_set`):
  without blocks, everything cheap is recomputed, and of the outputs of expensive ops a 0/1 knapsack keeps those that
  save the most time in a share of their bytes, for twenty shares. Sizes are quantized as torch's `dp_knapsack` does.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import Trace

__all__ = ["block_of", "decisions"]

_QUANTA = 10_000
"""Sizes are rounded to this part of the knapsack's whole capacity, as in torch's `dp_knapsack`."""

_NUM_SHARES = 20
"""So many memory budgets are tried: equal steps from none of the expensive outputs to nearly all of them."""


def decisions(problem: PlanningProblem) -> Iterator[NDArray[np.int8]]:
    """Yield one code a gap for every rule and number; some may be equal."""
    order = _blocks(problem.trace)
    for length in _lengths(len(order)):
        yield _codes(problem, {block: place // length for block, place in order.items()})
    for num_blocks in range(1, len(order)):
        yield _codes(problem, {block: place for block, place in order.items() if place < num_blocks})
    for num_segments in range(2, len(order) + 1):
        length = len(order) // num_segments
        num_blocks = length * (num_segments - 1)
        yield _codes(problem, {block: place // length for block, place in order.items() if place < num_blocks})
    for period in range(2, len(order)):
        for start in (period - 1, 0):
            yield _codes(problem, {block: place for block, place in order.items() if place % period == start})
    products = {id_ for op in problem.trace.ops if op.flops for id_ in op.writes}
    for num_blocks in range(1, len(order) + 1):
        first = {block: place for block, place in order.items() if place < num_blocks}
        yield _codes(problem, first, kept=products)
    yield from _knapsacks(problem, products)


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


def _codes(problem: PlanningProblem, segment_of: dict[str, int], kept: set[int] | None = None) -> NDArray[np.int8]:
    """Recompute what the segments saved, except what they hand on and what `kept` names."""
    trace = problem.trace
    segment = [segment_of.get(block_of(op.module), -1) if op.phase == "forward" else -2 for op in trace.ops]
    stays = {
        id_
        for op in trace.ops
        if op.phase == "forward"
        for id_ in op.reads
        if trace.buffers[id_].birth_op >= 0 and segment[trace.buffers[id_].birth_op] != segment[op.index]
    } | (kept or set())
    codes = problem.keep_all()
    for index, gap in enumerate(problem.gaps):
        inside = segment[trace.buffers[gap.buffer_id].birth_op] >= 0
        if inside and gap.can_recompute_at_use and gap.buffer_id not in stays:
            codes[index] = int(Code.RECOMPUTE)
    return codes


def _knapsacks(problem: PlanningProblem, products: set[int]) -> Iterator[NDArray[np.int8]]:
    """Yield the decisions of a memory budget, for shares of the bytes that expensive ops saved."""
    trace = problem.trace
    cheap = problem.keep_all()
    items: dict[int, list[int]] = {}  # the gaps of each buffer that the knapsack decides
    for index, gap in enumerate(problem.gaps):
        birth_op = trace.buffers[gap.buffer_id].birth_op
        if gap.can_recompute_at_use and birth_op >= 0 and trace.ops[birth_op].phase == "forward":
            if gap.buffer_id in products:
                items.setdefault(gap.buffer_id, []).append(index)
            else:
                cheap[index] = int(Code.RECOMPUTE)
    total_bytes = sum(trace.buffers[id_].size_bytes for id_ in items)
    if not total_bytes:
        yield cheap
        return
    weights = [round(_QUANTA * trace.buffers[id_].size_bytes / total_bytes) for id_ in items]
    times_s = [trace.ops[trace.buffers[id_].birth_op].time_s for id_ in items]
    is_better = _knapsack(weights, times_s)
    for share in range(_NUM_SHARES):
        codes = cheap.copy()
        room = _QUANTA * share // _NUM_SHARES
        for place, gaps in reversed(list(enumerate(items.values()))):
            if is_better[place, room]:
                room -= weights[place]
            else:
                codes[gaps] = int(Code.RECOMPUTE)
        yield codes


def _knapsack(weights: list[int], values: list[float]) -> NDArray[np.bool_]:
    """Return for each item and capacity whether the best choice among the items up to it takes it."""
    most = np.zeros(_QUANTA + 1)
    is_better = np.zeros((len(weights), _QUANTA + 1), np.bool_)
    for place, (weight, value) in enumerate(zip(weights, values, strict=True)):
        taken = np.full(_QUANTA + 1, -np.inf)
        taken[weight:] = most[: _QUANTA + 1 - weight] + value
        is_better[place] = taken > most
        most = np.maximum(most, taken)
    return is_better
