"""Measures what a backward allocates where no dispatch mode is on: between its nodes, and in mode-sensitive ones.

Between two nodes (a *gap*) the engine accumulates gradients out of place, clones a leaf's first gradient if it cannot
take it over (because it is expanded, or because another node reads it as well), and runs the user's tensor hooks. What
these allocate is unknown at first. Where the allocator is counted, the growth in each gap is measured, and from the
next backward on room for it is made after the node before the gap. Reading an accelerator's counter is expensive
(device/counter.py), so there only the first few backwards are measured.

The key of a gap is the number of nodes, its position, the name of the node before it, and whether a leaf of that node
lacks its gradient: in gradient accumulation over several backwards only the first one clones.

A node that runs without the mode gets room for an estimate. Its growth is measured only where the counter has exact
peaks, which is the CPU's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torchdelta.runtime.memory.room import Room

_MAX_GAPS: Final = 4096
_NUM_MEASURED: Final = 4  # backwards for each number of nodes, where reading the counter is expensive


class Gaps:
    """The largest growth measured in each gap, and in each node without the mode. Mutable; one for each session."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._usage = room.usage
        self._grown_bytes: dict[Any, int] = {}  # of the gaps that allocated anything
        self._num_nodes = 0
        self._position = 0
        self._open: Any = None  # the key of the gap that is being measured
        # Growth in nodes that run without the mode, less the growth of the known storages (saved tensors brought back).
        self._unseen_bytes: dict[Any, int] = {}
        self._unseen: Any = None  # the key of the running one, and the live bytes before it
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
        """Make room for the gap after a node, and begin to measure it."""
        if not self._usage.is_counting:
            return
        self._position += 1
        lacks_gradient = bool(leaves) and any(leaf.grad is None for leaf in leaves)
        key = (self._num_nodes, self._position, node_name, lacks_gradient)
        grown_bytes = self._grown_bytes.get(key)
        if grown_bytes:
            self._room.make(grown_bytes, "gradients and hooks between two nodes of backward")
        measures = self._usage.has_exact_peak or self._num_backwards.get(self._num_nodes, 0) <= _NUM_MEASURED
        if measures and self._usage.mark():
            self._open = key

    def end(self) -> None:
        """End the open gap: the next node runs, or backward is over."""
        key, self._open = self._open, None
        grown_bytes = self._usage.growth_bytes() if key is not None else None
        if key is not None and grown_bytes is not None and grown_bytes > self._grown_bytes.get(key, 0):
            if len(self._grown_bytes) >= _MAX_GAPS:
                self._grown_bytes.clear()
            self._grown_bytes[key] = grown_bytes

    def begin_unseen(self, node_name: str, sizes_bytes: tuple[int, ...], estimated_bytes: int) -> None:
        """Make room for a node that is about to run without the mode, and reserve it."""
        key = (node_name, sizes_bytes)
        needed_bytes = self._unseen_bytes.get(key, estimated_bytes)
        self._room.make(needed_bytes, node_name)
        self._room.reserved_bytes = needed_bytes
        if self._usage.has_exact_peak and self._usage.mark():
            self._unseen = (key, self._usage.live_bytes)

    def end_unseen(self, *, failed: bool = False) -> None:
        """End the reservation, and learn the node's growth unless it `failed`."""
        self._room.reserved_bytes = 0
        unseen, self._unseen = self._unseen, None
        grown_bytes = self._usage.growth_bytes()
        if unseen is None or failed or grown_bytes is None:
            return
        key, before_bytes = unseen
        grown_bytes -= max(0, self._usage.live_bytes - before_bytes)
        if grown_bytes > self._unseen_bytes.get(key, -1):
            if len(self._unseen_bytes) >= _MAX_GAPS:
                self._unseen_bytes.clear()
            self._unseen_bytes[key] = grown_bytes
