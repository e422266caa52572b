"""Backward: the recorder is off between autograd nodes and on inside them.

A dispatch mode that is on in backward makes the engine accumulate gradients out of place (a larger peak), and changes
the bits of some derivative formulas. So the recorder is popped when `backward()` is called; each node's prehook pushes
it and its posthook pops it. Nodes whose formulas depend on the mode (mode_sensitive.py) run without it, and room for
them is made from the sizes of the gradients that they return.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from torchdelta._torch.engine import ACCUMULATE, input_sizes_bytes
from torchdelta._torch.modes import (
    mode_stack,
    num_modes,
    pop_mode,
    push_mode,
    top_function_mode,
    top_mode,
    without_mode,
)
from torchdelta._torch.storages import storage_address
from torchdelta._torch.tensors import post_accumulate_hooks_of, tensor_hooks_of
from torchdelta.runtime.follow.program import Proof
from torchdelta.runtime.interrupts import call_outside, shielded
from torchdelta.runtime.record.gap_reads import GapReads
from torchdelta.runtime.record.gaps import Gaps
from torchdelta.runtime.record.headroom import Graph, Headroom, leaves_of
from torchdelta.runtime.record.known_backward import KnownBackward, roots_of
from torchdelta.runtime.record.leaf_gradients import LeafGradients
from torchdelta.runtime.record.mode_sensitive import is_mode_sensitive
from torchdelta.runtime.record.python_writes import PythonWrites
from torchdelta.runtime.state.kinds import runs_own_ops, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchdelta.runtime.record.recorder import Recorder
    from torchdelta.runtime.state.steps import StepTracker

# Temporaries of the nodes that run without the mode, in multiples of the largest gradient that they return. Others: 1.
_TEMPORARY_SHARE: Final = {
    "ProdBackward": 2.0,
    "CumprodBackward": 4.0,
    "MaskedFillBackward": 0.0,
    "MaskedScatterBackward": 1.0,
}


class OnEnd(Protocol):
    """Callback for the end of each backward pass, nested ones included."""

    def __call__(
        self, *, keeps_graph: bool, is_outermost: bool, leaves: list[Any], error: BaseException | None
    ) -> None:
        """Handle the end of a pass that accumulated into `leaves` or ended with `error`. May raise."""


class Backward:
    """Runs the autograd engine with the recorder on inside the nodes.

    Args:
        recorder: The dispatch mode; knows the ledger and the room.
        steps: The position in the training step.
        on_end: Called at the end of every watched backward, and of every outermost one.
    """

    def __init__(self, recorder: Recorder, steps: StepTracker, on_end: OnEnd) -> None:
        self.recorder = recorder
        self.ledger = recorder.ledger
        self.usage = recorder.ledger.usage
        self.room = recorder.room
        self.observing = recorder.observing
        self.steps = steps
        self.follower = recorder.saved.follower
        self._on_end = on_end
        self.persistents = recorder.persistents
        self._gap_reads = GapReads(self.persistents) if self.persistents is not None else None
        self._all_here = self.persistents.all_here if self.persistents is not None else contextlib.nullcontext
        self._depth = 0
        self.headroom = Headroom()
        self._gaps = Gaps(recorder.room)
        self.python_writes = PythonWrites(recorder, self._gaps.end)
        recorder.saved.program_modes = (self.python_writes, self._gap_reads)
        self._gradients = LeafGradients(recorder, self.python_writes)
        self._leaves: list[Any] = []  # of the running backward; a survey removes its fake gradients from them
        self.latest_known: KnownBackward | None = None  # the latest backward, if it was that of a followed step

    @shielded
    def run(self, original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the engine's `run_backward(outputs, gradients, keep_graph, create_graph, ...)`."""
        self.observing.observer.on_backward_start(args[0] if args else kwargs.get("grad_tensors"))
        num_before = num_modes()
        keeps_graph = any(args[1:3]) or bool(kwargs.get("keep_graph") or kwargs.get("create_graph"))
        # With `inputs`, only some nodes run; without `accumulate_grad`, no leaf gets a gradient.
        is_whole = not (any(args[3:4]) or kwargs.get("inputs")) and kwargs.get("accumulate_grad", True)
        usage, budget_bytes = self.usage, self.room.budget_bytes
        usage.ask_counter(fresh=True)
        start_bytes, earlier_peak_bytes, num_handles = usage.total_bytes, usage.peak_bytes, self.ledger.num_handles
        follower = self.follower
        follows = follower.is_complete and usage.sees_peaks
        graph = (
            Graph(roots_of(outputs))
            if self._depth == 0 and is_whole and not keeps_graph and (follows or self._may_fit())
            else None
        )
        follows_as = 0
        self.latest_known = None
        if graph is not None and follows:
            grads = tuple(leaf.grad is None for leaf in graph.leaves)
            follows_as = hash((graph.signature, grads, self.recorder.forward_hash))
            is_watched = graph.has_hooks or self._needs_a_mode()
            if not is_watched and follower.may_run_unwatched(follows_as, start_bytes, follower.leaving_bytes()):
                follower.on_unwatched()
                self.latest_known = KnownBackward(graph, grads, follows_as)
                return self._run_unwatched(original, graph.leaves, 0, outputs, *args, **kwargs)
        elif graph is not None:
            expected_bytes = self.headroom.expected_peak_bytes(
                graph,
                live_bytes=start_bytes,
                num_handles=num_handles,
                num_needs=self.recorder.needs.num_made,
                budget_bytes=budget_bytes or 0,
            )
            if expected_bytes is not None:
                return self._run_unwatched(original, graph.leaves, expected_bytes, outputs, *args, **kwargs)
        collected_bytes, num_waits, num_needs = (
            self.room.collected_bytes,
            self.room.num_waits,
            self.recorder.needs.num_made,
        )
        leaving_bytes = follower.leaving_bytes() if follows else 0
        usage.peak_bytes = start_bytes
        if budget_bytes is None:
            self.room.transfers.finish_leaving()  # forced decisions take effect without memory pressure too
        handles: list[Any] = []
        error: BaseException | None = None
        num_outer_leaves = len(self._leaves)
        self._depth += 1
        try:
            with without_mode(self.recorder):
                self._install(outputs, handles)
                if self._depth == 1:
                    self._gaps.restart(len(handles))
                try:
                    if kwargs.get("accumulate_grad", True):
                        self._gradients.end_read(self._leaves[num_outer_leaves:])
                    gradients = args[0] if args else kwargs.get("grad_tensors")
                    gap_reads = self._gap_reads
                    during = gap_reads.during(outputs, gradients) if gap_reads else contextlib.nullcontext()
                    with during, self.python_writes.on():
                        result = call_outside(original, outputs, *args, **kwargs)
                except BaseException as raised:
                    error = raised
                    raise
                finally:
                    for handle in handles:
                        handle.remove()
                    handles.clear()
            return result
        finally:
            while num_modes() > num_before and self.recorder in mode_stack():
                pop_mode()
            self._depth -= 1
            self._gaps.end()
            self._gaps.end_unseen(failed=True)
            self._gradients.count()
            # A garbage collection in between would make the growth look too small for a start without garbage, and the
            # fake tensors of a survey that began in between take no memory.
            is_measured = error is None and not self.ledger.surveys and collected_bytes == self.room.collected_bytes
            if graph is not None and is_measured and follows:
                # An unwatched one would not wait, and room was made for the estimated needs of ops that are new here.
                if num_waits == self.room.num_waits and num_needs == self.recorder.needs.num_made:
                    follower.measured(
                        follows_as,
                        Proof(start_bytes=start_bytes, leaving_bytes=leaving_bytes, peak_bytes=usage.peak_bytes),
                    )
            elif graph is not None and is_measured:
                self.headroom.measured(
                    graph,
                    start_bytes=start_bytes,
                    peak_bytes=usage.peak_bytes,
                    num_handles=num_handles,
                    num_needs=self.recorder.needs.num_made,
                )
            graph = None
            usage.peak_bytes = max(usage.peak_bytes, earlier_peak_bytes)
            leaves = self._leaves[num_outer_leaves:]
            # Of an inner backward only parameters stay: a checkpoint's detached input dies here with its gradient.
            del self._leaves[num_outer_leaves:]
            if self._depth:
                self._leaves.extend(leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter))
            if self._depth == 0 and not keeps_graph:
                self.recorder.forward_hash = 0
            try:
                self._on_end(keeps_graph=keeps_graph, is_outermost=self._depth == 0, leaves=leaves, error=error)
            finally:
                error = None  # an exception that its own frame holds would keep everything in it alive
                leaves.clear()

    @shielded
    def runs_known(self, known: KnownBackward) -> bool:
        """Return whether the backward that begins, which is a known one, fits unwatched."""
        return not self.recorder.subclasses.need_a_mode and known.fits(self.usage, self.follower, self.room.transfers)

    @shielded
    def run_known(
        self, original: Callable[..., Any], known: KnownBackward, outputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a backward for which `runs_known` has returned True."""
        self.follower.on_unwatched()
        self.latest_known = known
        return self._run_unwatched(original, known.leaves(), None, outputs, *args, **kwargs)

    def _may_fit(self) -> bool:
        """Return whether a backward that fitted before may run unwatched."""
        if self.room.budget_bytes is None or self.ledger.surveys or self._needs_a_mode():
            return False
        return not self.room.costs.misses_saved()  # bringing buffers back would exceed the measured growth

    def _needs_a_mode(self) -> bool:
        """Return whether the ops of a backward must be seen, even if it fits."""
        may_be_away = self.persistents is not None and (self.persistents.is_active or self.follower.is_following)
        return may_be_away or self.recorder.subclasses.need_a_mode or self.observing.observer.wants_every_op

    def running_leaves(self) -> list[Any]:
        """Return the leaves that the running backward reaches; empty outside of one."""
        return self._leaves

    def _run_unwatched(
        self,
        original: Callable[..., Any],
        leaves: list[Any],
        expected_bytes: int | None,
        outputs: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a backward that is known to fit. See [Note: never act without need] in headroom.py.

        Args:
            original: The engine.
            leaves: All leaves that it accumulates into.
            expected_bytes: Its peak, in case that is not measured. None: it is, and so are the gradients of the leaves.
            outputs: Where it starts.
            args: Further arguments of the engine.
            kwargs: Further arguments of the engine.
        """
        usage = self.usage
        error: BaseException | None = None
        self._leaves.extend(leaves)  # a survey may begin where a followed backward brings a buffer back
        try:
            self._gradients.end_read(leaves)
            with without_mode(self.recorder), self.python_writes.on(), self._all_here():
                return call_outside(original, outputs, *args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if expected_bytes is not None:
                self._gradients.pending.extend(leaves)
                self._gradients.count()
                if not usage.sees_peaks:
                    usage.peak_bytes = max(usage.peak_bytes, expected_bytes)
            self._leaves.clear()
            self.recorder.forward_hash = 0
            try:
                self._on_end(keeps_graph=False, is_outermost=True, leaves=leaves, error=error)
            finally:
                error = None  # as in `run`

    @shielded
    def run_nested(self, original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward that Python code starts where the recorder is off, perhaps in a gap of another backward."""
        if not self.python_writes.num_backwards:
            return call_outside(original, outputs, *args, **kwargs)
        leaves = list(leaves_of(roots_of(outputs))) if kwargs.get("accumulate_grad", True) else []
        is_on = top_function_mode() is self.python_writes  # it is not where a torch function has started the backward
        with self.python_writes.off():
            self._gradients.end_read(leaves)
        nested: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._gap_reads is not None:
            gradients = args[0] if args else kwargs.get("grad_tensors")
            nested = self._gap_reads.nested(gradients, leaves, is_on=is_on)
        with nested, self.python_writes.on():
            return call_outside(original, outputs, *args, **kwargs)

    def _install(self, outputs: Any, handles: list[Any]) -> None:
        stack = roots_of(outputs)
        seen: set[Any] = set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            name = node.name()
            if name == ACCUMULATE:
                if post_accumulate_hooks_of(node.variable):  # such a hook may step the optimizer
                    handles.append(node.register_prehook(self._before))
                    handles.append(node.register_hook(functools.partial(self._after, None, (node.variable,))))
                elif self._gap_reads is not None and tensor_hooks_of(node.variable):
                    handles.append(node.register_prehook(self._gap_reads.before_accumulation))
                continue
            following = [child for child, _ in node.next_functions]
            leaves = [child.variable for child in following if child is not None and child.name() == ACCUMULATE]
            self._leaves.extend(leaves)
            if is_mode_sensitive(name):
                handles.append(node.register_prehook(functools.partial(self._before_unrecorded, name, following)))
                handles.append(node.register_hook(functools.partial(self._after_unrecorded, name, leaves)))
            else:
                handles.append(node.register_prehook(functools.partial(self._before, name=name)))
                handles.append(node.register_hook(functools.partial(self._after, leaves, leaves)))
            stack.extend(following)

    @shielded
    def _before(self, gradients: Any, *, name: str = "") -> None:
        self._begin_library()
        self._count_gradients(gradients)
        self.observing.observer.on_gradients(gradients)
        self.steps.node_name = name
        push_mode(self.recorder)

    @shielded
    def _after(self, leaves: list[Any] | None, pending: Iterable[Any], returned: Any, _outputs: Any) -> None:
        # Pop only our own mode: another library's mode that the node left on the stack is for that library to pop.
        if top_mode() is self.recorder:
            pop_mode()
        node_name, self.steps.node_name = self.steps.node_name, ""
        self._gradients.pending.extend(pending)
        if self._gap_reads is not None:  # after an accumulation, those into others of these leaves may still follow
            self._gap_reads.begin_gap(leaves, returned)
        self._gaps.begin(node_name, leaves or ())
        self._begin_program()

    @shielded
    def _before_unrecorded(self, name: str, following: list[Any], gradients: Any) -> None:
        self._begin_library()
        self._count_gradients(gradients)
        sizes = [input_sizes_bytes(child) for child in following if child is not None]
        temporary_bytes = int(max(sizes, default=0) * _TEMPORARY_SHARE.get(name.rstrip("0123456789"), 1.0))
        if self.persistents is not None:
            self.persistents.lock(tensors_in(gradients))
        self._gaps.begin_unseen(name, tuple(sizes), sum(sizes) + temporary_bytes)
        self.observing.observer.on_gradients(gradients)
        self.observing.observer.on_opaque_start(gradients, temporary_bytes)
        self._begin_program()  # a checkpoint may recompute in this node

    @shielded
    def _after_unrecorded(self, name: str, leaves: Any, inputs: Any, _outputs: Any) -> None:
        self._begin_library()
        self._gaps.end_unseen()
        self._count_gradients(inputs)
        self.observing.observer.on_opaque_end("torchdelta.node", inputs, node=name)
        self._gradients.pending.extend(leaves)
        if self._gap_reads is not None:
            self._gap_reads.begin_gap(leaves, inputs)
        self._gaps.begin(name, leaves)
        self._begin_program()

    def _begin_library(self) -> None:
        """Enter the library from the program's code or the engine: the gap, or the unrecorded node, ends."""
        self.python_writes.begin_library()
        if self._gap_reads is not None:
            self._gap_reads.end_gap()

    def _begin_program(self) -> None:
        """Return from the library to the program's code and the engine, in a gap or in an unrecorded node."""
        if self._gap_reads is not None:
            self._gap_reads.begin_program()
        self.python_writes.begin_program()

    def _count_gradients(self, gradients: Any) -> None:
        """Count gradients that were made between nodes, by the engine's accumulation or by the user's tensor hooks."""
        self._gaps.end()
        ledger = self.ledger
        ledger.recheck_unwatched()
        if self._gradients.pending:
            self._gradients.count()
        records = ledger.records
        before_bytes = self.usage.live_bytes
        for gradient in gradients:
            if gradient is None:
                continue
            if runs_own_ops(gradient.__class__) and not ledger.surveys:
                ledger.know_inner(gradient)
                continue
            if gradient.layout is not torch.strided:
                continue
            try:
                if storage_address(gradient) not in records:
                    ledger.know_by_tensor(gradient)
            except NotImplementedError:  # torch.func's wrappers have no storage
                continue
        if self.usage.live_bytes > before_bytes:
            self.room.make(0, "gradient accumulation")
