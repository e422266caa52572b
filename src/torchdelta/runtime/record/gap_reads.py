"""Brings back what is read between the nodes of a backward, where the recorder is off.

The engine reads the gradients that it accumulates into, and Python code (the program's hooks on tensors and nodes) may
read any tensor. A dispatch mode there would change how the engine accumulates gradients (backward.py). A function mode
does not: it sees only what Python code calls. The function mode is on also in nodes that run without the recorder,
because a checkpoint may recompute there.

A hook may start a backward. The nodes of that one are not watched, unless they are nodes of the outer one, too. So what
they may read stays until it has ended: all gradients that it accumulates into, and what is read in the meantime.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.engine import ACCUMULATE
from torchdelta._torch.modes import (
    FunctionMode,
    NoFunction,
    pop_function_mode,
    push_function_mode,
    remove_function_mode,
    top_function_mode,
)
from torchdelta._torch.tensors import tensor_hooks_of
from torchdelta.runtime.interrupts import call_outside, enter, leave
from torchdelta.runtime.memory.in_use import arguments_in
from torchdelta.runtime.record.known_backward import roots_of
from torchdelta.runtime.record.mode_sensitive import makes_mode_sensitive_node
from torchdelta.runtime.state.kinds import tensors_in

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from torchdelta.runtime.memory.persistents import Persistents

__all__ = ["GapReads", "is_attribute_access"]


class GapReads(FunctionMode):
    """Brings back the arguments of the torch functions that Python code calls, and the gradients of leaves."""

    def __init__(self, persistents: Persistents) -> None:
        super().__init__()
        self._persistents = persistents
        self._leaves: list[Any] = []  # into which the engine accumulates after the latest node
        # Gradients that the engine may add, and that backward has not made.
        self._returned: list[weakref.ref[torch.Tensor]] = []
        self._num_nested = 0  # backwards that run inside of gaps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function. The signature is torch's."""
        del types
        persistents = self._persistents
        if is_attribute_access(func) or torch.compiler.is_compiling():
            if _sets_memory(func) and not torch.compiler.is_compiling() and self._may_be_accumulated(args[0]):
                self._lock(args[1:])  # the engine may add to it next, without an op
            return func(*args, **(kwargs or {}))
        outer = enter()
        try:
            if self._num_nested:
                persistents.in_use.lock(arguments_in((args, kwargs)))
            persistents.begin(args, kwargs, may_write=True)
            try:
                if makes_mode_sensitive_node(getattr(func, "__name__", "")) and torch.is_grad_enabled():
                    persistents.keep(args, kwargs)
                return call_outside(func, *args, **(kwargs or {}))
            finally:
                persistents.end()
        finally:
            leave(outer)

    @contextlib.contextmanager
    def during(self, outputs: Any, gradients: Any) -> Generator[None]:
        """Bring back what is read between the nodes of a backward that starts at `outputs` with `gradients`."""
        in_use, starting = self._persistents.in_use, list(tensors_in(gradients))
        in_use.begin_backward(starting)
        outer_leaves, self._leaves = self._leaves, []
        outer_returned, self._returned = self._returned, []
        try:
            if self._persistents.is_active:
                self._persistents.bring(starting)
            roots = [root for root in roots_of(outputs) if root is not None and root.name() == ACCUMULATE]
            self.begin_gap([root.variable for root in roots])
            self.begin_program()
            yield
        finally:
            self._leaves, self._returned = outer_leaves, outer_returned
            self.begin_library()
            in_use.end_backward()

    def begin_gap(self, leaves: list[Any] | None, returned: Iterable[Any] = ()) -> None:
        """A gap begins.

        Args:
            leaves: Into which the engine accumulates there; None: into those of the gap before.
            returned: The gradients that the node before has returned.
        """
        in_use = self._persistents.in_use
        in_use.unlock()
        if leaves is not None:
            self._leaves = leaves
        gradients = [leaf.grad for leaf in self._leaves if leaf.grad is not None]
        # The engine adds gradients without an op. One that backward has not made, such as a parameter's `.data`, may be
        # away, or leave before it is added. Those that backward makes are not known by the storage's object.
        for gradient in returned:
            if any(record.reference is not None for record in in_use.records([gradient])):
                self._returned.append(weakref.ref(gradient))
        alive = [tensor for reference in self._returned if (tensor := reference()) is not None]
        self._returned = [weakref.ref(tensor) for tensor in alive]
        self._persistents.lock([*gradients, *alive], may_write=True)

    def before_accumulation(self, gradients: Any) -> None:
        """Bring back what hooks of a leaf have returned as its gradient: the engine accumulates it next."""
        self._lock(gradients)

    def _may_be_accumulated(self, tensor: Any) -> bool:
        """Return whether the engine may add to a leaf's gradient in this gap; `tensor` is the leaf or the gradient."""
        return self._num_nested > 0 or any(tensor is leaf or tensor is leaf.grad for leaf in self._leaves)

    def _lock(self, tensors: Iterable[Any]) -> None:
        """In the middle of a gap, bring back tensors that the program hands to the engine. They stay until it ends."""
        outer = enter()
        try:
            with NoFunction():
                self._persistents.lock([each for each in tensors if isinstance(each, torch.Tensor)], may_write=True)
        finally:
            leave(outer)

    def end_gap(self) -> None:
        """A gap ends, or a node that runs without the recorder."""
        self.begin_library()
        self._persistents.in_use.unlock()

    def begin_program(self) -> None:
        """Be on from here on: the program's code and the engine run next."""
        push_function_mode(self)

    def begin_library(self) -> None:
        """Be off from here on: the library itself runs next."""
        if top_function_mode() is self:
            pop_function_mode()

    @contextlib.contextmanager
    def nested(self, gradients: Any, leaves: Iterable[torch.Tensor], *, is_on: bool) -> Generator[None]:
        """Bring back what a backward reads that Python code starts in a gap.

        Args:
            gradients: Those of the outputs.
            leaves: Into whose gradients it accumulates.
            is_on: Whether this mode is on already. It is not where a torch function has started the backward.
        """
        in_use, read, leaves = self._persistents.in_use, list(tensors_in(gradients)), list(leaves)
        read += [leaf.grad for leaf in leaves if leaf.grad is not None]
        hooked = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves if tensor_hooks_of(leaf)]
        handles = [node.register_prehook(self.before_accumulation) for node in hooked]
        outer_leaves = self._leaves
        in_use.begin_backward(read)
        self._num_nested += 1
        try:
            if self._persistents.is_active:
                self._persistents.bring(read, may_write=True)
            if is_on:
                yield
                return
            push_function_mode(self)
            try:
                yield
            finally:
                remove_function_mode(self)
        finally:
            for handle in handles:
                handle.remove()
            self._num_nested -= 1
            self._leaves = outer_leaves  # nodes of the outer backward may have run
            in_use.end_backward()


_VIEWS: Final = frozenset({"T", "H", "mT", "mH", "real", "imag"})


def _sets_memory(func: Any) -> bool:
    """Return whether a function sets `.grad` or `.data`."""
    return getattr(func, "__name__", "") == "__set__" and getattr(func.__self__, "__name__", "") in {"grad", "data"}


def is_attribute_access(func: Any) -> bool:
    """Return whether a function gets or sets an attribute that says nothing about the content, such as `p.grad`."""
    return (
        getattr(func, "__name__", "") in {"__get__", "__set__"} and getattr(func.__self__, "__name__", "") not in _VIEWS
    )
