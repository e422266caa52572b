"""The record of a play: what left and came back at which op, and what was run again, as a plan of format 3."""

from dataclasses import dataclass

from torchdelta.machine.model import Machine
from torchdelta.plan.model import Absence, Action, Keep, Plan, PlanHeader, Replay
from torchdelta.simulate.program import links_of
from torchdelta.trace.model import Trace

__all__ = ["Away", "PlayedProgram"]


@dataclass(kw_only=True, slots=True)
class Away:
    """An absence while it is played, with fields as in `Absence`. Mutable: the play fills in how it ends.

    Attributes:
        buffer_id: The buffer.
        action: How it left.
        leave_op: Its copy out is queued after the op before.
        return_op: None while the buffer is away.
        next_use_op: None while its copy in may be on its way.
        out_end_s: When its copy out ends.
        in_end_s: When its copy in ends.
        arrived_op: First op at which compute does not have to wait for its copy in any more; None before.
    """

    buffer_id: int
    action: Action
    last_use_op: int
    leave_op: int
    return_op: int | None = None
    next_use_op: int | None = None
    return_rank: int = 0
    out_end_s: float = 0.0
    in_end_s: float = 0.0
    arrived_op: int | None = None

    def absence(self) -> Absence:
        """Return it as it stands in a plan."""
        if self.return_op is None or self.next_use_op is None:
            raise AssertionError(f"buffer {self.buffer_id} never came back")
        return Absence(
            buffer_id=self.buffer_id,
            last_use_op=self.last_use_op,
            next_use_op=self.next_use_op,
            action=self.action,
            out_op=self.leave_op - 1 if self.action == "swap" else None,
            leave_op=self.leave_op,
            return_op=self.return_op,
            return_rank=self.return_rank,
        )


class PlayedProgram:
    """Everything that happened in a play. Mutable."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._aways: list[Away] = []
        self._replays: list[tuple[int, list[int]]] = []
        self._keeps: dict[int, dict[int, int]] = {}  # by op of the replay: until when each buffer stays
        self._kept_at: dict[int, int] = {}

    def leave(self, buffer_id: int, action: Action, last_use_op: int, leave_op: int) -> Away:
        """Note that a buffer left."""
        away = Away(buffer_id=buffer_id, action=action, last_use_op=last_use_op, leave_op=leave_op)
        self._aways.append(away)
        return away

    def replay(self, at_op: int, ops: list[int]) -> None:
        """Note that these ops ran once more before an op."""
        self._replays.append((at_op, ops))

    def keep(self, buffer_id: int, at_op: int) -> None:
        """Note that a replay made a dead buffer that stays, for the time being until the end of the step."""
        self._kept_at[buffer_id] = at_op
        self._keeps.setdefault(at_op, {})[buffer_id] = len(self._trace.ops)

    def drop_kept(self, buffer_id: int, until_op: int) -> None:
        """Note that such a buffer is gone from an op on."""
        self._keeps[self._kept_at.pop(buffer_id)][buffer_id] = until_op

    def plan(self, machine: Machine, budget_bytes: int, planner: str, *, synchronous: bool) -> Plan:
        """Return it as a plan."""
        header = PlanHeader(
            planner=planner,
            decision_class="extended",
            machine=machine.name,
            budget_bytes=budget_bytes,
            num_ops=len(self._trace.ops),
            num_buffers=len(self._trace.buffers),
            synchronous=synchronous,
            links=links_of(machine),
        )
        absences = sorted(
            (away.absence() for away in self._aways), key=lambda absence: (absence.last_use_op, absence.buffer_id)
        )
        replays = tuple(
            Replay(
                at_op=at_op,
                ops=tuple(ops),
                keeps=tuple(
                    Keep(buffer_id=id_, until_op=until) for id_, until in sorted(self._keeps.get(at_op, {}).items())
                ),
            )
            for at_op, ops in self._replays
        )
        return Plan(header=header, absences=tuple(absences), replays=replays)
