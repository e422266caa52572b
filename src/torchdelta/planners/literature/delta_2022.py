"""`delta-2022`: the filter and the director of DELTA (Tang et al., arXiv 2203.15980, 2022), as described.

When an allocation does not fit, the *filter* picks the tensor with the largest bytes x staleness, and the *director*
its action: recompute if the copy out and back, 2 x bytes / bandwidth, takes longer than the op that made it; else swap.
Both in one unit of time (which the published code gets wrong: `delta_2022_released.py`), transfers beside compute, and
swapped tensors fetched ahead of need. The plan is the program that was played, under the budget as a hard limit.

Our reading, where the text is not public: the formula of the filter is the published code's. Its prefetch brings up to
five tensors back while there is room, but its call is commented out; ours follows each use of a swapped tensor, and
takes the last to leave first (the code's queue is first-in-first-out, and backward needs the reverse). What a replay
makes on its way and what is dead in the step is freed; in the published code it stays, which is slower at small
budgets. [Note: where a play differs from the systems] in `online.py` says the rest.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from torchdelta.machine.model import Machine
from torchdelta.planners.literature.online_policy import State
from torchdelta.planners.literature.played import PlayedPlanner
from torchdelta.planners.literature.played_step import PlayedStep
from torchdelta.planners.registry import register
from torchdelta.trace.model import Trace

__all__ = ["PLAYED", "Director", "FilterAndDirector"]

Director = Callable[[int, float], bool]
"""From bytes and the seconds of the op that made them to whether they are recomputed."""

_PREFETCH_COUNT = 5


def _policy(step: PlayedStep, machine: Machine) -> "FilterAndDirector":
    def recomputes(size_bytes: int, op_s: float) -> bool:
        out_s = machine.link_latency_s + size_bytes / machine.host_out_bytes_per_s
        return out_s + machine.link_latency_s + size_bytes / machine.host_in_bytes_per_s > op_s

    return FilterAndDirector(step.trace, recomputes, prefetch_count=_PREFETCH_COUNT)


class FilterAndDirector:
    """DELTA 2022's two steps. Mutable (it remembers who was swapped); one play long."""

    can_swap = True

    def __init__(
        self,
        trace: Trace,
        director: Director,
        *,
        prefetch_count: int = 0,
        keeps_dead: bool = False,
        swaps_again: bool = False,
    ) -> None:
        self.prefetch_count, self.keeps_dead = prefetch_count, keeps_dead
        self._director = director
        self._swaps_again = swaps_again
        self._op_s = {id_: op.time_s for op in trace.ops for id_ in op.writes}
        self._was_swapped: set[int] = set()

    def scores(self, state: State, candidates: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return minus bytes x staleness."""
        return -state.step.size_bytes[candidates] * (state.clock_s - state.last_access_s[candidates] + 1e-9)

    def recomputes(self, state: State, buffer_id: int) -> bool:
        """Ask the director."""
        if buffer_id not in self._was_swapped or not self._swaps_again:
            if self._director(int(state.step.size_bytes[buffer_id]), self._op_s[buffer_id]):
                return True
            self._was_swapped.add(buffer_id)
        return False

    def dropped(self, buffer_id: int) -> None:
        """Nothing to note."""

    def remade(self, buffer_id: int) -> None:
        """Nothing to note."""


PLAYED = PlayedPlanner(name="delta-2022", policy=_policy)
register(PLAYED.name, "extended")(PLAYED.plan)
