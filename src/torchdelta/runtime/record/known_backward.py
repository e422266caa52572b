"""Backwards of followed steps that are known: they run without a walk over their graph."""

from __future__ import annotations

import collections
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.engine import ACCUMULATE, next_node_number, node_number
from torchdelta._torch.tensors import grad_fn_of, post_accumulate_hooks_of

if TYPE_CHECKING:
    from torchdelta.runtime.follow.program import Program
    from torchdelta.runtime.record.headroom import Graph

_MOST_KNOWN: Final = 4
_MOST_NODES: Final = 256  # between the start of a backward and its first leaf

__all__ = ["KnownBackward", "KnownBackwards", "first_leaf_of", "roots_of"]


class KnownBackward:
    """An unwatched backward of a followed step: what identifies another backward as the same.

    Args:
        graph: Its graph.
        has_no_gradient: By leaf: whether it had no gradient at the start.
        name: The name under which its program keeps the proof for it.
        first_leaf: A leaf near its start (`first_leaf_of`): another model of the same shapes has other leaves.
    """

    def __init__(
        self, graph: Graph, has_no_gradient: tuple[bool, ...], name: int, first_leaf: torch.Tensor | None
    ) -> None:
        self.name = name
        self._first_leaf = weakref.ref(first_leaf) if first_leaf is not None else None
        self.start_hash = 0  # `Recorder.forward_hash` at the first saved tensor of its step
        self._has_no_gradient = has_no_gradient
        self._leaves = [weakref.ref(leaf) for leaf in graph.leaves]

    @property
    def has_leaf(self) -> bool:
        """Return whether a leaf was found near its start; else it cannot be known again."""
        return self._first_leaf is not None

    def leaves(self) -> list[torch.Tensor]:
        """Return the leaves that still exist."""
        return [leaf for reference in self._leaves if (leaf := reference()) is not None]

    def is_same(self, first_leaf: torch.Tensor | None) -> bool:
        """Return whether the leaves are as they were; that the nodes are the same follows from outline and start."""
        if self._first_leaf is None or self._first_leaf() is not first_leaf:
            return False
        for reference, has_no_gradient in zip(self._leaves, self._has_no_gradient, strict=True):
            leaf = reference()
            if leaf is None or (leaf.grad is None) != has_no_gradient or post_accumulate_hooks_of(leaf):
                return False
        return True


class KnownBackwards:
    """The latest known backwards of each program: more than one where gradients are accumulated. Mutable."""

    def __init__(self) -> None:
        # By program: for each backward its roots, and what tells that another one is the same.
        self._known: weakref.WeakKeyDictionary[Program, list[tuple[Any, KnownBackward]]] = weakref.WeakKeyDictionary()
        self._first_node = 0  # the number of the first autograd node from which on steps are known to run the same ops
        self._start_hash = 0  # of the running step
        self._roots: Any = None  # of the running backward

    def begin(self, forward_hash: int) -> None:
        """Note that from here on the step is compared with an outline.

        Args:
            forward_hash: `Recorder.forward_hash`: what was made before, with which no outline is compared.
        """
        self._first_node = next_node_number()
        self._start_hash = forward_hash

    def has_any(self, program: Program) -> bool:
        """Return whether a backward of a program is known, after the same start."""
        return any(known.start_hash == self._start_hash for _, known in self._known.get(program, ()))

    def find(self, program: Program, outputs: Any) -> KnownBackward | None:
        """Return the known backward of a step that was like the outline of its program, if it starts there, too."""
        self._roots = tuple(
            (node.name(), node_number(node) - self._first_node) for node in roots_of(outputs) if node is not None
        )
        first_leaf = first_leaf_of(outputs)
        for roots, known in self._known.get(program, ()):
            # The roots may be another result of the same ops, for example.
            if known.start_hash == self._start_hash and roots == self._roots and known.is_same(first_leaf):
                return known
        return None

    def note(self, program: Program, known: KnownBackward | None) -> None:
        """Know the backward that has ended."""
        if known is None or not known.has_leaf:
            return
        known.start_hash = self._start_hash
        others = self._known.get(program, [])
        others = [other for other in others if other[1] is not known and other[1].name != known.name]
        self._known[program] = [(self._roots, known), *others[: _MOST_KNOWN - 1]]

    def forget(self) -> None:
        """Forget all, and the weak references to leaves with them."""
        self._known.clear()


def roots_of(outputs: Any) -> list[Any]:
    """Return the nodes where a backward starts; `outputs` are tensors or gradient edges."""
    return [
        grad_fn_of(output) if isinstance(output, torch.Tensor) else getattr(output, "node", None) for output in outputs
    ]


def first_leaf_of(outputs: Any) -> torch.Tensor | None:
    """Return a leaf near the start of a backward, always the same one of the same graph; None if there is none.

    Nodes are taken from both ends of the queue in turn, so that a leaf is found soon in wide graphs and in deep ones.
    """
    seen: set[Any] = set()
    waiting = collections.deque(node for node in roots_of(outputs) if node is not None)
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.popleft() if len(seen) % 2 else waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == ACCUMULATE:
            return node.variable
        waiting.extend(child for child, _ in node.next_functions if child is not None)
    return None
