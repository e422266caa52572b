"""A slow and plain execution of decisions, against which bounds are tested: no plan that it carries out may beat them.

Swap-outs follow each other on their link from each last use on; swap-ins start when their buffer is used; replays run
right before the use, and what they meet on their way stays. Nothing is prefetched, so it is no faster than the best.
"""

import math

from torchdelta.bounds.saved_class import saved_candidates
from torchdelta.trace.model import BEFORE_STEP


def time_by_hand(trace, machine, actions, budget_bytes):
    """Return the step's seconds under `{buffer id: "swap" or "recompute"}`, infinite if the budget does not hold."""
    return _Step(trace, machine, actions, budget_bytes).run()


class _Step:
    def __init__(self, trace, machine, actions, budget_bytes):
        self.trace, self.machine, self.actions, self.budget_bytes = trace, machine, actions, budget_bytes
        self.gaps = {c.buffer_id: (c.last_use_op, c.next_use_op) for c in saved_candidates(trace)}
        self.producer = {id_: op for op in trace.ops for id_ in op.writes}
        self.resident = {b.id for b in trace.buffers if b.birth_op == BEFORE_STEP}
        self.pending = []  # (end_s, buffer id) of copies out, in order
        self.now_s = self.out_free_s = self.in_free_s = 0.0
        self.fits = True

    def size_bytes(self, ids):
        return sum(self.trace.buffers[id_].size_bytes for id_ in ids)

    def settle(self):
        while self.pending and self.pending[0][0] <= self.now_s:
            self.resident.discard(self.pending.pop(0)[1])

    def make_room(self, extra_bytes):
        self.settle()
        while self.size_bytes(self.resident) + extra_bytes > self.budget_bytes:
            if not self.pending:
                self.fits = False
                return
            self.now_s = max(self.now_s, self.pending[0][0])
            self.settle()

    def bring(self, id_, op):
        if self.actions[id_] == "swap":
            self.in_free_s = max(self.now_s, self.in_free_s, *(end for end, other in self.pending if other == id_), 0.0)
            self.now_s = self.in_free_s
            self.settle()
            self.make_room(self.size_bytes([id_]))
            self.now_s = (
                max(self.now_s, self.in_free_s) + self.trace.buffers[id_].size_bytes / self.machine.host_in_bytes_per_s
            )
            self.in_free_s = self.now_s
            self.resident.add(id_)
        else:
            self.replay(id_, op)

    def replay(self, id_, op):
        made_for_replay = []
        for read in self.producer[id_].reads:
            if read not in self.resident:
                if read in self.actions and self.trace.buffers[read].death_op > op:
                    self.bring(read, op)
                else:
                    self.replay(read, op)
                    made_for_replay.append(read)
        self.make_room(self.size_bytes(self.producer[id_].writes))
        self.now_s += self.producer[id_].time_s
        self.resident.add(id_)
        self.resident.difference_update(made_for_replay)

    def run(self):
        for op in self.trace.ops:
            for id_, (_, following) in sorted(self.gaps.items()):
                if following == op.index and id_ in self.actions and (id_ not in self.resident or self.is_leaving(id_)):
                    self.bring(id_, op.index)
            self.resident -= {b.id for b in self.trace.buffers if b.death_op == op.index}
            self.make_room(self.size_bytes(op.writes))
            self.resident |= set(op.writes)
            self.now_s += op.time_s
            for id_, action in sorted(self.actions.items()):
                if self.gaps[id_][0] == op.index:
                    if action == "recompute":
                        self.resident.discard(id_)
                    else:
                        self.out_free_s = max(self.now_s, self.out_free_s)
                        self.out_free_s += self.trace.buffers[id_].size_bytes / self.machine.host_out_bytes_per_s
                        self.pending.append((self.out_free_s, id_))
        return self.now_s if self.fits else math.inf

    def is_leaving(self, id_):
        return any(other == id_ for _, other in self.pending)
