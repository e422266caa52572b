"""`delta-2022-released`: what the published code of DELTA 2022 does, its defects included.

Source: branch `delta` of TonyTangYu/pytorch (head of 2023-07), `CheckpointTensorImpl.cpp`. Kept apart from
`delta-2022`, since the two differ by an order of magnitude. As found there:

- The director compares microseconds of copying (at 12,025.9 bytes a microsecond, whatever the machine) with nanoseconds
  of computing. So it recomputes only what is made in less than 1/500 of the time of one copy: in the published log,
  365 of 365 decisions were swaps.
- A tensor that was swapped once is judged by a field that is never written. Our reading of it: zero, so it is swapped
  again.
- Memory is made free after each op and not before it, so the budget is passed by what an op allocates. A plan has to
  hold its budget, so this planner gives the code the largest limit at which the step's true peak is within the budget.
- Copies are synchronous and nothing is prefetched (the calls are commented out): so its plan says.
- Op times are taken by the host around an asynchronous launch. That is not modelled: here they are the trace's.
"""

from torchdelta.planners.literature.delta_2022 import FilterAndDirector
from torchdelta.planners.literature.played import PlayedPlanner
from torchdelta.planners.registry import register

__all__ = ["PLAYED", "recomputes"]

_BYTES_PER_US = 0.35 * 32 * 2**30 / 1e6


def recomputes(size_bytes: int, op_s: float) -> bool:
    """Compare as the published code does: microseconds of two copies against nanoseconds of the op."""
    swap_us = size_bytes / _BYTES_PER_US
    op_ns = op_s * 1e9
    return 2 * swap_us > op_ns


PLAYED = PlayedPlanner(
    name="delta-2022-released",
    policy=lambda step, _: FilterAndDirector(step.trace, recomputes, keeps_dead=True, swaps_again=True),
    soft=True,
    synchronous=True,
)
register(PLAYED.name, "extended")(PLAYED.plan)
