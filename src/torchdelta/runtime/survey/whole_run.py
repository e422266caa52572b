"""Computes what a whole run needs from what one surveyed pass needed.

[Note: the budget of a run]
The surveyed pass is often the first: optimizer states do not exist yet, and neither do gradients at its start. During
later passes both exist. So the need at each moment of the pass is recorded without the gradients that exist then, and
the run needs the largest of these values plus all gradients plus all states. Gradients exist from the start of a
forward in the second micro-batch of an accumulation, and after `zero_grad(set_to_none=False)`. If they are set to None
before each forward, a smaller budget is enough, which is reported as well. The optimizer's step needs parameters,
gradients, states and its own temporaries. Gradients that the program frees in the backward, as where an optimizer steps
in a hook of each parameter, do not add up: of these, the needs of the pass contain as many as there were at once.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.fake import FakeTensor
from torchdelta._torch.modes import without_mode
from torchdelta._torch.tensors import is_leaf
from torchdelta.runtime.state.buffer import OpEntry
from torchdelta.runtime.state.instances import instances_of, living_optimizers
from torchdelta.runtime.state.kinds import local_part
from torchdelta.runtime.state.tape import RANDOM_STATE_BYTES
from torchdelta.runtime.survey.first_step import FirstStep, foresee_first_step
from torchdelta.runtime.survey.inventory import HELD, SMALL, STATES, TEMPORARIES
from torchdelta.runtime.survey.optimizer_copy import inner_of

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Container, Iterable

    from torchdelta.runtime.state.ledger import Ledger

# Small tensors that loops create between the passes: the norm of each gradient for clipping, the losses of earlier
# steps, counters.
_SMALL_BYTES_PER_LEAF: Final = 64
_SMALL_BYTES: Final = 1024
# Evictions are ranked by measured times, and an op on real tensors may keep slightly more than one on fake tensors.
_MARGIN: Final = 1 / 128
# Gradients that are gone after the backward may have been moved, if tensors of so large a share of their bytes live.
_MOVED_SHARE: Final = 0.1
_HALF: Final = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Needed:
    """What a run needs, and what that consists of."""

    size_bytes: int
    freeing_bytes: int  # if gradients are set to None before each forward
    optimizer: str  # the class of the optimizer whose step needs the most; empty if an op of the pass does
    passed_bytes: int  # the peak of the pass before the survey, where that decides; else 0
    gradient_bytes: int
    more: dict[str, int]  # bytes by group, in addition to those of the pass and the gradients


class RunNeed:
    """Collects the need of a run while one of its passes is surveyed."""

    def __init__(
        self, ledger: Ledger, mode: Any, *, is_first_pass: bool, is_in_step: bool = False, passed_bytes: int = 0
    ) -> None:
        self._ledger = ledger
        self._mode = mode
        self._is_first_pass = is_first_pass
        self._is_in_step = is_in_step  # whether the survey begins in an optimizer's step
        self._passed_bytes = passed_bytes  # the peak of the pass, if the survey begins after it
        self._without_gradients_bytes = 0  # the largest need in the pass, without the gradients that existed then
        self._forward_bytes = 0  # the largest need before the backward
        self._backward_bytes = 0
        self.optimizers: list[torch.optim.Optimizer] = []
        self.leaves: dict[int, torch.Tensor] = {}  # leaves whose gradients stay until the optimizer's step
        self._reached: set[int] = set()  # ids of the leaves that a backward reaches
        self.find_optimizers()

    def find_optimizers(self) -> None:
        """Find the optimizers that there are now: where the model itself does not fit, they are made in the survey."""
        self.optimizers = _outer_optimizers()
        for optimizer in self.optimizers:
            self._add_leaves(parameters_of(optimizer))

    def add_backward_leaves(self, leaves: Iterable[torch.Tensor]) -> None:
        """Add leaves that a backward reaches. Only parameters: the inputs of a checkpointed block are leaves too."""
        parameters = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter)]
        self._reached.update(map(id, parameters))
        self._add_leaves(parameters)

    def _add_leaves(self, leaves: Iterable[torch.Tensor]) -> None:
        for leaf in leaves:
            if leaf.requires_grad and leaf.device == self._ledger.device:
                self.leaves[id(leaf)] = leaf

    def note(self, needed_bytes: int) -> bool:
        """Record the need at this moment of the pass. Return whether it is a new maximum for the run."""
        alone_bytes = needed_bytes - self._gradient_bytes()
        is_most = alone_bytes > self._without_gradients_bytes
        self._without_gradients_bytes = max(self._without_gradients_bytes, alone_bytes)
        if graph_task_id() == -1:
            self._forward_bytes = max(self._forward_bytes, needed_bytes)
        else:
            self._backward_bytes = max(self._backward_bytes, needed_bytes)
        return is_most

    def _gradient_bytes(self) -> int:
        return sum(gradient_bytes_of(leaf) for leaf in self.leaves.values())

    def _gone(self, trained: dict[int, torch.Tensor], *, is_lower_bound: bool, in_optimizer: bool) -> set[int]:
        """Return the leaves whose gradients do not live until the optimizer's step: the program frees them earlier."""
        if in_optimizer and graph_task_id() != -1:  # it steps in the backward, as each gradient comes
            return set(trained)
        # A backward that has reached a leaf has made its gradient. If that is gone, it was freed, or moved elsewhere.
        gone = {key for key, leaf in trained.items() if key in self._reached and leaf.grad is None}
        if is_lower_bound or not gone:
            return set()
        gone_bytes = sum(local_part(trained[key]).nbytes for key in gone)
        return gone if _MOVED_SHARE * gone_bytes > self._held_outputs_bytes() else set()

    def finish(self, *, is_lower_bound: bool, in_optimizer: bool = False) -> Needed:
        """Return what the run needs.

        Args:
            is_lower_bound: Whether the pass was not surveyed to its end.
            in_optimizer: Whether an optimizer is about to step.
        """
        self.find_optimizers()
        trained = self._trained()
        idle_gradients_bytes = sum(gradient_bytes_of(leaf) for key, leaf in self.leaves.items() if key not in trained)
        steps = [
            (optimizer, self._first_step(optimizer, trained))
            for optimizer in self.optimizers
            if any(id(parameter) in trained for parameter in parameters_of(optimizer))
        ]
        gone = self._gone(trained, is_lower_bound=is_lower_bound, in_optimizer=in_optimizer)
        all_gradients_bytes = idle_gradients_bytes
        all_gradients_bytes += sum(local_part(leaf).nbytes for key, leaf in trained.items() if key not in gone)
        small_bytes = self._small_bytes(trained, is_lower_bound=is_lower_bound)
        outputs_bytes = 0 if is_lower_bound or not self._is_first_pass else self._held_outputs_bytes()
        state_bytes = sum(step.state_bytes for _, step in steps)
        later_bytes = state_bytes + small_bytes
        freeing_bytes = max(self._forward_bytes + outputs_bytes, self._backward_bytes) + later_bytes
        if self._forward_bytes < self._backward_bytes:
            outputs_bytes = max(0, self._forward_bytes + outputs_bytes - self._backward_bytes)
        pass_bytes = self._without_gradients_bytes + all_gradients_bytes
        pass_bytes = max(pass_bytes, self._forward_bytes, self._backward_bytes) + later_bytes + outputs_bytes
        resident_bytes = self._resident_bytes(is_lower_bound=is_lower_bound)
        temporary_bytes, name = max(((step.temporary_bytes, type(o).__name__) for o, step in steps), default=(0, ""))
        optimizer_bytes = resident_bytes + all_gradients_bytes + later_bytes + temporary_bytes
        passed_bytes = self._passed_bytes + all_gradients_bytes + later_bytes if self._passed_bytes else 0
        is_passed_most = passed_bytes > max(pass_bytes, optimizer_bytes)
        if is_passed_most:
            freeing_bytes = max(freeing_bytes, self._passed_bytes + later_bytes)
        is_optimizer_most = bool(name) and optimizer_bytes > pass_bytes and not is_passed_most
        more = {STATES: state_bytes, SMALL: small_bytes}
        return Needed(
            size_bytes=max(pass_bytes, optimizer_bytes, passed_bytes),
            freeing_bytes=max(freeing_bytes, optimizer_bytes),
            optimizer=name if is_optimizer_most else "",
            passed_bytes=self._passed_bytes if is_passed_most else 0,
            gradient_bytes=all_gradients_bytes,
            more=more
            | ({TEMPORARIES: temporary_bytes} if is_optimizer_most else {HELD: 0 if is_passed_most else outputs_bytes}),
        )

    def _trained(self) -> dict[int, torch.Tensor]:
        """Return the leaves that have gradients after the pass, as far as is known, by their ids."""
        copies = self._float32_copies()
        return {
            key: leaf
            for key, leaf in self.leaves.items()
            if key in self._reached
            or self._was_used(leaf)
            # In an optimizer's step: leaves that no op has read may have gradients, as float32 copies of parameters do.
            or (self._is_in_step and leaf.grad is not None)
            or key in copies
        }

    def _float32_copies(self) -> set[int]:
        """Return the ids of the leaves that are probably float32 copies of half-precision parameters.

        Before an optimizer's step, no op has read them. A leaf counts if the backward reaches a half-precision
        parameter of its shape that no optimizer has.
        """
        optimized = {id(parameter) for optimizer in self.optimizers for parameter in parameters_of(optimizer)}
        shapes = collections.Counter(
            leaf.shape
            for key, leaf in self.leaves.items()
            if key in self._reached and key not in optimized and leaf.dtype in _HALF
        )
        copies = set()
        for key in optimized:
            leaf = self.leaves.get(key)
            if leaf is None or key in self._reached or leaf.dtype is not torch.float32 or not shapes[leaf.shape]:
                continue
            shapes[leaf.shape] -= 1
            copies.add(key)
        return copies

    def _small_bytes(self, trained: dict[int, torch.Tensor], *, is_lower_bound: bool) -> int:
        """Return what small tensors may take beside the pass, and a margin."""
        small_bytes = _SMALL_BYTES + _SMALL_BYTES_PER_LEAF * len(trained)
        small_bytes += int(_MARGIN * self._without_gradients_bytes)
        return small_bytes + (0 if is_lower_bound else self._random_states_bytes())

    def _without_mode(self) -> contextlib.AbstractContextManager[bool]:
        """Run ops without the recorder."""
        return without_mode(self._mode)

    def _first_step(self, optimizer: torch.optim.Optimizer, trained: Container[int]) -> FirstStep:
        """Return what an optimizer's step will allocate in addition to the states it has already."""
        with self._without_mode():
            step = foresee_first_step(optimizer, lambda leaf: leaf.grad is not None or id(leaf) in trained)
        has_states = bool((inner_of(optimizer) or optimizer).state)
        return FirstStep(0, step.temporary_bytes, step.is_estimate) if has_states else step

    def _resident_bytes(self, *, is_lower_bound: bool) -> int:
        """Return the bytes at an optimizer's step, without gradients and new states."""
        if not is_lower_bound:
            return self._ledger.usage.total_bytes - self._gradient_bytes()
        # The pass is not over, so more is alive now than at the step. The parameters are a lower bound.
        return self.parameter_bytes()

    def parameter_bytes(self) -> int:
        """Return the bytes of the parameters that ops have read."""
        return sum(local_part(leaf).nbytes for leaf in self.leaves.values() if self._was_used(leaf))

    def _was_used(self, leaf: torch.Tensor) -> bool:
        """Return whether an op has read a leaf since the scope opened."""
        try:
            record = self._ledger.find(leaf)
        except RuntimeError:
            return False
        return record is not None and record.current is not None

    def _held_outputs_bytes(self) -> int:
        """Return the bytes of outputs that the program still holds after its backward, such as the loss and logits.

        They stay alive during the next forward, until its outputs replace them. Those that need no gradient count if
        the survey has made them: of the real ones it is not known whether the next step makes them again.
        """
        found: dict[int, int] = {}
        gradients = {id(leaf.grad) for leaf in self.leaves.values()}
        for tensor in instances_of(torch.Tensor):
            is_made = isinstance(tensor, FakeTensor) and id(tensor) not in gradients
            if tensor.layout is torch.strided and (is_made or not is_leaf(tensor)):
                record = self._ledger.find(tensor)
                if record is not None:
                    found[record.id] = record.size_bytes
        return sum(found.values())

    def _random_states_bytes(self) -> int:
        """Return the bytes of the generators' states that stay recorded beside the next pass, as for a random input."""
        if self._ledger.device.type != "cpu":
            return 0  # a state is kept on the host
        return RANDOM_STATE_BYTES * sum(entry.random_state is not None for entry in instances_of(OpEntry))


def _outer_optimizers() -> list[torch.optim.Optimizer]:
    """Return the optimizers of this process, without those inside another one (a wrapper)."""
    found = living_optimizers()
    inner = {id(value) for optimizer in found for value in vars(optimizer).values() if value is not optimizer}
    return [optimizer for optimizer in found if id(optimizer) not in inner]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradient_bytes_of(leaf: torch.Tensor) -> int:
    """Return the bytes of a leaf's gradient; sparse ones have no storage that counts."""
    return local_part(leaf.grad).nbytes if leaf.grad is not None and leaf.grad.layout is torch.strided else 0
