"""Gaps: what is allocated in a backward where no dispatch mode is on: between its nodes, and in some of them.

The engine adds gradients up out of place, a leaf's first gradient is cloned where it cannot be taken over (an expanded
one, or one that another node reads as well), and the tensor hooks of users run ops. None of that is known beforehand.
Where the allocator is counted, the growth in each gap is measured, and from then on room for it is made when the node
before it has run.

A gap is told by its place in the backward, the number of nodes, and whether a leaf still lacks its gradient: in an
accumulation over several backwards only the first one clones.

Asking an accelerator's counter is dear (device_counter.py), so there only the first few backwards are measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torchdelta.runtime.session import Session

_MAX_GAPS: Final = 4096
_NUM_MEASURED: Final = 4  # backwards of so many nodes, where asking the counter is dear


class Gaps:
    """What each gap of a backward took at most. Mutable; one for each session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._grown_bytes: dict[Any, int] = {}  # of the gaps that took anything
        self._num_nodes = 0
        self._position = 0
        self._open: Any = None  # the key of the gap that is being measured
        self._unseen_bytes: dict[Any, int] = {}  # what nodes that run unseen took beside what came back for them
        self._unseen: Any = None  # the key of the one that runs, and the live bytes before it
        self._num_backwards: dict[int, int] = {}  # by their number of nodes

    def restart(self, num_nodes: int) -> None:
        """Begin a backward."""
        self._num_nodes = num_nodes
        self._position = 0
        self._open = None
        if len(self._num_backwards) >= _MAX_GAPS:
            self._num_backwards.clear()
        self._num_backwards[num_nodes] = self._num_backwards.get(num_nodes, 0) + 1

    def begin(self, node_name: str, leaves: Any) -> None:
        """A node has run: make room for what comes before the next one, and measure that."""
        ledger = self._session.ledger
        if not ledger.is_counting or ledger.counter is None:
            return
        self._position += 1
        lacks_gradient = bool(leaves) and any(leaf.grad is None for leaf in leaves)
        key = (self._num_nodes, self._position, node_name, lacks_gradient)
        grown_bytes = self._grown_bytes.get(key)
        if grown_bytes:
            self._session.residency.room(grown_bytes, "gradients and hooks between two nodes of backward")
        if ledger.has_exact_peak or self._num_backwards.get(self._num_nodes, 0) <= _NUM_MEASURED:
            ledger.counter.mark()
            self._open = key

    def end(self) -> None:
        """The next node runs, or backward is over."""
        key, self._open = self._open, None
        counter = self._session.ledger.counter
        if key is None or counter is None or not self._session.ledger.is_counting:
            return
        grown_bytes = counter.growth_bytes()
        if grown_bytes > self._grown_bytes.get(key, 0):
            if len(self._grown_bytes) >= _MAX_GAPS:
                self._grown_bytes.clear()
            self._grown_bytes[key] = grown_bytes

    def begin_unseen(self, node_name: str, sizes_bytes: tuple[int, ...], estimated_bytes: int) -> None:
        """A node that no mode may see is about to run: make room for it, and reserve that."""
        ledger, residency = self._session.ledger, self._session.residency
        key = (node_name, sizes_bytes)
        needed_bytes = self._unseen_bytes.get(key, estimated_bytes)
        residency.room(needed_bytes, node_name)
        residency.reserved_bytes = needed_bytes
        if ledger.has_exact_peak and ledger.counter is not None:
            ledger.counter.mark()
            self._unseen = (key, ledger.live_bytes)

    def end_unseen(self, *, failed: bool = False) -> None:
        """The node has run, or has `failed`."""
        self._session.residency.reserved_bytes = 0
        unseen, self._unseen = self._unseen, None
        ledger = self._session.ledger
        if unseen is None or failed or ledger.counter is None or not ledger.is_counting:
            return
        key, before_bytes = unseen
        grown_bytes = ledger.counter.growth_bytes() - max(0, ledger.live_bytes - before_bytes)
        if grown_bytes > self._unseen_bytes.get(key, -1):
            if len(self._unseen_bytes) >= _MAX_GAPS:
                self._unseen_bytes.clear()
            self._unseen_bytes[key] = grown_bytes
