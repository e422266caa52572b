"""Carries a program out: at each save and each unpack of a step it does what is due there.

[Note: decisions only]
Following decides when buffers leave and return. How they do, and that nothing is lost, is the business of the same
verbs that the reactive runtime uses: a buffer that the program did not bring back in time is brought back when it is
unpacked, and `Room` evicts by its policy what the program left too much (counted as `num_unplanned`). A program that
does not fit the step therefore costs time, never a wrong bit.

A step that saves something else than the traced one is not followed from there on; what has left by then comes back
when it is unpacked.
"""

from __future__ import annotations

import collections
import logging
import weakref
from typing import TYPE_CHECKING

from torchdelta._torch.modes import Quietly
from torchdelta.errors import TierError
from torchdelta.runtime.memory.costs import resident
from torchdelta.runtime.memory.retry import is_out_of_memory
from torchdelta.runtime.policies.base import Action

if TYPE_CHECKING:
    from torchdelta.runtime.follow.schedule import Due, Schedule
    from torchdelta.runtime.memory.restore import Restorer
    from torchdelta.runtime.state.buffer import Buffer, View

__all__ = ["Follower"]

_logger = logging.getLogger("torchdelta")


class Follower:
    """The position in the program that is being carried out. Mutable; one for each session.

    Args:
        restorer: Brings buffers back; knows the ledger, the room and the transfers.
    """

    def __init__(self, restorer: Restorer) -> None:
        self.restorer = restorer
        self.room = restorer.room
        self.ledger = restorer.ledger
        self.transfers = restorer.transfers
        self.program: Schedule | None = None  # what the following steps carry out
        self.num_saves = 0  # of this step so far
        self.has_held = False  # whether the program held the budget in the latest step that it carried out
        self.num_followed_steps = 0
        self.num_diverged_steps = 0
        self.was_followed = False  # the latest step, to its end
        self.reasons: collections.Counter[str] = collections.Counter()  # why steps diverged, without what differs
        self.latest_reason = ""
        self._measured: tuple[int, int] | None = None  # the graph of the latest watched backward, and its growth
        self._running: Schedule | None = None  # what this step carries out
        self._due: dict[int, Due] = {}
        self._live: dict[int, weakref.ref[Buffer]] = {}
        self._num_swaps = 0

    @property
    def is_complete(self) -> bool:
        """Whether this step has saved all that the traced one saved, and nothing else."""
        return self._running is not None and self.num_saves == len(self._running.signatures)

    def may_run_unwatched(self, signature: int, start_bytes: int) -> bool:
        """Return whether a backward is known to fit: this program held the budget when the same graph ran watched.

        Args:
            signature: Of the graph (`record/headroom.py`).
            start_bytes: The bytes in use before it.
        """
        budget_bytes = self.room.budget_bytes
        return (
            self.has_held
            and self._measured is not None
            and self._measured[0] == signature
            and budget_bytes is not None
            and start_bytes + self._measured[1] <= budget_bytes
        )

    def measured(self, signature: int, growth_bytes: int) -> None:
        """Record by how much the peak of a watched backward was above its start."""
        self._measured = signature, growth_bytes

    @property
    def is_following(self) -> bool:
        """Whether the running step is carried out by a program."""
        return self._running is not None

    def on_save(self, buffer: Buffer, view: View) -> int:
        """Number a save, and let leave what leaves there. Return the number."""
        save = self.num_saves
        self.num_saves += 1
        if save == 0 and self.program is not None and not self.ledger.surveys:
            self._begin(self.program)
        schedule = self._running
        if schedule is None:
            return save
        signatures = schedule.signatures
        if save >= len(signatures) or signatures[save] != (view.shape, view.dtype, buffer.origin):
            self.leave(f"a saved tensor differs from the traced step: save {save}")
            return save
        if schedule.buffer_ids[save] >= 0:
            self._live[schedule.buffer_ids[save]] = weakref.ref(buffer)
        for buffer_id, action in schedule.evictions.get(save, ()):
            leaving = self._find(buffer_id)
            if leaving is not None:
                self._num_swaps += action is Action.SWAP
                self.room.evict(leaving, action, lazily=True)
        return save

    def before_unpack(self, save: int) -> None:
        """Do what is due before a saved tensor is returned."""
        due = self._due.pop(save, None)
        if due is None:
            return
        transfers = self.transfers
        while transfers.leaving and self._num_swaps - len(transfers.leaving) < due.num_released:
            transfers.finish_first()
        for buffer_id in due.fetches:
            self._fetch(buffer_id)
        for group in due.replays:
            self._replay(group)

    def on_step_end(self) -> None:
        """Count the step, and begin the next one at its first save."""
        self.was_followed = False
        if self._running is not None:
            if self.num_saves == len(self._running.signatures):
                self.num_followed_steps += 1
                self.was_followed = True
            else:
                self.leave(f"fewer tensors are saved than in the traced step: {self.num_saves}")
        self._stop()
        self.num_saves = 0

    def leave(self, why: str) -> None:
        """Stop following for the rest of this step."""
        if self._running is not None:
            self.num_diverged_steps += 1
            self.latest_reason = why
            self.reasons[why.partition(":")[0]] += 1
            _logger.debug("the step is not followed any more: %s", why)
        self._stop()

    def _begin(self, schedule: Schedule) -> None:
        self._running = schedule
        self._due = dict(schedule.due)
        self._live.clear()
        self._num_swaps = 0
        self.room.is_followed = True

    def _stop(self) -> None:
        self._running = None
        self._due = {}
        self._live.clear()
        self.room.is_followed = False

    def _find(self, buffer_id: int) -> Buffer | None:
        """Return the live buffer that a buffer of the trace stands for, in its latest content."""
        reference = self._live.get(buffer_id)
        buffer = reference() if reference is not None else None
        while buffer is not None and buffer.successor is not None:
            buffer = buffer.successor
        return buffer

    def _fetch(self, buffer_id: int) -> None:
        buffer = self._find(buffer_id)
        if buffer is None or not buffer.num_saved or buffer.copy is None:
            return
        if buffer.strong is not None or buffer.fetching is not None or resident(buffer) is not None:
            return
        self.room.usage.ask_counter()
        if not self.room.has(buffer.size_bytes):
            return  # `bring` makes room when it is unpacked
        restorer = self.restorer
        with restorer.device.exclusive():
            try:
                with Quietly():
                    storage = restorer.new_storage(buffer.size_bytes)
                self.transfers.start_fetch(buffer, buffer.copy, storage)
            except (RuntimeError, TierError) as error:
                if not isinstance(error, TierError) and not is_out_of_memory(error):
                    raise

    def _replay(self, buffer_ids: tuple[int, ...]) -> None:
        found = [self._find(buffer_id) for buffer_id in buffer_ids]
        missing = [
            buffer
            for buffer in found
            if buffer is not None
            and buffer.num_saved
            and buffer.op is not None
            and buffer.copy is None
            and buffer.fetching is None
            and resident(buffer) is None
        ]
        if missing and not self.ledger.surveys:
            with self.restorer.device.exclusive(), Quietly():
                self.restorer.replayer.recompute_group(missing)
