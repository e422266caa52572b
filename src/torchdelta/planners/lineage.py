"""What made each buffer: the cost of making it again, and its neighbours among the buffers that may leave."""

from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchdelta.trace.model import BEFORE_STEP, Trace

__all__ = ["Lineage", "lineage"]


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """Costs and neighbours.

    Attributes:
        cost_s: Seconds to make each buffer again when the candidates around it are there: its own op, and the ops of
            what lies in between and is no candidate.
        parents: The candidates that it is then made from, by candidate.
        children: The candidates that are made from it, by candidate.
    """

    cost_s: NDArray[np.float64]
    parents: dict[int, tuple[int, ...]]
    children: dict[int, tuple[int, ...]]


def lineage(trace: Trace, candidates: Iterable[int]) -> Lineage:
    """Return costs and neighbours of these buffers, all of them born in the step."""
    chosen = set(candidates)
    producer = {id_: op.index for op in trace.ops for id_ in op.writes}
    cost_s = np.zeros(len(trace.buffers))
    parents: dict[int, tuple[int, ...]] = {}
    children: dict[int, list[int]] = {id_: [] for id_ in chosen}
    for id_ in sorted(chosen):
        if trace.buffers[id_].birth_op == BEFORE_STEP:
            parents[id_] = ()
            continue
        ops, above, stack = {producer[id_]}, set[int](), [producer[id_]]
        while stack:
            for read in trace.ops[stack.pop()].reads:
                if read in chosen:
                    above.add(read)
                # What outlives the step is there in any case.
                elif read in producer and producer[read] not in ops and trace.buffers[read].death_op < len(trace.ops):
                    ops.add(producer[read])
                    stack.append(producer[read])
        cost_s[id_] = sum(trace.ops[op].time_s for op in sorted(ops))
        parents[id_] = tuple(sorted(above - {id_}))
        for parent in parents[id_]:
            children[parent].append(id_)
    return Lineage(
        cost_s=cost_s, parents=parents, children={id_: tuple(below) for id_, below in sorted(children.items())}
    )
