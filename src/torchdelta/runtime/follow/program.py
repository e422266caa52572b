"""Programs that steps can be carried out by, and the choice among them.

[Note: which program]
A step is known by its saves. Two running hashes of them are compared with those of every program: the *exact* one
(shape, dtype, op) and the *shape-free* one (number of dimensions, dtype, op). A step follows a program while its saves
agree exactly with those of the program. If the saves agree with programs of several kinds of steps, the most recent
kind is assumed. Of several programs for one kind of step, the one made for the bytes in use at the start is followed
(the second micro-batch of an accumulation begins with gradients, the first one without). If no program agrees exactly,
the step borrows one that agrees in everything but the shapes: the smallest one whose saved bytes are at least those of
this step, because a program that holds a longer sequence within the budget holds a shorter one, too; else the largest
one, whatever start it was made for. The step borrows it until the step itself has been traced and planned. A kind of
step whose programs were given up follows none, unless its saves so far are also those of another kind.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from torchdelta.runtime.follow.step_log import next_exact_hash, next_shape_free_hash

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdelta.machine.model import Machine
    from torchdelta.plan.request import Answer
    from torchdelta.runtime.follow.outline import Outline
    from torchdelta.runtime.follow.schedule import Schedule
    from torchdelta.runtime.follow.step_log import Signature, StepLog
    from torchdelta.trace.model import Trace

__all__ = ["Key", "Position", "Program", "ProgramCache", "Proof"]

Key: TypeAlias = tuple[int, int]
"""What a whole step is known by: the number of its saves, and their exact hash."""

_MOST_PROGRAMS: Final = 64
_MOST_PROOFS: Final = 256
_SAME_START_SHARE: Final = 0.02  # starts that differ by less than this share of the budget are the same


class Position:
    """How far a step has come: the saves so far. Mutable."""

    __slots__ = ("exact", "first", "num_saves", "saved_bytes", "shape_free", "start_bytes")

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, start_bytes: int) -> None:
        """Begin a step, with so many bytes in use."""
        self.num_saves = 0
        self.exact = 0
        self.first = 0  # the exact hash of the first save
        self.shape_free = 0
        self.saved_bytes = 0
        self.start_bytes = start_bytes

    def add(self, signature: Signature, size_bytes: int) -> None:
        """Count one more save."""
        self.num_saves += 1
        self.exact = next_exact_hash(self.exact, signature)
        if self.num_saves == 1:
            self.first = self.exact
        self.shape_free = next_shape_free_hash(self.shape_free, signature)
        self.saved_bytes += size_bytes

    def complete(self, key: Key) -> None:
        """Go to the end of a step whose later saves were compared elsewhere (outline.py)."""
        self.num_saves, self.exact = key

    @property
    def key(self) -> Key:
        """The step as it would be known if it ended here."""
        return self.num_saves, self.exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a watched backward took.

    Attributes:
        start_bytes: The bytes in use before it.
        leaving_bytes: Of those, bytes of buffers whose copies out were under way.
        peak_bytes: The most bytes in use.
    """

    start_bytes: int
    leaving_bytes: int
    peak_bytes: int

    def expected_peak_bytes(self, start_bytes: int, leaving_bytes: int) -> int:
        """Return what the same backward takes at most where so many bytes are in use before it.

        Its peak may have been at its start, with copies under way, or later, without them.
        """
        more_bytes = start_bytes - self.start_bytes
        more_staying_bytes = more_bytes - leaving_bytes + self.leaving_bytes
        return self.peak_bytes + max(0, more_bytes, more_staying_bytes)


