"""What a run needs in the class *all*, in which gradients, parameters and optimizer states leave between their uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from torchdelta.runtime.memory.candidates import LEAST_BYTES
from torchdelta.runtime.memory.room import SMALL_PART
from torchdelta.runtime.state.kinds import local_part, tensors_in
from torchdelta.runtime.survey.first_step import foresee_first_step, steps_by_lists
from torchdelta.runtime.survey.inventory import HELD, ONE_STEP, SMALL
from torchdelta.runtime.survey.whole_run import Needed, RunNeed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.state.ledger import Ledger
    from torchdelta.runtime.survey.absent import Absent

__all__ = ["EverythingNeed", "Piece", "piece_of_step"]

_MOST_STATES: Final = 2  # as large as the parameter, of a small parameter: those of Adam


class EverythingNeed(RunNeed):
    """Collects the need of a run of the class *all* while one of its passes is surveyed.

    The need of each moment is already less what could be swapped out then, gradients and states among it. What comes
    later leaves, too, except for small tensors. So the run needs the most of three: the forward with what the program
    holds of the step before, the backward, and an optimizer's step of one parameter beside what cannot leave.
    """

    def __init__(self, ledger: Ledger, mode: Any, *, is_first_pass: bool, absent: Absent) -> None:
        super().__init__(ledger, mode, is_first_pass=is_first_pass)
        self._absent = absent

    def _gradient_bytes(self) -> int:
        return 0  # those that cannot leave are in the need of the moment

    def finish(self, *, is_lower_bound: bool, in_optimizer: bool = False) -> Needed:
        """Return what the run needs. See `RunNeed.finish`."""
        del in_optimizer
        self.find_optimizers()
        trained = self._trained()
        small_bytes = self._small_bytes(trained, is_lower_bound=is_lower_bound)
        small_bytes += (1 + _MOST_STATES) * sum(
            size_bytes
            for leaf in trained.values()
            if (size_bytes := local_part(leaf).nbytes) < LEAST_BYTES and leaf.grad is None
        )
        outputs_bytes = 0 if is_lower_bound or not self._is_first_pass else self._held_outputs_bytes()
        if self._forward_bytes < self._backward_bytes:
            outputs_bytes = max(0, self._forward_bytes + outputs_bytes - self._backward_bytes)
        pass_bytes = max(self._forward_bytes, self._backward_bytes) + outputs_bytes + small_bytes
        here_bytes = small_bytes
        if not is_lower_bound:  # else the pass is not over, so more is here now than at the optimizer's step
            here_bytes += self._ledger.usage.total_bytes - self._absent.size_bytes(self.leaves.values())
        optimizer_bytes, name = 0, ""
        for optimizer in self.optimizers:
            with self._without_mode():
                needed_bytes = _step_bytes(optimizer, here_bytes, lambda leaf: id(leaf) in trained)
            if needed_bytes > optimizer_bytes:
                optimizer_bytes, name = needed_bytes, type(optimizer).__name__
        is_optimizer_most = optimizer_bytes > pass_bytes
        size_bytes = max(pass_bytes, optimizer_bytes)
        return Needed(
            size_bytes=size_bytes,
            freeing_bytes=size_bytes,
            optimizer=name if is_optimizer_most else "",
            passed_bytes=0,
            gradient_bytes=0,
            more={SMALL: small_bytes}
            | ({ONE_STEP: optimizer_bytes - here_bytes} if is_optimizer_most else {HELD: outputs_bytes}),
        )


class Piece(NamedTuple):
    """What an optimizer's step needs at once where parameters, gradients and states leave.

    Attributes:
        size_bytes: The largest parameter with its gradient, states and temporaries. An optimizer that is not torch's
            may need all of its parameters at once.
        temporary_share: Bytes of temporaries for each byte of parameters, gradients and states.
        is_list: Whether it steps several parameters at once, in pieces of a part of the budget.
        is_estimate: Whether the states and temporaries are estimated.
    """

    size_bytes: int = 0
    temporary_share: float = 0.0
    is_list: bool = False
    is_estimate: bool = False


def piece_of_step(optimizer: torch.optim.Optimizer, is_stepped: Callable[[torch.Tensor], bool]) -> Piece:
    """Return what an optimizer's step needs at once.

    Args:
        optimizer: The optimizer.
        is_stepped: Returns whether a parameter will have a gradient in that step.
    """
    sizes_bytes = [
        local_part(parameter).nbytes
        for group in optimizer.param_groups
        for parameter in group["params"]
        if is_stepped(parameter)
    ]
    total_bytes = sum(sizes_bytes)
    if not total_bytes:
        return Piece()
    step = foresee_first_step(optimizer, is_stepped)
    existing_bytes = sum(tensor.nbytes for tensor in tensors_in(list(optimizer.state.values())))
    state_bytes = max(existing_bytes, step.state_bytes)
    is_torchs = type(optimizer).__module__.partition(".")[0] == "torch"
    is_cut = is_torchs and not isinstance(optimizer, torch.optim.LBFGS)  # which flattens all parameters into one
    is_list = is_cut and any(steps_by_lists(group) or group.get("fused") for group in optimizer.param_groups)
    share = max(sizes_bytes) / total_bytes if is_cut else 1.0
    held_bytes = int((2 * total_bytes + state_bytes) * share)
    return Piece(
        size_bytes=held_bytes + step.temporary_bytes,  # the lists of the trial are cut, too
        temporary_share=step.temporary_bytes / held_bytes,
        is_list=is_list,
        is_estimate=step.is_estimate or not is_torchs,
    )


def _step_bytes(optimizer: torch.optim.Optimizer, here_bytes: int, is_stepped: Callable[[torch.Tensor], bool]) -> int:
    """Return what a run needs in an optimizer's step, beside what cannot leave; 0 if it steps nothing."""
    piece = piece_of_step(optimizer, is_stepped)
    if not piece.size_bytes:
        return 0
    needed_bytes = here_bytes + piece.size_bytes
    if piece.is_list:  # a piece may take this part of the budget: see [Note: lists in pieces] in record/pieces.py
        needed_bytes = max(needed_bytes, int(here_bytes / (1 - (1 + piece.temporary_share) / SMALL_PART)))
    return needed_bytes
