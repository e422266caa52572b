"""What a run needs in the class *all*, in which gradients, parameters and optimizer states leave between their uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta.runtime.memory import candidates
from torchdelta.runtime.memory.room import SMALL_PART
from torchdelta.runtime.state.kinds import local_part
from torchdelta.runtime.survey.first_step import StepNeed, foresee_first_step, foresee_step, states_of
from torchdelta.runtime.survey.inventory import GRADIENTS, HELD, NO_SWAP_SPACE, ONE_STEP, SMALL
from torchdelta.runtime.survey.whole_run import Needed, RunNeed, gradient_bytes_of, parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.memory.room import Room
    from torchdelta.runtime.state.ledger import Ledger
    from torchdelta.runtime.survey.absent import Absent

__all__ = ["EverythingNeed", "too_large_bytes"]

# A piece of lists takes up to a part of the budget ([Note: lists in pieces] in record/pieces.py), and its temporaries.
_MOST_OF_PIECES: Final = 2 / SMALL_PART


class EverythingNeed(RunNeed):
    """Collects the need of a run of the class *all* while one of its passes is surveyed.

    The need of each moment is already less what could be swapped out then, gradients and states among it. What comes
    later leaves, too, except for small tensors. So the run needs the most of three: the forward with what the program
    holds of the step before, the backward, and the largest op of an optimizer's step, each beside what cannot leave.
    """

    def __init__(self, ledger: Ledger, mode: Any, *, is_first_pass: bool, is_in_step: bool, absent: Absent) -> None:
        super().__init__(ledger, mode, is_first_pass=is_first_pass, is_in_step=is_in_step)
        self._absent = absent
        self._at_most_bytes = 0  # the need at the moment that `note` has found to be a new maximum

    def note(self, needed_bytes: int) -> bool:
        """Record the need at this moment. See `RunNeed.note`."""
        is_most = super().note(needed_bytes)
        if is_most:
            self._at_most_bytes = needed_bytes
        return is_most

    def _gradient_bytes(self) -> int:
        """Return the bytes of the gradients that stay."""
        return sum(gradient_bytes_of(leaf) for leaf in self.leaves.values() if not self._absent.owns(leaf))

    def finish(self, *, is_lower_bound: bool, in_optimizer: bool = False) -> Needed:
        """Return what the run needs. See `RunNeed.finish`."""
        del in_optimizer
        self.find_optimizers()
        trained = self._trained()
        with self._without_mode():
            steps = [
                (optimizer, foresee_step(optimizer, [p for p in parameters_of(optimizer) if id(p) in trained]))
                for optimizer in self.optimizers
            ]
        small_bytes = self._small_bytes(trained, is_lower_bound=is_lower_bound)
        small_bytes += sum(step.small_state_bytes for _, step in steps)
        small_bytes += sum(
            size_bytes
            for leaf in trained.values()
            if leaf.grad is None and (size_bytes := local_part(leaf).nbytes) < candidates.LEAST_BYTES
        )
        outputs_bytes = 0 if is_lower_bound or not self._is_first_pass else self._held_outputs_bytes()
        if self._forward_bytes < self._backward_bytes:
            outputs_bytes = max(0, self._forward_bytes + outputs_bytes - self._backward_bytes)
        staying_bytes = sum(local_part(leaf).nbytes for leaf in trained.values() if not self._absent.owns(leaf))
        pass_bytes = max(self._forward_bytes, self._backward_bytes, self._without_gradients_bytes + staying_bytes)
        later_gradient_bytes = pass_bytes - self._at_most_bytes
        pass_bytes += outputs_bytes + small_bytes
        here_bytes = small_bytes
        if not is_lower_bound:  # else the pass is not over, so more is here now than at the optimizer's step
            here_bytes += self._ledger.usage.total_bytes - self._absent.size_bytes(self.leaves.values())
        needs = [(_with_step(here_bytes, step), type(optimizer).__name__) for optimizer, step in steps]
        optimizer_bytes, name = max(needs, default=(0, ""))
        is_optimizer_most = optimizer_bytes > pass_bytes
        lacking_bytes = self._lacking_bytes(trained)
        size_bytes = max(pass_bytes, optimizer_bytes) + lacking_bytes
        return Needed(
            size_bytes=size_bytes,
            freeing_bytes=size_bytes,
            optimizer=name if is_optimizer_most else "",
            passed_bytes=0,
            gradient_bytes=0,
            more={SMALL: small_bytes, NO_SWAP_SPACE: lacking_bytes}
            | (
                {ONE_STEP: optimizer_bytes - here_bytes}
                if is_optimizer_most
                else {HELD: outputs_bytes, GRADIENTS: later_gradient_bytes}
            ),
        )

    def _lacking_bytes(self, trained: dict[int, torch.Tensor]) -> int:
        """Return the bytes of persistent tensors for which the tier has no space, in later steps, too."""
        space_bytes = self._absent.space_bytes()
        if space_bytes is None:
            return 0
        persistent_bytes = sum(local_part(leaf).nbytes for leaf in self.leaves.values() if self._absent.owns(leaf))
        persistent_bytes += sum(local_part(leaf).nbytes for leaf in trained.values() if self._absent.owns(leaf))
        for optimizer in self.optimizers:
            with self._without_mode():
                foreseen = foresee_first_step(optimizer, lambda leaf: leaf.grad is not None or id(leaf) in trained)
            states = [state for parameter in parameters_of(optimizer) for state in states_of(optimizer, parameter)]
            persistent_bytes += max(foreseen.state_bytes, sum(state.nbytes for state in states))  # some may exist
        return max(0, max(persistent_bytes, self._absent.known_bytes()) - space_bytes)


def too_large_bytes(
    optimizer: torch.optim.Optimizer, stepped: list[torch.Tensor], room: Room, absent_of: Callable[[], Absent]
) -> int:
    """Return what the largest op of an optimizer's step needs if that certainly does not fit the budget, else 0.

    Args:
        optimizer: The optimizer.
        stepped: Its parameters that have gradients.
        room: Has the budget.
        absent_of: Finds out what could be swapped out. That may take a second.
    """
    step = foresee_step(optimizer, stepped)
    needed_bytes = step.op_bytes + step.small_state_bytes
    room.usage.ask_counter(fresh=True)
    if step.is_estimate or room.budget_bytes is None or room.usage.most_bytes + needed_bytes <= room.budget_bytes:
        return 0  # an estimate must not refuse what fits
    room.transfers.end_pause()  # an outage must not refuse what fits
    absent = absent_of()
    read = [*stepped, *(p.grad for p in stepped if p.grad is not None)]
    read += [state for p in stepped for state in states_of(optimizer, p)]
    if any(t.layout is not torch.strided or (t.nbytes >= candidates.LEAST_BYTES and absent.stays(t)) for t in read):
        return 0  # a part of what the step reads stays, so that it would count twice
    absent_bytes, space_bytes = absent.size_bytes(()), absent.space_bytes()
    if space_bytes is not None:
        absent_bytes = min(absent_bytes, space_bytes)
    here_bytes = room.usage.total_bytes - room.evictable_bytes() - absent_bytes
    return needed_bytes if here_bytes + needed_bytes > room.budget_bytes else 0


def _with_step(here_bytes: int, step: StepNeed) -> int:
    """Return what a run needs in an optimizer's step, beside what cannot leave; 0 if it steps nothing."""
    if not step.op_bytes:
        return 0
    needed_bytes = here_bytes + step.op_bytes
    return max(needed_bytes, int(here_bytes / (1 - _MOST_OF_PIECES))) if step.takes_lists else needed_bytes