@dataclass(eq=False, slots=True, kw_only=True, weakref_slot=True)
class Program:
    """A schedule, what it was made of, and what is known of the steps that it carried out. Mutable.

    Attributes:
        schedule: What is due when.
        key: The step that it was made for.
        start_bytes: The bytes in use at the first save of that step, those of persistent tensors that are away
            included.
        answer: What the planner predicts.
        step: The traced step, from which the program may be planned again. Kept until the program has held; for the
            newest program also until its time was compared with the prediction.
        margin_bytes: By how much less than the budget was planned.
        proofs: By (key, graph): what the backward took when it was watched.
        unseen_bytes: Memory outside of known storages when the step was traced.
        machine: What it was planned for; None if it was given.
        swapped_bytes: What it swaps in a step: bytes that are copied out and in again.
        outside_s: Seconds of the traced step outside of ops, such as reading data.
        replaces: The step's program before this one, until it is known which of them is faster.
        num_plans: How often the step was planned.
        num_misses: Steps that passed the budget or needed room beyond the program, since it was made.
        has_held: Whether the latest of these steps kept to the budget without room made beyond the program.
        num_followed: Steps that it carried out to their ends.
        num_disturbed: Of these, those that were traced, or beside which the helper planned. Their times do not count.
        num_corrections: How often the step was planned again because of the time that its steps took.
        wrong_s: The latest median of its step times, once one has led to another plan; else 0.0.
        has_taught: Whether the cost of copies was last learned from the times of its steps.
        wants_trace: Whether it is to be traced once more.
        step_times_s: Of the latest followed steps whose backward was not watched, until their median is taken.
        first_s: The first median of them; 0.0 before there is one.
        peak_bytes: The highest peak of these steps.
        is_settled: Whether recording has been reduced as far as possible since the outline was learned.
        used_at: When it last carried a step out to its end, or was made: larger is later.
        lends: Whether steps of other shapes may follow it.
        num_paused: Steps that have reacted since it was paused, so that its own steps are timed; 0 if it is not.
        had_optimizer: Whether an optimizer stepped at the end of the traced step. The program may serve others, too.
        outline: What its steps record, once that is known.
        num_others: Steps that were expected to be like the outline, and were not; or that gave none.
        num_handovers: Steps in which Python took over from the native tape.
        number: Its number in the session, from 1.
    """

    schedule: Schedule
    key: Key
    start_bytes: int
    answer: Answer
    step: tuple[Trace, StepLog] | None
    margin_bytes: int
    unseen_bytes: int = 0
    machine: Machine | None = None
    swapped_bytes: int = 0
    outside_s: float = 0.0
    replaces: Program | None = None
    num_plans: int = 1
    num_corrections: int = 0
    wrong_s: float = 0.0
    has_taught: bool = False
    proofs: dict[tuple[Key, int], Proof] = field(default_factory=dict)
    num_misses: int = 0
    has_held: bool = False
    num_followed: int = 0
    num_disturbed: int = 0
    wants_trace: bool = False
    step_times_s: list[float] = field(default_factory=list)
    first_s: float = 0.0
    peak_bytes: int = 0
    is_settled: bool = False
    used_at: int = 0
    lends: bool = True
    num_paused: int = 0
    had_optimizer: bool = True
    outline: Outline | None = None
    num_others: int = 0
    num_handovers: int = 0
    number: int = 0

    @property
    def predicted_peak_bytes(self) -> int:
        """The predicted peak of its steps, with the memory outside of known storages."""
        return self.answer.peak_bytes + self.unseen_bytes

    @property
    def predicted_time_s(self) -> float:
        """The predicted seconds of a step, the time outside of its ops included; 0.0 if the plan was given."""
        return self.answer.time_s + self.outside_s if self.answer.time_s > 0.0 else 0.0

    def take_over(self, earlier: Program) -> None:
        """Replace an earlier program of the same step."""
        self.num_corrections = earlier.num_corrections
        self.replaces = earlier if earlier.wrong_s else earlier.replaces
        earlier.replaces = earlier.step = None

    def prove(self, key: Key, graph: int, proof: Proof) -> None:
        """Record what a watched backward, named by its step and graph, has taken."""
        if len(self.proofs) >= _MOST_PROOFS:
            self.proofs.clear()
        self.proofs[key, graph] = proof

    def disprove(self, key: Key) -> None:
        """Watch the backwards of a step again."""
        for backward in [backward for backward in self.proofs if backward[0] == key]:
            del self.proofs[backward]

    def forget_times(self) -> None:
        """Compare later steps with none of the earlier ones, of which more was recorded."""
        self.step_times_s.clear()
        self.first_s = 0.0
        self.peak_bytes = 0
        self.is_settled = False

    def settle(self) -> None:
        """Forget the times of earlier steps: from now on as little as possible is recorded."""
        if not self.is_settled:
            self.forget_times()
            self.is_settled = True

    def agrees(self, position: Position, *, exactly: bool) -> bool:
        """Return whether the saves so far equal those of the traced step, or differ from them only in their shapes."""
        hashes = self.schedule.exact_hashes if exactly else self.schedule.shape_free_hashes
        return _has_prefix(hashes, position, position.exact if exactly else position.shape_free)


