"""Parameters that a scope did not know before the first op that reads them.

Parameters of a memory-mapped checkpoint lie in memory that torch did not allocate. Where the scope opens before the
model is loaded, as in `torchdelta run`, each would be counted only when its first op runs, after room was made for that
op's output alone. The first one that is met shows that there may be more, so all of them are counted then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torchdelta.runtime.record.scan import scan_storages

if TYPE_CHECKING:
    from torchdelta.runtime.memory.room import Room

__all__ = ["MOST_SCANS", "LateParameters"]

MOST_SCANS: Final = 4  # each visits all objects of the process


class LateParameters:
    """Counts all other parameters when one was met late. Mutable.

    Args:
        room: Makes room for them.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._ledger = room.ledger
        self._num_scans = 0
        self.seen_bytes = 0  # `ledger.late_bytes` at the last call of `count_all`

    def count_all(self, need_bytes: int, why: str) -> None:
        """Count all parameters, and make room for the op that met one.

        Args:
            need_bytes: What the op will allocate.
            why: The op's name, for the error.

        Raises:
            BudgetError: There is no room.
        """
        self.seen_bytes = self._ledger.late_bytes
        if self._num_scans < MOST_SCANS and not self._ledger.surveys:
            self._num_scans += 1
            scan_storages(self._ledger, others="parameters")
            self._ledger.usage.ask_counter(fresh=True)  # an earlier reading counts what was found, too
        self._room.make(need_bytes, why)
