"""Headroom: finds the backwards that are expected to fit, which run without hooks on their nodes.

[Note: never act without need]
Hooks on every node and a dispatch mode inside each are a large part of the cost of recording. If an earlier backward of
the same graph left much of the budget free, this one is not expected to need an eviction, so it runs unwatched: saved
tensors still go through their hooks, `.grad`s are counted when it ends, and where peaks are not counted at the
allocator, its peak is taken to be its start plus the measured growth.

The same graph means: nodes of the same names in the same order over the same leaves; at most 5 % more saved tensors and
bytes at the start; and no op with a new key (needs.py) since then, because the workspace of backward ops on new shapes
has to be learned while there is room. After 16 unwatched backwards of a graph the next one is watched.

Always watched are: a backward that keeps its graph, one to some `inputs` only (`torch.autograd.grad`, too), one inside
another backward, one with a hook after the accumulation of a leaf's gradient (it may step an optimizer), one that has
to bring saved tensors back, and those of the first step and of a survey.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torchdelta._torch.engine import ACCUMULATE
from torchdelta._torch.tensors import post_accumulate_hooks_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

# A backward is expected to fit if its start plus this many times the measured growth is below this share of the budget.
_GROWTH_MARGIN: Final = 1.5
_SHARE_OF_BUDGET: Final = 0.75
_LARGER_THAN_MEASURED: Final = 1.05
_WATCH_EVERY: Final = 16
_MAX_GRAPHS: Final = 64


class Graph:
    """The structure of a backward: its nodes, and the leaves that it accumulates into."""

    def __init__(self, roots: Iterable[Any]) -> None:
        names: list[str] = []
        self.leaves: list[torch.Tensor] = []
        for node, name in _nodes_from(roots):
            if name == ACCUMULATE:
                self.leaves.append(node.variable)
            else:
                names.append(name)
        self.signature = hash((tuple(names), tuple(id(leaf) for leaf in self.leaves)))
        self.has_hooks = any(post_accumulate_hooks_of(leaf) for leaf in self.leaves)


def leaves_of(roots: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield `Graph(roots).leaves`, in the same order."""
    return (node.variable for node, name in _nodes_from(roots) if name == ACCUMULATE)


def _nodes_from(roots: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Yield the nodes of a backward and their names, always in the same order for the same graph."""
    seen: set[Any] = set()
    stack = [root for root in roots if root is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        name = node.name()
        yield node, name
        if name != ACCUMULATE:
            stack.extend(child for child, _ in node.next_functions if child is not None)


@dataclass(slots=True, kw_only=True)
class _Measured:
    """Measurements of a watched backward of one graph."""

    start_bytes: int
    growth_bytes: int
    num_handles: int
    num_needs: int
    leaves: list[weakref.ref[torch.Tensor]]
    num_skipped: int = 0


class Headroom:
    """Measurements of watched backwards, by graph."""

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}

    def measured(self, graph: Graph, *, start_bytes: int, peak_bytes: int, num_handles: int, num_needs: int) -> None:
        """Record the growth of a watched backward, and how many op needs (`Predictor.num_made`) it ended with."""
        if len(self._measured) >= _MAX_GRAPHS:
            self._measured.clear()
        self._measured[graph.signature] = _Measured(
            start_bytes=start_bytes,
            growth_bytes=peak_bytes - start_bytes,
            num_handles=num_handles,
            num_needs=num_needs,
            leaves=[weakref.ref(leaf) for leaf in graph.leaves],
        )

    def clear(self) -> None:
        """Forget all graphs, and with them the weak references to their leaves."""
        self._measured.clear()

    def forget(self, *leaves: torch.Tensor) -> None:
        """Forget the graphs over any of these leaves, and with them the weak references to the leaves."""
        ids = {id(leaf) for leaf in leaves}
        for signature, earlier in list(self._measured.items()):
            if any(id(leaf()) in ids for leaf in earlier.leaves):
                del self._measured[signature]

    def expected_peak_bytes(
        self, graph: Graph, *, live_bytes: int, num_handles: int, num_needs: int, budget_bytes: int
    ) -> int | None:
        """Return the expected peak of a backward that may run unwatched, None for any other."""
        earlier = self._measured.get(graph.signature)
        if earlier is None or graph.has_hooks or earlier.num_skipped >= _WATCH_EVERY:
            return None
        if any(now is not then() for now, then in zip(graph.leaves, earlier.leaves, strict=True)):
            return None  # Python reused an id
        if num_needs != earlier.num_needs:
            return None
        if live_bytes > earlier.start_bytes * _LARGER_THAN_MEASURED:
            return None
        if num_handles > earlier.num_handles * _LARGER_THAN_MEASURED:
            return None
        if live_bytes + earlier.growth_bytes * _GROWTH_MARGIN > budget_bytes * _SHARE_OF_BUDGET:
            return None
        earlier.num_skipped += 1
        return live_bytes + earlier.growth_bytes