class ProgramCache:
    """The programs of a session, a bounded number: the least recently used ones are forgotten. Mutable.

    Args:
        budget_bytes: The budget.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._same_start_bytes = int(budget_bytes * _SAME_START_SHARE)
        self._programs: dict[tuple[Key, int], Program] = {}
        self._given_up: dict[Key, tuple[int, ...]] = {}  # the exact hashes of steps that follow no program any more
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._programs)

    def __iter__(self) -> Iterator[Program]:
        """Go through the programs, the least recently used one first."""
        return iter(sorted(self._programs.values(), key=lambda program: program.used_at))

    def add(self, program: Program) -> None:
        """Add a program, in place of those of the same step and about the same start."""
        for other in list(self._programs.values()):
            is_same = abs(other.start_bytes - program.start_bytes) <= self._same_start_bytes
            if other.key == program.key and is_same:
                self.remove(other)
        self._programs[program.key, program.start_bytes] = program
        self.use(program)
        while len(self._programs) > _MOST_PROGRAMS:
            oldest = min(self._programs.values(), key=lambda other: other.used_at)
            self.remove(oldest)

    def remove(self, program: Program) -> None:
        """Forget a program."""
        program.step = program.replaces = None  # a report may still refer to it
        self._programs.pop((program.key, program.start_bytes), None)

    def pause(self, key: Key, *, is_paused: bool) -> None:
        """Let steps of a kind react for now, or follow their programs again."""
        for program in self._programs.values():
            if program.key == key:
                program.num_paused = int(is_paused)

    def age_paused(self, most_steps: int) -> list[Key]:
        """Count a step that has reacted. Let programs be followed again that are paused for more steps than this.

        Returns:
            Their keys.
        """
        paused = [program for program in self._programs.values() if program.num_paused]
        for program in paused:
            program.num_paused = (program.num_paused + 1) % (most_steps + 1)
        return [program.key for program in paused if not program.num_paused]

    def give_up(self, key: Key) -> None:
        """Forget all programs of a kind of step, which follows none from now on."""
        for program in [program for program in self._programs.values() if program.key == key]:
            self._given_up[key] = program.schedule.exact_hashes
            self.remove(program)
        while len(self._given_up) > _MOST_PROGRAMS:
            del self._given_up[next(iter(self._given_up))]

    def holds(self, program: Program) -> bool:
        """Return whether this very program is in the cache."""
        return self._programs.get((program.key, program.start_bytes)) is program

    def use(self, program: Program) -> None:
        """Note that a program has carried a step out."""
        program.used_at = next(self._clock)

    def find(self, key: Key, start_bytes: int) -> Program | None:
        """Return the program of a whole step that serves a start with so many bytes in use, or None."""
        serving = (p for p in self._programs.values() if p.key == key and self.covers(p.start_bytes, start_bytes))
        return min(serving, key=lambda program: program.start_bytes, default=None)

    @property
    def is_full(self) -> bool:
        """Whether one more program would take the place of another one."""
        return len(self._programs) >= _MOST_PROGRAMS

    def begins(self, first: int) -> bool:
        """Return whether a step that has a program, or was given up, begins with this save (`Position.first`)."""
        known = [program.schedule.exact_hashes for program in self._programs.values()]
        return any(hashes[0] == first for hashes in (*known, *self._given_up.values()))

    def covers(self, program_start_bytes: int, start_bytes: int) -> bool:
        """Return whether a program for one start serves a step that begins with so many bytes in use, or fewer."""
        return start_bytes <= program_start_bytes + self._same_start_bytes

    def choose(self, position: Position) -> tuple[Program, bool] | None:
        """Return the program to follow from here on, and whether it agrees exactly. See [Note: which program]."""
        programs = self._programs.values()
        exact = [program for program in programs if program.agrees(position, exactly=True)]
        if exact:
            serving = [program for program in exact if self.covers(program.start_bytes, position.start_bytes)]
            if any(program.num_paused for program in serving or exact):
                return None
            key = max(serving or exact, key=lambda program: program.used_at).key
            if serving:
                return min((p for p in serving if p.key == key), key=lambda program: program.start_bytes), True
            return max((p for p in exact if p.key == key), key=lambda program: program.start_bytes), True
        if any(_has_prefix(hashes, position, position.exact) for hashes in self._given_up.values()):
            return None
        index = position.num_saves - 1
        others = [program for program in programs if program.lends and program.agrees(position, exactly=False)]
        larger = [program for program in others if program.schedule.saved_bytes[index] >= position.saved_bytes]
        if larger:
            return min(larger, key=lambda program: program.schedule.saved_bytes[index]), False
        if others:
            return max(others, key=lambda program: program.schedule.saved_bytes[index]), False
        return None


def _has_prefix(hashes: tuple[int, ...], position: Position, found: int) -> bool:
    """Return whether the saves so far, hashed to `found`, are the first ones of those with these hashes."""
    index = position.num_saves - 1
    return index < len(hashes) and hashes[index] == found
