"""Carries a program's lane out on the native tape. See [Note: which part goes to the tape] in follow/lane.py.

A step uses the tape from its first saved tensor on, if its backward is known: such a backward runs unwatched, and the
tape acts in it where saved tensors are unpacked. If anything happens, before or in the backward, that is not in the
lane, all that the tape has recorded becomes known to Python (`hooks.adopt` calls `_adopt_dropped`), and the tape is
empty.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, cast

from torchdelta._torch.device import numeric_environment
from torchdelta._torch.modes import Quietly
from torchdelta.errors import NativeError
from torchdelta.native.gate import new_sequence
from torchdelta.native.tape import new_tape
from torchdelta.runtime.interrupts import shielded
from torchdelta.runtime.memory.replay import raise_changed
from torchdelta.runtime.memory.room import NoRoomError
from torchdelta.runtime.record.handover import take_over

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from torchdelta.native.counting import LimitedCounter
    from torchdelta.native.gate import Gate
    from torchdelta.native.saved_hooks import NativeHooks
    from torchdelta.native.tape import Tape
    from torchdelta.runtime.follow.follower import Follower
    from torchdelta.runtime.follow.program import Program

__all__ = ["NativeLane"]

_logger = logging.getLogger("torchdelta")

_MOST_HANDOVERS: Final = 5  # of the steps of one program, before it uses the tape no more
# Steps in Python after the first handover, and twice as many after each further one: so another backward of the same
# forward becomes known as well (of accumulated gradients, the first one makes them and the others do not).
_FEWEST_STEPS: Final = 4


class NativeLane:
    """The tape of a session. Mutable.

    Args:
        gate: Gives it ops.
        hooks: Give it saved tensors.
        follower: Carries out the rest of the program; knows the room.
        on_failure: Called if a replay failed: hands over, so that Python can try again.
    """

    def __init__(self, gate: Gate, hooks: NativeHooks, follower: Follower, on_failure: Callable[[], object]) -> None:
        self.is_on = False  # whether this step uses it
        self.num_steps = 0  # that used it to their ends
        self._num_waiting = 0  # steps that do not use it, although they could
        self._gate = gate
        self._hooks = hooks
        self._follower = follower
        self._room = follower.room
        self._environment: tuple[Any, ...] = ()
        self._program: Program | None = None
        self._tape: Tape | None = None
        self._capsule: object = None
        counter = cast("LimitedCounter", self._room.usage.counter)
        tape = new_tape(self._room.device.device, counter, self._make_room, raise_changed, on_failure)
        if isinstance(tape, NativeError):
            _logger.debug("the native tape is not used, and Python records what is replayed: %s", tape)
        else:
            self._tape, self._capsule = tape, tape.capsule()

    def begin(self, program: Program, most_bytes: int) -> None:
        """Use the tape from here on to the end of the step, if the program has a lane.

        Args:
            program: Has an outline.
            most_bytes: The count of the allocator at which Python is asked for room.
        """
        outline, tape = program.outline, self._tape
        lane = outline.lane if outline is not None else None
        if outline is None or lane is None or tape is None or program.num_handovers >= _MOST_HANDOVERS:
            return
        if self._num_waiting:
            self._num_waiting -= 1
            return
        self._environment = numeric_environment()
        if self._environment != outline.settings:
            return  # which ops may be replayed was learned under other settings
        self._program = program
        tape.begin(lane.drops, lane.replays, most_bytes)
        self._gate.use_tape(tape, self._capsule)
        self._hooks.use_tape(tape, self._capsule, self._adopt_dropped, self._act)
        self._follower.use_tape(tape, lane.rest)
        self.is_on = True

    def before_write(self, *tensors: torch.Tensor) -> None:
        """Keep what the tape knows of the storages of tensors that are about to be written."""
        if self.is_on and self._tape is not None:
            with Quietly():
                for tensor in tensors:
                    self._tape.before_write(tensor)

    def end_forward(self) -> bool:
        """Record no op from now on. Return whether replays give the same bits as under the settings of the forward."""
        if self._tape is not None:
            self._tape.end_forward()
        return numeric_environment() == self._environment

    def on_adopted(self) -> None:
        """Forget a step whose records Python has taken over."""
        if self.is_on and self._program is not None:
            self._num_waiting = _FEWEST_STEPS << self._program.num_handovers
            self._program.num_handovers += 1
            _logger.debug("what the native tape has recorded was handed over to Python")
        self.drop()

    def end(self) -> None:
        """Forget a step that has used the tape to its end."""
        self.num_steps += self.is_on
        self.drop()

    def end_comparison(self) -> None:
        """Expect no op and no saved tensor of the outline any more: the next ones are others."""
        self._gate.follow(new_sequence([], [], []), 0)
        self._hooks.end_comparison()

    def abandon(self) -> None:
        """Forget a step that had no backward, and of which nothing is left."""
        self._gate.forget()
        self.drop()

    def drop(self) -> None:
        """Forget what the tape has recorded in this step, and count what was done."""
        tape, program = self._tape, self._program
        if not self.is_on or tape is None or program is None:
            return
        self.is_on = False
        self._program = None
        tape.clear()
        self._gate.use_tape(None, None)
        num_ops, replayed_bytes, num_saved, num_dropped, dropped_bytes, time_s = tape.take_counts()
        counters = self._room.counters
        counters.num_recomputed_ops += num_ops
        counters.recomputed_bytes += replayed_bytes
        counters.num_saved += num_saved
        counters.num_evictions += num_dropped
        counters.dropped_bytes += dropped_bytes
        counters.left_bytes += dropped_bytes
        counters.recompute_s += time_s

    # -- what C++ calls

    @shielded
    def _act(self, number: int, is_unpack: bool) -> None:
        with self._room.device.locked():
            self._follower.act(number, is_unpack)

    @shielded
    def _adopt_dropped(self, saves: list[object]) -> list[object]:
        assert self._tape is not None
        return take_over(self._tape, saves, self._room, self._environment)

    @shielded
    def _make_room(self, size_bytes: int, is_optional: bool) -> bool:
        room = self._room
        with room.device.locked():
            room.is_optional = is_optional
            room.usage.ask_counter(fresh=True)
            try:
                room.make(size_bytes, "a replay")
            except NoRoomError:
                return False
            finally:
                room.is_optional = False
        return True
