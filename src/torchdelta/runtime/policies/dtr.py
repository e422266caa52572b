"""DTR (Kirisame et al., ICLR 2021).

Recompute only, by (own cost + cost of the evicted neighbourhood) / (bytes x staleness).

The neighbourhood of a buffer is the set of dropped buffers that it needs, and those that need it. As in DTR's h_eq, a
connected group of dropped buffers counts as a whole. The groups are rebuilt at each ranking, so that a recomputed
buffer splits its group (the published union-find cannot).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta.runtime.policies.base import Action, Costs, recompute_first
from torchdelta.runtime.state.tape import sources

if TYPE_CHECKING:
    from torchdelta.runtime.state.buffer import Buffer


class Dtr:
    """DTR's heuristic with evicted-neighbourhood cost."""

    name = "dtr"
    may_swap = False

    def rank(self, candidates: list[Buffer], costs: Costs) -> list[tuple[Buffer, Action]]:
        """Return the candidates by rising score; those that cannot be recomputed come last and are swapped."""
        groups = _Groups(costs.dropped())
        clock = costs.clock
        return recompute_first(
            candidates,
            lambda b: (costs.own_time_s(b) + groups.neighbourhood_s(b)) / (b.size_bytes * (clock - b.last_used + 1)),
        )


class _Groups:
    """Connected groups of dropped buffers, with their summed op times."""

    def __init__(self, dropped: list[Buffer]) -> None:
        self._parent = {id(buffer): id(buffer) for buffer in dropped}
        self._users: dict[int, set[int]] = {}  # resident buffer -> dropped buffers made from it
        for buffer in dropped:
            if buffer.op is None:
                continue
            for source in sources(buffer.op):
                if id(source) in self._parent:
                    self._parent[self._find(id(source))] = self._find(id(buffer))
                else:
                    self._users.setdefault(id(source), set()).add(id(buffer))
        self._time_s: dict[int, float] = {}
        for buffer in dropped:
            root = self._find(id(buffer))
            self._time_s[root] = self._time_s.get(root, 0.0) + (buffer.op.time_s if buffer.op is not None else 0.0)

    def _find(self, key: int) -> int:
        parent = self._parent
        while parent[key] != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    def neighbourhood_s(self, buffer: Buffer) -> float:
        """Return the summed op times of the groups next to a resident buffer."""
        near = {self._find(user) for user in self._users.get(id(buffer), ())}
        if buffer.op is not None:
            near.update(self._find(id(source)) for source in sources(buffer.op) if id(source) in self._parent)
        return sum(self._time_s[root] for root in near)
