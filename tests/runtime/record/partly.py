"""Steps of a stack of layers that are recorded in part, and what they compute beside plain ones."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import msgspec
import torch

from tests.following import drawn_plan, follow_anyway, planned_here
from tests.runtime.parts import running_session
from tests.same_bits.judge import bits_of, seed_everything
from torchdelta import Config, MemoryBudget
from torchdelta.runtime.current import current_session
from torchdelta.runtime.policies.base import Action

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torchdelta.machine.model import Machine
    from torchdelta.plan.model import Plan
    from torchdelta.runtime.session import Session
    from torchdelta.trace.model import Trace

    Step = Callable[["Stack", int], torch.Tensor]

ROWS, WIDTH, NUM_LAYERS = 512, 32, 5
_LARGE_BYTES = 2 * 4 * ROWS * WIDTH  # no program here lets a buffer of this size leave
MARGIN = 1.02  # of the budget above the plain peak: with much more, recording would pause as a whole
CHANGES_AT = 12  # the step at which a step does something else: earlier ones are recorded in part
_NUM_KEPT = 4
_NUM_STEPS = 16


class Stack(torch.nn.Module):
    """Layers of the same width."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(NUM_LAYERS))

    def block(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Run one layer."""
        return x + torch.nn.functional.gelu(self.norms[index](self.layers[index](x)))


def num_native_steps() -> int:
    """Return how many steps of the running session were carried out on the native tape."""
    lane = running_session().partial.lane
    return lane.num_steps if lane is not None else 0


def drop_all() -> None:
    """Drop what can be recomputed, if a scope is open."""
    if (session := current_session()) is not None:
        room = cast("Session", session).room
        for buffer in list(room.ledger.held.values()):
            if buffer.op is not None and room.is_evictable(buffer):
                room.evict(buffer, Action.RECOMPUTE)


def _recompute_all_small(trace: Trace, _machine: Machine, _budget_bytes: int, *, least_bytes: int = 1) -> Plan:
    """Return a program that drops most saved buffers that are not large, but none of the first ones.

    The first one stays in Python, with all that replays connect with it: what is kept behind it parts these.
    """
    plan = drawn_plan(trace, 2)
    sizes_bytes = {buffer.id: buffer.size_bytes for buffer in trace.buffers}
    small = [a for a in plan.absences if least_bytes <= sizes_bytes[a.buffer_id] < _LARGE_BYTES]
    small = sorted(small, key=lambda absence: absence.last_use_op)[_NUM_KEPT:]
    return msgspec.structs.replace(
        plan, absences=tuple(msgspec.structs.replace(absence, action="recompute") for absence in small)
    )


@contextlib.contextmanager
def following(budget: int, *, least_bytes: int = 1) -> Generator[MemoryBudget]:
    """Return a scope whose steps follow a program that drops most small buffers of at least so many bytes."""
    with (
        planned_here(functools.partial(_recompute_all_small, least_bytes=least_bytes), least_bytes=1),
        mock.patch("torchdelta.runtime.follow.predictions._MAX_CORRECTIONS", 0),  # steps take longer on a busy machine
        MemoryBudget(budget, Config(planner="torchdelta", tier="memory")) as memory_budget,
    ):
        follow_anyway(running_session())
        yield memory_budget


def train(step: Step, num_steps: int = _NUM_STEPS) -> tuple[list[Any], int]:
    """Train with a step. Return the bits of all losses and of the final state, and how many steps were partial."""
    stack, num_partial = Stack(), 0
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.01, momentum=0.9)
    seen: list[Any] = []
    for index in range(num_steps):
        loss = step(stack, index)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(bits_of(loss))
        if index == CHANGES_AT - 1 and (session := current_session()) is not None:
            num_partial = cast("Session", session).partial.num_steps
    seen.append(bits_of(stack.state_dict()))
    seen.append(bits_of(torch.get_rng_state()))
    return seen, num_partial


def run(make_step: Callable[[], Step], budget: int | None) -> tuple[list[Any], int]:
    """Train with a new step, in a budget if there is one. Return what `train` returns."""
    seed_everything()
    with following(budget) if budget is not None else contextlib.nullcontext():
        return train(make_step())


def differing_steps(make_step: Callable[[], Step]) -> list[int]:
    """Return the steps whose losses are not plain's; the last two are those of the final state and the generator's."""
    plain, _ = run(make_step, None)
    with MemoryBudget("1TiB", Config(tier="memory")) as unlimited:
        train(make_step(), 2)
    seen, num_partial = run(make_step, int(unlimited.summary().peak_bytes * MARGIN))
    assert num_partial, "the test says nothing: no step was recorded in part"
    return [index for index in range(len(plain)) if plain[index] != seen[index]]
