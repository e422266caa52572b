"""Backward: the recorder is off between autograd nodes and on inside them.

A dispatch mode that is on in backward makes the engine accumulate gradients out of place (a larger peak), and changes
the bits of some derivative formulas. So the scope's mode is taken off when `backward()` is called, and each node's
prehook pushes it and its posthook pops it; nodes whose formulas would notice (mode_sensitive.py) run without, and room
for them is made from the sizes of the gradients that they hand on.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch import (
    ACCUMULATE,
    input_sizes_bytes,
    mode_stack,
    num_modes,
    pop_mode,
    push_mode,
    storage_address,
    top_mode,
    without_mode,
)
from torchdelta.runtime.errors import BudgetError
from torchdelta.runtime.gaps import Gaps
from torchdelta.runtime.headroom import Graph, Headroom
from torchdelta.runtime.interrupts import call_outside, shielded
from torchdelta.runtime.mode_sensitive import is_mode_sensitive
from torchdelta.runtime.subclasses import count, runs_own_ops

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.recorder import Recorder
    from torchdelta.runtime.session import Session

# Nodes that run without the mode make temporaries besides the gradients they hand on: so many times the largest of
# these.
_TEMPORARY_SHARE: Final = {
    "ProdBackward": 2.0,
    "CumprodBackward": 4.0,
    "MaskedFillBackward": 0.0,
    "MaskedScatterBackward": 1.0,
}


class Backward:
    """Runs the engine with the recorder inside the nodes."""

    def __init__(self, session: Session, recorder: Recorder) -> None:
        self.session = session
        self.recorder = recorder
        self._pending: list[Any] = []  # leaves whose .grad may be new since the last node
        self._depth = 0
        self.headroom = Headroom()
        self._gaps = Gaps(session)
        self._leaves: list[Any] = []  # of the running backward; a survey leaves no fake gradient on them

    @shielded
    def run(self, original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for `_engine_run_backward(outputs, grad_outputs, keep_graph, create_graph, ...)`."""
        if self.session.ledger.trace is not None:
            self.session.ledger.trace.on_backward_start(args[0] if args else kwargs.get("grad_tensors"))
        num_before = num_modes()
        keeps_graph = bool(
            (len(args) > 1 and args[1])
            or (len(args) > 2 and args[2])
            or kwargs.get("retain_graph")
            or kwargs.get("create_graph")
        )
        ledger = self.session.ledger
        budget_bytes = self.session.residency.budget_bytes
        ledger.ask_counter(fresh=True)
        start_bytes, earlier_peak_bytes, num_handles = ledger.total_bytes, ledger.peak_bytes, self.session.num_handles
        can_skip = (
            self._depth == 0
            and not keeps_graph
            and budget_bytes is not None
            and self.session.survey is None
            and ledger.trace is None
            and not self.session.residency.misses_saved()  # what comes back grows beyond what was measured
        )
        graph = Graph(_roots(outputs)) if can_skip else None
        if graph is not None:
            expected_bytes = self.headroom.expected_peak_bytes(
                graph,
                live_bytes=start_bytes,
                num_handles=num_handles,
                num_needs=self.recorder.predictor.num_made,
                budget_bytes=budget_bytes or 0,
            )
            if expected_bytes is not None:
                return self._run_unwatched(original, graph, expected_bytes, outputs, *args, **kwargs)
        collected_bytes = self.session.collected_bytes
        ledger.peak_bytes = start_bytes
        if budget_bytes is None:
            self.session.residency.see_off()  # forced decisions are carried out, also where nothing presses
        handles: list[Any] = []
        error: BaseException | None = None
        self._depth += 1
        try:
            with without_mode(self.recorder):
                self._install(outputs, handles)
                if self._depth == 1:
                    self._gaps.restart(len(handles))
                try:
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
            self._settle()
            if self.session.survey is not None:
                self.session.survey.leaves.extend(self._leaves)
            # Had garbage gone on the way, the growth would be too small for a start without it.
            if graph is not None and error is None and collected_bytes == self.session.collected_bytes:
                self.headroom.measured(
                    graph,
                    start_bytes=start_bytes,
                    peak_bytes=ledger.peak_bytes,
                    num_handles=num_handles,
                    num_needs=self.recorder.predictor.num_made,
                )
            graph = None
            ledger.peak_bytes = max(ledger.peak_bytes, earlier_peak_bytes)
            if self._depth == 0:
                self._leaves.clear()
                self.session.on_backward_end(keeps_graph=keeps_graph)
                if self.session.survey is not None:
                    self._end_survey(error)
            error = None  # an exception that its own frame holds would keep everything in it alive

    def _run_unwatched(
        self, original: Callable[..., Any], graph: Graph, expected_bytes: int, outputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a backward that surely fits. See [Note: never act without need] in headroom.py."""
        ledger = self.session.ledger
        try:
            with without_mode(self.recorder):
                return call_outside(original, outputs, *args, **kwargs)
        finally:
            self._pending.extend(graph.leaves)
            self._settle()
            if not ledger.has_exact_peak:
                ledger.peak_bytes = max(ledger.peak_bytes, expected_bytes)
            self.session.on_backward_end(keeps_graph=False)

    def _end_survey(self, error: BaseException | None) -> None:
        """The backward of an impossible step is over: say what it would have needed.

        An error of its own means that it was not seen to its end.
        """
        survey = self.session.survey
        if survey is None or isinstance(error, BudgetError | KeyboardInterrupt):
            return
        raise survey.error(is_lower_bound=error is not None) from error

    def _install(self, outputs: Any, handles: list[Any]) -> None:
        stack = _roots(outputs)
        seen: set[Any] = set()
        add = seen.add
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            add(node)
            name = node.name()
            if name == ACCUMULATE:
                # Nothing of an ordinary accumulation is ours to see; a hook that steps the optimizer there is.
                if getattr(node.variable, "_post_accumulate_grad_hooks", None):
                    handles.append(node.register_prehook(self._before))
                    handles.append(node.register_hook(functools.partial(self._after, ())))
                continue
            following = [child for child, _ in node.next_functions]
            leaves = [child.variable for child in following if child is not None and child.name() == ACCUMULATE]
            self._leaves.extend(leaves)
            if is_mode_sensitive(name):
                handles.append(node.register_prehook(functools.partial(self._before_blind, name, following)))
                handles.append(node.register_hook(functools.partial(self._after_blind, name, leaves)))
            else:
                handles.append(node.register_prehook(functools.partial(self._before, name=name)))
                handles.append(node.register_hook(functools.partial(self._after, leaves)))
            stack.extend(following)

    @shielded
    def _before(self, gradients: Any, *, name: str = "") -> None:
        self._meet(gradients)
        if self.session.ledger.trace is not None:
            self.session.ledger.trace.on_gradients(gradients)
        self.session.node_name = name
        push_mode(self.recorder)

    @shielded
    def _after(self, leaves: Any, _inputs: Any, _outputs: Any) -> None:
        # Modes of others that the node left behind are theirs to pop; ours is the one that we pushed.
        if top_mode() is self.recorder:
            pop_mode()
        node_name, self.session.node_name = self.session.node_name, ""
        self._pending.extend(leaves)
        self._gaps.begin(node_name, leaves)

    @shielded
    def _before_blind(self, name: str, following: list[Any], gradients: Any) -> None:
        self._meet(gradients)
        sizes = [input_sizes_bytes(child) for child in following if child is not None]
        temporary_bytes = int(max(sizes, default=0) * _TEMPORARY_SHARE.get(name.rstrip("0123456789"), 1.0))
        self._gaps.begin_unseen(name, tuple(sizes), sum(sizes) + temporary_bytes)
        if self.session.ledger.trace is not None:
            self.session.ledger.trace.on_gradients(gradients)
            self.session.ledger.trace.on_opaque_start(gradients, temporary_bytes)

    @shielded
    def _after_blind(self, name: str, leaves: Any, inputs: Any, _outputs: Any) -> None:
        self._gaps.end_unseen()
        trace = self.session.ledger.trace
        if trace is not None:
            for gradient in inputs:
                if gradient is not None:
                    self.session.ledger.know_by_tensor(gradient)
            trace.on_opaque_end("torchdelta.node", inputs, node=name)
        self._meet(inputs)
        self._pending.extend(leaves)
        self._gaps.begin(name, leaves)

    def _meet(self, gradients: Any) -> None:
        """Count gradients that came to be between nodes: the engine's own sums, and what users' tensor hooks made."""
        self._gaps.end()
        if self._pending:
            self._settle()
        ledger = self.session.ledger
        records = ledger.records
        before_bytes = ledger.live_bytes
        for gradient in gradients:
            if gradient is None:
                continue
            if runs_own_ops(gradient.__class__) and self.session.survey is None:
                count(ledger, gradient)
                continue
            if gradient.layout is not torch.strided:
                continue
            try:
                if storage_address(gradient) not in records:
                    ledger.know_by_tensor(gradient)
            except NotImplementedError:  # a wrapper of torch.func has no storage
                continue
        if ledger.live_bytes > before_bytes:
            self.session.residency.room(0, "gradient accumulation")

    def _settle(self) -> None:
        """Count the `.grad` of leaves that were just accumulated into."""
        pending, self._pending = self._pending, []
        ledger = self.session.ledger
        for leaf in pending:
            gradient = leaf.grad
            if gradient is None:
                continue
            if gradient.__class__ is not torch.Tensor:
                count(ledger, gradient)
            elif gradient.layout is torch.strided:
                ledger.know(gradient.untyped_storage())
                if ledger.trace is not None:
                    ledger.trace.on_leaf_gradient(leaf, gradient)


def _roots(outputs: Any) -> list[Any]:
    """Return the nodes from which a backward starts; `outputs` are tensors or gradient edges."""
    return [output.grad_fn if isinstance(output, torch.Tensor) else getattr(output, "node", None) for output in outputs]
