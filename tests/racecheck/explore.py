"""Every schedule of a small step: all that the host can find when it asks whether an event was reached.

[Note: what has to be enumerated]
The checker looks at the order that streams, events and host waits prescribe, not at the order in which this run carried
the work out. So for one sequence of calls of the host, one run judges every order of execution at once: if nothing
races, all of them give the same contents. What is left to chance is what the host does, and that depends on the device
only through questions that do not block ("was this event reached?"). The explorer answers them in every possible way:
the device runs nothing but what an answer "yes" or a wait needs.

[Note: states that were seen]
Two runs that have queued, allocated and freed the same, in the same order, and whose host knows the same events, go on
alike. Of these the one in which the host learned it later has less order between what it queued before, so what races
in the other races in it too. Answers are tried with "no" first, so it is the one that is explored; at a state that was
seen, the other way is not taken again. `Explored.num_pruned` counts these; `dedupes=False` explores all of them.
"""

from __future__ import annotations

import gc
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from tests.collector import leave_out
from tests.racecheck.paths import AT_ONCE, DEVICE, SCRIPTED, Bench
from torchdelta.runtime.tiers import open_tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZE: Final = 256


@dataclass(kw_only=True)
class Explored:
    """What an exploration has seen.

    Attributes:
        num_runs: Schedules that were run.
        num_pruned: Answers that were not tried, because their state had been seen.
        num_logs: Different sequences of what the host queued, allocated and freed.
        is_complete: Whether every schedule was run; False where the limit came first.
        found: What is wrong, with the answers that lead there.
    """

    num_runs: int = 0
    num_pruned: int = 0
    num_logs: int = 0
    is_complete: bool = True
    found: list[str]


def explore(
    bench: Bench, run: Callable[[], Any], *, most_runs: int, dedupes: bool = True, first_answers: Sequence[int] = ()
) -> Explored:
    """Run a program under every answer to its questions.

    Args:
        bench: The device.
        run: The program; deterministic but for the answers. Returns what must be the same in every schedule.
        most_runs: Stop after so many.
        dedupes: Whether states that were seen are not explored again.
        first_answers: What the first questions find: a part of all schedules. A whole one is the parts for every
            combination of so many answers, which each share the states that they have seen themselves.
    """
    explored = Explored(found=[])
    seen: set[int] = set()
    logs: set[int] = set()
    expected: Any = None
    stack: list[list[int]] = [list(first_answers)]
    while stack:
        if explored.num_runs == most_runs:
            explored.is_complete = False
            return explored
        script = stack.pop()
        with bench.schedule(0) as (found, _):
            bench.extension.set_mode(SCRIPTED, 0)
            bench.extension.set_script(script)
            gc.disable()
            try:
                result = run()
            finally:
                gc.enable()
            asked = bench.extension.questions()
            logs.add(bench.extension.counts()["log"])
            bench.extension.settle()
            bench.extension.set_mode(AT_ONCE, 0)
            result = [tensor.cpu().numpy().tobytes() for tensor in result]
        if expected is None:
            expected = result
            leave_out()  # what the first run has imported: each session looks at every object that the collector knows
        elif result != expected:
            found.append("other bits than in the first schedule")
        explored.num_runs += 1
        explored.found += [f"{one} (answers {''.join(str(answer) for answer, _ in asked)})" for one in found]
        branches: list[list[int]] = []
        for index in range(len(script), len(asked)):
            _, state = asked[index]
            if dedupes and state in seen:
                explored.num_pruned += 1
                break  # whatever follows was explored from there
            seen.add(state)
            branches.append([answer for answer, _ in asked[:index]] + [1])
        stack += branches  # the latest first, so that the later "yes" is taken before the earlier
    explored.num_logs = len(logs)
    return explored


def swap_tensors(num_tensors: int, depth: int) -> Callable[[], list[torch.Tensor]]:
    """Return a step on the tier itself: tensors are made and leave, and come back in the reverse order.

    It calls the tier as the runtime does: a copy out is waited for when the next tensor needs its room, reads are
    started ahead of their use, and slots are released as soon as they were read.

    Args:
        num_tensors: How many leave.
        depth: How many copies out may be under way, and how many reads ahead of their use.
    """
    device = torch.device(DEVICE, 0)

    def run() -> list[torch.Tensor]:
        tier = open_tier("memory", device=device, host_budget_bytes=1 << 16)
        measure_nothing(tier)
        leaving: deque[Any] = deque()
        slots: list[Any] = []
        total = torch.zeros(SIZE, device=device)
        for number in range(num_tensors):
            made = torch.arange(SIZE, device=device, dtype=torch.float32).mul_(number + 1)
            slot = tier.reserve(made.untyped_storage().nbytes())
            slots.append(slot)
            leaving.append((tier.write(slot, made.untyped_storage()), made))
            del made
            if len(leaving) > depth:
                leaving.popleft()[0].wait()
        while leaving:
            leaving.popleft()[0].wait()
        coming: deque[Any] = deque()
        while slots or coming:
            while slots and len(coming) < depth:
                slot = slots.pop()
                target = torch.empty(SIZE, device=device)
                coming.append((tier.read(slot, target.untyped_storage()), target))
                tier.release(slot)
                del target
            transfer, target = coming.popleft()
            transfer.wait()
            total.add_(target.sin())
            del target
        tier.close()
        return [total]

    return run


def measure_nothing(tier: Any) -> None:
    """Have the tier ask no events for the sake of bandwidths and stalls: the answers change estimates only."""
    vars(tier)["_held"] = deque(maxlen=0)
    vars(tier)["_measured"] = {link: deque(maxlen=0) for link in vars(tier)["_measured"]}
