"""A trace as the bound by nesting sees it: whom it decides, in which order, and who is made from whom."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.proof.states import MAX_CANDIDATES, WORD, Nest
from torchdelta.bounds.saved_class import Candidate, load_without, saved_candidates
from torchdelta.machine.model import Machine
from torchdelta.trace.model import Trace, load_curve

__all__ = ["Step", "nest_step"]


class Step(NamedTuple):
    """What is searched: the step, the op at which backward begins, the links' rates, and the plain time."""

    nest: Nest
    middle: int
    rates: tuple[float, float]
    plain_s: float


def nest_step(trace: Trace, machine: Machine, budget_bytes: int, min_candidate_bytes: int) -> Step | None:
    """Return the step as the bound sees it, None if there is nothing to decide or too much."""
    times_s = np.array([op.time_s for op in trace.ops], np.float64)
    everyone = saved_candidates(trace)
    chosen = _chosen(everyone, min_candidate_bytes)
    if not 0 < len(chosen) <= MAX_CANDIDATES:
        return None
    # Who is used next by the same op is decided in the order in which the simulator brings them back, turned round.
    chosen.sort(key=lambda i: (everyone[i].next_use_op, everyone[i].last_use_op, everyone[i].buffer_id), reverse=True)
    position = {i: place for place, i in enumerate(chosen)}
    candidates = [everyone[i] for i in chosen]
    middle = next((op.index for op in trace.ops if op.phase != "forward"), len(trace.ops))
    if any(op.phase == "forward" for op in trace.ops[middle:]):
        return None
    parents = [[position[p] for p in c.parents if p in position] for c in candidates]
    children: list[list[int]] = [[] for _ in candidates]
    for child, its in enumerate(parents):
        for parent in its:
            children[parent].append(child)
    last = [c.last_use_op for c in candidates]
    released: list[list[int]] = [[] for _ in trace.ops]
    for place in sorted(range(len(candidates)), key=lambda place: candidates[place].buffer_id):
        released[last[place]].append(place)
    size_bytes = np.array([c.size_bytes for c in candidates], np.float64)
    in_s = machine.link_latency_s + size_bytes / machine.host_in_bytes_per_s
    for place, (first, third) in enumerate(zip(candidates, candidates[2:], strict=False)):
        if first.next_use_op == third.next_use_op:  # of two copies back both orders are looked at, of more only two
            in_s[place] = 0.0
    # An op of several chains runs at the innermost replay, once: the outermost one pays, all give its time to the link.
    payer: dict[int, int] = {}
    for place, candidate in enumerate(candidates):
        for op in candidate.chain_ops:
            payer.setdefault(op, place)
    nest = Nest(
        time_s=times_s,
        least_bytes=np.array(load_without(trace, load_curve(trace, with_workspace=True), everyone), np.float64),
        size_bytes=size_bytes,
        out_s=machine.link_latency_s + size_bytes / machine.host_out_bytes_per_s,
        in_s=in_s,
        replay_s=np.array(
            [sum(times_s[op] for op in c.chain_ops if payer[op] == place) for place, c in enumerate(candidates)],
            np.float64,
        ),
        help_s=np.array([sum(times_s[op] for op in c.chain_ops) for c in candidates], np.float64),
        last_op=np.array(last, np.int64),
        next_op=np.array([c.next_use_op for c in candidates], np.int64),
        can_replay=np.array([c.recomputable for c in candidates], np.int64),
        parents=_ends(parents),
        parent=_flat(parents),
        children=_ends(children),
        child=_flat(children),
        ancestors=_ancestors(parents),
        releases=_ends(released),
        release=_flat(released),
        forward_end=np.array([min([*last[place + 1 :], middle]) for place in range(len(last))], np.int64),
        budget_bytes=np.array([float(budget_bytes)]),
    )
    rates = (machine.host_out_bytes_per_s, machine.host_in_bytes_per_s)
    return Step(nest, middle, rates, float(np.sum(times_s)))


def _chosen(everyone: tuple[Candidate, ...], min_candidate_bytes: int) -> list[int]:
    """Return the candidates that are decided: large ones, and small ones by whose replay others may come back early.

    All others are away for nothing and back in time for nothing, so it makes no difference who is made from them.
    """
    children: dict[int, list[int]] = {}
    for index, candidate in enumerate(everyone):
        for parent in candidate.parents if candidate.recomputable else ():
            children.setdefault(parent, []).append(index)

    def matters(index: int) -> bool:
        its = everyone[index]
        if its.size_bytes >= min_candidate_bytes:
            return True
        return (
            its.recomputable
            and bool(its.parents)
            and (
                any(everyone[parent].next_use_op > its.next_use_op for parent in its.parents)
                or any(everyone[child].next_use_op < its.next_use_op for child in children.get(index, []))
            )
        )

    return [index for index in range(len(everyone)) if matters(index)]


def _ancestors(parents: list[list[int]]) -> NDArray[np.int64]:
    """Return for each candidate two words with a bit for everybody that it is made from, at any remove."""
    everyone: dict[int, int] = {}

    def of(each: int) -> int:
        if each not in everyone:
            everyone[each] = 0  # nobody is made from itself
            mask = 0
            for parent in parents[each]:
                mask |= (1 << parent) | of(parent)
            everyone[each] = mask
        return everyone[each]

    word = (1 << WORD) - 1
    return np.array([[of(each) & word, of(each) >> WORD] for each in range(len(parents))], np.int64)


def _ends(lists: list[list[int]]) -> np.ndarray:
    return np.cumsum([0, *(len(each) for each in lists)]).astype(np.int64)


def _flat(lists: list[list[int]]) -> np.ndarray:
    return np.array([item for each in lists for item in each] or [0], np.int64)
