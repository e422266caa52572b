"""`dtr`: Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021), played on a trace.

When an allocation does not fit, the tensor with the least

    h(t) = (c(t) + sum of the costs of t's evicted neighbourhood) / (bytes(t) * staleness(t))

is dropped, and is made again by its whole missing chain when it is used next. The neighbourhood is the paper's
approximation: classes of evicted tensors in a union-find structure, whose costs are added up where an evicted tensor
joins them and whose splits are never undone when one comes back ("spurious links").

Every tensor of the step takes part, as in the paper: what the program lets go counts as evicted from then on, and what
a replay makes on its way stays until it is the one to go, dead in the step or not (at small budgets that costs much
time). Being read by a replay is an access, as in the prototype (the paper's simulator counts the step's own alone). Our
reading: without the sampling and the size filter of the prototype, which only save it search time; the budget is a hard
limit; the plan is the program that was played. [Note: where a play differs from the systems] in `online.py` says the
rest.
"""

import numpy as np
from numpy.typing import NDArray

from torchdelta.planners.literature.lineage import lineage
from torchdelta.planners.literature.online_policy import State
from torchdelta.planners.literature.played import PlayedPlanner
from torchdelta.planners.literature.played_step import PlayedStep
from torchdelta.planners.registry import register

__all__ = ["PLAYED", "Dtr"]

_NONE = -1  # the class of what is not evicted


class Dtr:
    """DTR's score with the union-find approximation of the neighbourhood. Mutable; one play long."""

    can_swap = False
    prefetch_count = 0
    keeps_dead = True

    def __init__(self, step: PlayedStep) -> None:
        ids = np.flatnonzero(step.evictable).tolist()
        relations = lineage(step.trace, ids)
        self._cost_s = relations.cost_s
        num_buffers = len(step.size_bytes)
        around = [(*relations.parents[id_], *relations.children[id_]) for id_ in ids]
        # By buffer, its neighbours; the last place, whose class is always none, fills the rows up.
        self._around = np.full((num_buffers, max(map(len, around), default=0) + 1), num_buffers, dtype=np.int64)
        for id_, others in zip(ids, around, strict=True):
            self._around[id_, : len(others)] = others
        self._class_of = np.full(num_buffers + 1, _NONE, dtype=np.int64)
        self._class_cost_s = np.zeros(num_buffers)
        self._num_classes = 0

    def scores(self, state: State, candidates: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return (own cost + each neighbouring class once) / (bytes x staleness)."""
        classes = np.sort(self._class_of[self._around[candidates]], axis=1)
        counts = classes != _NONE
        counts[:, 1:] &= classes[:, 1:] != classes[:, :-1]
        cost_s = self._cost_s[candidates] + np.where(counts, self._class_cost_s[classes], 0.0).sum(axis=1)
        staleness_s = state.clock_s - state.last_access_s[candidates] + 1e-9
        return cost_s / (state.step.size_bytes[candidates] * staleness_s)

    def recomputes(self, state: State, buffer_id: int) -> bool:  # noqa: ARG002
        """Drop, always."""
        return True

    def dropped(self, buffer_id: int) -> None:
        """Put the buffer into a class of its own and join it with those around it."""
        number = self._num_classes
        self._num_classes += 1
        if number >= len(self._class_cost_s):
            self._class_cost_s = np.append(self._class_cost_s, np.zeros(number + 1))
        joined = np.unique(self._class_of[self._around[buffer_id]])
        joined = joined[joined != _NONE]
        self._class_of[np.isin(self._class_of, joined)] = number
        self._class_of[buffer_id] = number
        self._class_cost_s[number] = self._cost_s[buffer_id] + self._class_cost_s[joined].sum()

    def remade(self, buffer_id: int) -> None:
        """Take its cost out of its class, which stays whole."""
        number = self._class_of[buffer_id]
        if number != _NONE:
            self._class_cost_s[number] -= self._cost_s[buffer_id]
            self._class_of[buffer_id] = _NONE


PLAYED = PlayedPlanner(name="dtr", policy=lambda step, _: Dtr(step))
register(PLAYED.name, "extended")(PLAYED.plan)
