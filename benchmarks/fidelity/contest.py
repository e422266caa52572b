"""Takes turns between plain, recorded and forced steps of one model, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

from msgspec import structs

from benchmarks import models
from benchmarks.fidelity.copies import Copies
from benchmarks.turns import Block, take_turns, timed_steps
from torchdelta import Config, MemoryBudget
from torchdelta.errors import InfeasibleError, NativeError
from torchdelta.machine.model import Machine
from torchdelta.native.counting import new_counter
from torchdelta.planners import get
from torchdelta.runtime.device.op_timer import HostTimer
from torchdelta.simulate import Decision, Options, decisions_of, simulate
from torchdelta.simulate.problem import PlanningProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchdelta.config import SavedBuffer
    from torchdelta.plan.model import Plan
    from torchdelta.trace.model import Trace

CLOCKS = ("processor", "wall")
WORK = ("swapped_out_bytes", "recomputed_bytes", "num_recomputed_ops")
FORCED = ("swap-all", "checkpoint")
CONTENDERS = ("plain", "recorded", "keep", *FORCED, "copies")
NO_LIMIT_BYTES = 1 << 50
# What the runtime does with forced decisions, on one core: nothing ahead of its use, and nothing beside the compute.
OPTIONS = Options(prefetch=False, synchronous=True)


class Contest:
    """One model, trained in turns. Times are pairs of seconds, in the order of `CLOCKS`."""

    def __init__(self, model: str, num_steps: int, batch_size: int | None = None) -> None:
        counter = new_counter()
        if isinstance(counter, NativeError):
            raise counter
        counter.start()
        self.workload = models.build(model, batch_size)
        self.optimizer = models.build_optimizer("sgd", self.workload.model)
        self.num_steps = num_steps
        self.times_s: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in CONTENDERS}
        self.op_times_s: list[tuple[list[float], list[float]]] = []
        self.copies_s: list[dict[str, tuple[float, float]]] = []
        self.work: dict[str, dict[str, int]] = {}  # of one step: `WORK`
        self.step()
        counter.take_peak_bytes()
        self.step()
        self.allocator_peak_bytes = counter.take_peak_bytes()
        self.trace = self.record(time.perf_counter)
        self.problem = PlanningProblem.of(self.trace, _machine(1.0, 1.0), min_size_bytes=1)
        self.gap_sizes_bytes = [gap.size_bytes for gap in self.problem.gaps]
        plan = self.checkpoint()
        self.decisions: dict[str, Sequence[Decision]] = {
            "swap-all": [Decision(buffer_id=gap.buffer_id, action="swap") for gap in self.problem.gaps],
            "checkpoint": decisions_of(self.trace, plan),
        }
        dropped = {absence.buffer_id for absence in plan.absences}
        asked = self.asked_about()
        self.choices: dict[str, str | Callable[[SavedBuffer], str]] = {
            "keep": "keep",
            "swap-all": "swap",
            "checkpoint": lambda saved: "recompute" if asked[saved.index] in dropped else "keep",
        }
        self.copies = Copies(self.gap_sizes_bytes)

    def step(self) -> None:
        """Run one ordinary training step."""
        self.workload.train(self.optimizer)

    def record(self, clock_s: Callable[[], float]) -> Trace:
        """Record one step that nothing leaves, its ops timed by a clock."""
        with MemoryBudget(NO_LIMIT_BYTES) as budget:
            assert budget._session is not None
            budget._session.recorder.timer = HostTimer(clock_s)
            self.step()
            return budget.trace()

    def checkpoint(self) -> Plan:
        """Return the planner's plan with the segments that peak lowest."""
        checkpoint = get("checkpoint")
        least_bytes: int | None = 0
        try:
            return checkpoint(self.trace, self.problem.machine, 0)
        except InfeasibleError as error:
            least_bytes = error.least_budget_bytes
        return checkpoint(self.trace, self.problem.machine, least_bytes or 0)

    def asked_about(self) -> list[int]:
        """Return the buffer of the trace behind each saved tensor that forced decisions are asked about, by index.

        Numbers and parameters are kept unasked. Shapes and dtypes are compared: a step that saved something else ends
        the benchmark.
        """
        seen: list[SavedBuffer] = []

        def note(saved: SavedBuffer) -> str:
            seen.append(saved)
            return "keep"

        with MemoryBudget(NO_LIMIT_BYTES, Config(decisions=note, tier="memory")):
            self.step()
        saved_tensors = [
            saved
            for saved in self.trace.saved_tensors
            if saved.shape and self.trace.buffers[saved.buffer_id].kind != "parameter"
        ]
        if [(one.shape, one.dtype) for one in saved_tensors] != [(one.shape, one.dtype) for one in seen]:
            raise RuntimeError(
                "two steps of one model saved different tensors: decisions cannot be matched to the trace"
            )
        return [saved.buffer_id for saved in saved_tensors]

    def turn(self, name: str) -> None:
        """Run one contender's block."""
        if name == "recorded":
            traces = [self.record(clock_s) for clock_s in (time.thread_time, time.perf_counter)]
            if any([op.name for op in trace.ops] != [op.name for op in self.trace.ops] for trace in traces):
                raise RuntimeError("two steps of one model ran different ops: their times cannot be compared")
            first, second = ([op.time_s for op in trace.ops] for trace in traces)
            self.op_times_s.append((first, second))
            return
        if name == "copies":
            self.copies_s.append(self.copies.run())
            return
        scope: Any = contextlib.nullcontext()
        if name != "plain":
            scope = MemoryBudget(NO_LIMIT_BYTES, Config(decisions=self.choices[name], tier="memory"))
        with scope as budget:
            self.step()  # opens the tier, and is traced
            block = timed_steps(self.step, self.num_steps)
        self.times_s[name].append(list(zip(block["cpu_times_s"], block["times_s"], strict=True)))
        if budget is not None:
            summary = budget.summary()
            self.work[name] = {key: getattr(summary, key) // (self.num_steps + 1) for key in WORK}

    def run(self, num_rounds: int) -> None:
        """Run the rounds."""

        def run_block(name: str) -> Block:
            self.turn(name)
            return {}

        take_turns(CONTENDERS, num_rounds, run_block)

    def measured_s(self, name: str, clock: int) -> float:
        """Return the median step of a contender."""
        return statistics.median(times_s[clock] for block in self.times_s[name] for times_s in block)

    def predicted(self, clock: int) -> dict[str, Any]:
        """Return what the simulator says, and what it was told."""
        op_times_s = [
            statistics.median(column) for column in zip(*(pair[clock] for pair in self.op_times_s), strict=True)
        ]
        # What a step takes beside its ops, spread over them: replays pay it again.
        per_op_s = max(0.0, (self.measured_s("keep", clock) - sum(op_times_s)) / len(op_times_s))
        ops = tuple(
            structs.replace(op, time_s=time_s + per_op_s) for op, time_s in zip(self.trace.ops, op_times_s, strict=True)
        )
        out_s, in_s = (statistics.median(copies[way][clock] for copies in self.copies_s) for way in ("out", "in"))
        total_bytes = sum(self.gap_sizes_bytes)
        machine = _machine(total_bytes / out_s, total_bytes / in_s)
        trace = structs.replace(self.trace, ops=ops)
        simulations = {
            name: simulate(trace, machine, decisions, budget_bytes=NO_LIMIT_BYTES, options=OPTIONS)
            for name, decisions in self.decisions.items()
        }
        return {
            "ops_s": sum(op_times_s),
            "per_op_s": per_op_s,
            "out_bytes_per_s": machine.host_out_bytes_per_s,
            "in_bytes_per_s": machine.host_in_bytes_per_s,
            "forced": {
                name: {
                    "measured_s": self.measured_s(name, clock),
                    "simulated_s": simulation.time_s,
                    "stall_s": simulation.stall_s,
                    "recompute_s": simulation.recompute_s,
                    "swapped_out_bytes": simulation.swapped_out_bytes,
                    "recomputed_bytes": simulation.recomputed_bytes,
                    "num_recomputed_ops": sum(len(replay.ops) for replay in simulation.plan.replays),
                }
                for name, simulation in simulations.items()
            },
        }

    def document(self) -> dict[str, Any]:
        """Return everything."""
        return {
            "allocator_peak_bytes": self.allocator_peak_bytes,
            "simulated_peak_bytes": self.problem.plain_peak_bytes,
            "num_ops": len(self.trace.ops),
            "num_saved_buffers": len(self.gap_sizes_bytes),
            **{
                clock: {
                    **self.predicted(index),
                    "plain_s": self.measured_s("plain", index),
                    "keep_s": self.measured_s("keep", index),
                }
                for index, clock in enumerate(CLOCKS)
            },
            "work": self.work,
            "times_s": {name: blocks for name, blocks in self.times_s.items() if blocks},
            "copies_s": self.copies_s,
        }


def _machine(out_bytes_per_s: float, in_bytes_per_s: float) -> Machine:
    """Return a machine with these links. Its other rates are not read: the ops carry their times."""
    return Machine(
        name="this-process",
        memory_bytes=NO_LIMIT_BYTES,
        flops_per_s={"float32": 1.0},
        memory_bytes_per_s=1.0,
        host_out_bytes_per_s=out_bytes_per_s,
        host_in_bytes_per_s=in_bytes_per_s,
    )


def run(model: str, num_rounds: int, num_steps: int = 2) -> dict[str, Any]:
    """Run one contest, as a worker: `num_steps` measured steps a block; one before them is kept apart."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # what the tier's thread copies is not hidden
    contest = Contest(model, num_steps)
    contest.run(num_rounds)
    return contest.document()
