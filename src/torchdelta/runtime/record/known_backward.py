"""Backwards of followed steps that are known: of their graphs, only the leaves are compared."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.engine import next_node_number, node_number
from torchdelta._torch.tensors import grad_fn_of, post_accumulate_hooks_of
from torchdelta.native.saved_hooks import are_same_leaves
from torchdelta.runtime.record.headroom import leaves_of

if TYPE_CHECKING:
    from torchdelta.runtime.follow.follower import Follower
    from torchdelta.runtime.follow.program import Program
    from torchdelta.runtime.memory.transfers import Transfers
    from torchdelta.runtime.record.headroom import Graph
    from torchdelta.runtime.state.usage import Usage

_MOST_KNOWN: Final = 4

__all__ = ["KnownBackward", "KnownBackwards", "roots_of"]


class KnownBackward:
    """An unwatched backward of a followed step: what identifies another backward as the same.

    Args:
        graph: Its graph.
        has_no_gradient: By leaf: whether it had no gradient at the start.
        name: The name under which its program keeps the proof for it.
    """

    def __init__(self, graph: Graph, has_no_gradient: tuple[bool, ...], name: int) -> None:
        self.name = name
        self.start_hash = 0  # `Recorder.forward_hash` at the first saved tensor of its step
        self._has_no_gradient = has_no_gradient
        self._leaves = [weakref.ref(leaf) for leaf in graph.leaves]

    def leaves(self) -> list[torch.Tensor]:
        """Return the leaves that still exist."""
        return [leaf for reference in self._leaves if (leaf := reference()) is not None]

    def fits(self, usage: Usage, follower: Follower, transfers: Transfers) -> bool:
        """Return whether it fits unwatched. If it would without copies out, wait for them one by one until it does."""
        usage.ask_counter(fresh=True)
        leaving_bytes = follower.leaving_bytes()
        if not follower.may_run_unwatched(self.name, usage.total_bytes - leaving_bytes, 0):
            return False
        while not (fits := follower.may_run_unwatched(self.name, usage.total_bytes, leaving_bytes)):
            if not transfers.leaving:
                break  # a copy has failed
            transfers.finish_first()
            usage.ask_counter(fresh=True)
            leaving_bytes = follower.leaving_bytes()
        return fits

    def is_same(self, outputs: Any) -> bool:
        """Return whether a backward from `outputs` has the same leaves, and these are as they were.

        The outline and the start show that the nodes are the same. They do not show that the leaves are: two models of
        the same shapes have the same nodes, and may share some leaves, such as those of a head.
        """
        is_same = are_same_leaves(tuple(outputs), self._leaves, self._has_no_gradient)
        if is_same is not None:
            return is_same
        leaves = leaves_of(roots_of(outputs))
        for reference, has_no_gradient in zip(self._leaves, self._has_no_gradient, strict=True):
            leaf = next(leaves, None)
            if leaf is None or leaf is not reference():
                return False
            if (leaf.grad is None) != has_no_gradient or post_accumulate_hooks_of(leaf):
                return False
        return next(leaves, None) is None


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
        for roots, known in self._known.get(program, ()):
            # The roots may be another result of the same ops, for example.
            if known.start_hash == self._start_hash and roots == self._roots and known.is_same(outputs):
                return known
        return None

    def note(self, program: Program, known: KnownBackward | None) -> None:
        """Know the backward that has ended."""
        if known is None:
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
