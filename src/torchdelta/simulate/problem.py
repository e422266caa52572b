"""A problem: a trace, a machine and a class of decisions, as arrays that thousands of evaluations share."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Self

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchdelta.errors import PlanError
from torchdelta.machine.model import Machine
from torchdelta.plan.model import DecisionClass, Plan
from torchdelta.simulate import arrays, kernel
from torchdelta.simulate.copies import share_beside_another
from torchdelta.simulate.execute import execute
from torchdelta.simulate.gaps import MIN_SIZE_BYTES, Gap, find_gaps
from torchdelta.simulate.model import Code, Decision, Options, Score, Simulation
from torchdelta.simulate.program import program
from torchdelta.trace.model import BEFORE_STEP, Trace, load_curve, storage_versions, versions_over_end
from torchdelta.trace.replay_reads import last_found_ops, replay_makes, replay_reads

__all__ = ["PlanningProblem"]

_NO_LIMIT = 2**62

_CODES = {
    ("swap", "host"): Code.SWAP,
    ("swap", "disk"): Code.DISK,
    ("recompute", "host"): Code.RECOMPUTE,
    ("recompute", "disk"): Code.RECOMPUTE,
}


class PlanningProblem:
    """What is to be decided about one step on one machine, and what each decision costs.

    One thread at a time: evaluations share their room.

    Attributes:
        trace: The step, priced.
        machine: The machine.
        decision_class: The class of the gaps.
        gaps: What can be decided, by `last_use_op`: a decision is an array of one `Code` a gap.
        min_size_bytes: The least size of a buffer that has gaps.
        options: How the runtime behaves.
        static: The arrays that the kernel reads.
        work: The arrays that it writes.
        plain_time_s: Seconds of the step when nothing leaves.
        plain_peak_bytes: Peak of the step when nothing leaves, workspaces included.
    """

    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        gaps: tuple[Gap, ...],
        *,
        decision_class: DecisionClass,
        min_size_bytes: int,
        options: Options,
    ) -> None:
        self.trace = trace
        self.machine = machine
        self.gaps = gaps
        self.decision_class: DecisionClass = decision_class
        self.min_size_bytes = min_size_bytes
        self.options = options
        self.static = _arrays(trace, machine, gaps)
        self.work = arrays.new_work(len(trace.ops), len(trace.buffers), len(gaps), len(self.static.read_ids))
        kernel.locate(self.static, self.work, self.keep_all(), np.zeros(3, np.int64))
        self.plain_time_s = float(np.cumsum(self.static.time_s)[-1])  # summed in the order of the clock
        self.plain_peak_bytes = int(self.static.plain.max())
        self.host_budget_bytes = _limit(options.host_budget_bytes, machine.host_memory_bytes)
        has_disk = machine.disk_write_bytes_per_s > 0
        self.disk_budget_bytes = _limit(options.disk_budget_bytes, machine.disk_bytes) if has_disk else 0

    @classmethod
    def of(
        cls,
        trace: Trace,
        machine: Machine,
        *,
        decision_class: DecisionClass = "saved",
        min_size_bytes: int = MIN_SIZE_BYTES,
        options: Options | None = None,
    ) -> Self:
        """Build the arrays of a problem.

        Args:
            trace: A valid trace whose ops carry their times on the machine.
            machine: Whose links and memories are used.
            decision_class: What may leave, and over which gaps.
            min_size_bytes: Smaller buffers stay.
            options: How the runtime behaves.

        Raises:
            PlanError: The trace has no ops.
        """
        if not trace.ops:
            raise PlanError("the trace has no ops: there is nothing to plan")
        gaps = find_gaps(trace, decision_class=decision_class, min_size_bytes=min_size_bytes)
        return cls(
            trace,
            machine,
            gaps,
            decision_class=decision_class,
            min_size_bytes=min_size_bytes,
            options=options or Options(),
        )

    def keep_all(self) -> NDArray[np.int8]:
        """Return the decision that nothing leaves."""
        return np.zeros(len(self.gaps), np.int8)

    def codes(self, decisions: Iterable[Decision]) -> NDArray[np.int8]:
        """Return the codes of decisions.

        Raises:
            PlanError: A decision names a buffer that has no such gap in this class.
        """
        place = {(gap.buffer_id, gap.last_use_op): index for index, gap in enumerate(self.gaps)}
        over_forward = {
            gap.buffer_id: index
            for index, gap in enumerate(self.gaps)
            if self.trace.ops[gap.last_use_op].phase == "forward"
            and gap.next_use_op < len(self.trace.ops)
            and self.trace.ops[gap.next_use_op].phase != "forward"
        }
        codes = self.keep_all()
        for decision in decisions:
            if decision.last_use_op is None:
                index = over_forward.get(decision.buffer_id)
            else:
                index = place.get((decision.buffer_id, decision.last_use_op))
            if index is None:
                where = "" if decision.last_use_op is None else f" after op {decision.last_use_op}"
                raise PlanError(
                    f"buffer {decision.buffer_id} cannot leave{where} in the class {self.decision_class!r}: it "
                    f"has no such gap, or is below {self.min_size_bytes} bytes"
                )
            code = _CODES[decision.action, decision.tier]
            if code == Code.RECOMPUTE and self.gaps[index].next_use_op >= len(self.trace.ops):
                raise PlanError(
                    f"buffer {decision.buffer_id} is away over the end of the step: only a swap brings it back"
                )
            codes[index] = Code.AGAIN if code == Code.RECOMPUTE and not decision.stays_when_met else code
        return codes

    def limits(self, budget_bytes: int) -> NDArray[np.int64]:
        """Return the most bytes on the device, on the host and on the disk, as the kernel takes them."""
        return np.array([budget_bytes, self.host_budget_bytes, self.disk_budget_bytes], np.int64)

    def score(self, codes: NDArray[np.int8], budget_bytes: int) -> Score:
        """Evaluate a decision: about 20 microseconds for every thousand ops."""
        work = self.work
        limits = self.limits(budget_bytes)
        prefetch, synchronous = self.options.prefetch, self.options.synchronous
        kernel.evaluate(self.static, work, codes, limits, prefetch, synchronous, kernel.NO_CUT, np.inf)
        ints = work.ints
        return Score(
            time_s=float(work.floats[arrays.TIME]),
            peak_bytes=int(ints[arrays.PEAK]),
            peak_op=int(ints[arrays.PEAK_OP]),
            excess_bytes=int(ints[arrays.EXCESS]),
            excess_sum_bytes=int(ints[arrays.EXCESS_SUM]),
            stall_s=float(work.floats[arrays.STALL]),
            recompute_s=float(work.floats[arrays.REPLAY]),
            host_excess_bytes=max(0, int(ints[arrays.HOST_PEAK]) - self.host_budget_bytes),
            disk_excess_bytes=max(0, int(ints[arrays.DISK_PEAK]) - self.disk_budget_bytes),
        )

    def program(
        self, codes: NDArray[np.int8], budget_bytes: int, *, planner: str = "by hand", effort: str = ""
    ) -> Plan:
        """Return the plan of a decision: with the moments at which the simulation lets everything happen."""
        self._evaluate(codes, budget_bytes)
        return program(self, codes, budget_bytes, planner=planner, effort=effort)

    def simulation(
        self, codes: NDArray[np.int8], budget_bytes: int, *, planner: str = "by hand", effort: str = ""
    ) -> Simulation:
        """Evaluate a decision and return everything that is to be known of it: what its plan costs when executed.

        Where the decision drops what cannot be made again the time is infinite, and the plan is not valid. A plan that
        passes the budget as it is written is never scored as one that holds it.
        """
        score = self._evaluate(codes, budget_bytes)
        plan = program(self, codes, budget_bytes, planner=planner, effort=effort)
        found = execute(self.trace, self.machine, plan)
        time_s = score.time_s if np.isinf(score.time_s) else found.time_s
        if score.is_feasible and found.score.excess_bytes:
            score = found.score
        return replace(found, score=score, time_s=time_s)

    def _evaluate(self, codes: NDArray[np.int8], budget_bytes: int) -> Score:
        """Evaluate a decision, with room for all that its replays run."""
        score = self.score(codes, budget_bytes)
        while self.work.ints[arrays.NUM_REPLAYED] > len(self.work.replay_ops):
            more = np.zeros(2 * int(self.work.ints[arrays.NUM_REPLAYED]), np.int64)
            self.work = self.work._replace(replay_ops=more)
            score = self.score(codes, budget_bytes)
        return score


def _limit(option_bytes: int | None, machine_bytes: int | None) -> int:
    if option_bytes is not None:
        return option_bytes
    return _NO_LIMIT if machine_bytes is None else machine_bytes


def _arrays(trace: Trace, machine: Machine, gaps: tuple[Gap, ...]) -> arrays.Static:
    num_ops = len(trace.ops)
    buffers = trace.buffers
    workspace = np.array([op.workspace_bytes for op in trace.ops], np.int64)
    load = np.array(load_curve(trace), np.int64)
    previous = np.full(len(buffers), -1, np.int64)
    for versions in storage_versions(trace).values():
        for old, new in pairwise(versions):
            previous[new.id] = old.id
    before = load.copy()
    for buffer in buffers:
        if buffer.birth_op > BEFORE_STEP:
            old = previous[buffer.id]
            before[buffer.birth_op] -= buffer.size_bytes - (buffers[old].size_bytes if old >= 0 else 0)
    reads = [replay_reads(trace, index) for index in range(num_ops)]
    # What no replay makes counts as found before the step: a chain that leads there is impossible.
    made_at = np.full(len(buffers), BEFORE_STEP, np.int64)
    for index in range(num_ops):
        made_at[list(replay_makes(trace, index))] = index
    writes = [op.writes for op in trace.ops]
    last_use = np.array([gap.last_use_op for gap in gaps], np.int64)
    next_use = np.array([gap.next_use_op % num_ops for gap in gaps], np.int64)
    over_end = np.array([gap.next_use_op >= num_ops for gap in gaps], np.bool_)
    firsts = versions_over_end(trace) if over_end.any() else {}
    first = [firsts[gap.buffer_id].id if over else gap.buffer_id for gap, over in zip(gaps, over_end, strict=True)]
    return arrays.Static(
        time_s=np.array([op.time_s for op in trace.ops], np.float64),
        plain=load + workspace,
        before=before,
        workspace=workspace,
        can_rerun=np.array([op.recomputable for op in trace.ops], np.bool_),
        read_ptr=_pointers(reads),
        read_ids=np.array([id_ for row in reads for id_ in row], np.int64),
        write_ptr=_pointers(writes),
        write_ids=np.array([id_ for row in writes for id_ in row], np.int64),
        size=np.array([buffer.size_bytes for buffer in buffers], np.int64),
        birth=made_at,
        last=np.array(last_found_ops(trace), np.int64),
        previous=previous,
        gap_buffer=np.array([gap.buffer_id for gap in gaps] + first, np.int64),
        gap_last=last_use,
        gap_next=next_use,
        gap_by_next=np.append(np.argsort(next_use, kind="stable"), np.flatnonzero(over_end)).astype(np.int64),
        rates=np.array(
            [
                machine.host_out_bytes_per_s,
                machine.host_in_bytes_per_s,
                machine.link_latency_s,
                machine.disk_write_bytes_per_s or 1.0,
                machine.disk_read_bytes_per_s or 1.0,
                machine.disk_latency_s,
                share_beside_another(machine),
                machine.out_compute_s_per_byte,
                machine.in_compute_s_per_byte,
                machine.copy_compute_s,
                machine.replay_compute_s,
            ],
            np.float64,
        ),
    )


def _pointers(rows: list[tuple[int, ...]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum([len(row) for row in rows], dtype=np.int64)])
