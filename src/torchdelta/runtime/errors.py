"""BudgetError, the one error that needs torch. torchdelta/errors.py lists all errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from torchdelta.errors import TorchdeltaError
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

_WORTH_REPORTING: Final = 0.98  # of the least budget: a smaller saving is not reported


class BudgetError(torch.OutOfMemoryError, TorchdeltaError):
    """A run does not fit into the budget, whatever is evicted.

    The first line of its text says what happened and which budget is enough; further lines say what takes the memory.

    It is a `torch.OutOfMemoryError`, and so a `RuntimeError`, with one argument. That argument contains the words by
    which batch-size finders recognise an out-of-memory error, so that they shrink the batch and go on:
    " out of memory." (accelerate), "CUDA" beside it on a CUDA device, and torch's own "DefaultCPUAllocator: can't
    allocate memory" on CPU (Lightning).

    Attributes:
        budget_bytes: The budget that was too small.
        least_budget_bytes: The least budget that the run needs, including the optimizer's states, and gradients that
            are not freed between one backward and the next forward. With `Config(decision_class="all")`, what of them
            could be swapped out at the moment of the highest need is not included.
        least_freeing_gradients_bytes: The least budget if all gradients are set to None before each forward.
        op: The op that needs the least budget.
        module: The path of the module whose forward ran this op; empty outside of modules.
        groups: Bytes by group (parameters, gradients, ...) at that op; their sum is `least_budget_bytes`.
        largest: The largest tensors at that op, as names and bytes.
        is_lower_bound: Whether the run may need more, because it was not surveyed to the end of a backward, or because
            the space for swapped data is too small for all parameters, gradients and states.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        least_budget_bytes: int,
        op: str,
        largest: list[tuple[str, int]],
        is_lower_bound: bool = False,
        groups: dict[str, int] | None = None,
        module: str = "",
        swapped_out_bytes: int = 0,
        dropped_bytes: int = 0,
        least_freeing_gradients_bytes: int | None = None,
        lacked_capacity: bool = False,
        tier_error: str = "",
        device_type: str = "cpu",
    ) -> None:
        self.budget_bytes = budget_bytes
        self.least_budget_bytes = least_budget_bytes
        self.least_freeing_gradients_bytes: int = least_freeing_gradients_bytes or least_budget_bytes
        self.op = op
        self.module = module
        self.groups: dict[str, int] = groups or {}
        self.largest = largest
        self.is_lower_bound = is_lower_bound
        kind = "CUDA memory budget" if device_type == "cuda" else "memory budget"
        needs, gives = ("needs at least", "that or more") if is_lower_bound else ("needs", "that")
        lines = [
            (
                f"the {kind} of {_exactly(budget_bytes, least_budget_bytes)} is out of memory. This run {needs} "
                f"{_need(least_budget_bytes)}: set the budget to {gives}, or use a smaller batch"
            ),
            f"  the most memory is needed at {op}{f' in module {module}' if module else ''}",
        ]
        if is_lower_bound and not (lacked_capacity or tier_error):
            lines.append("  this is the need up to that op: the rest of the step was not seen, and may need much more")
        if self.groups:
            lines.append(f"  in use there: {_listed(self.groups.items())}")
        if largest:
            lines.append(f"  largest tensors there: {_listed(largest)}")
        if swapped_out_bytes or dropped_bytes:
            lines.append(
                f"  everything that can be evicted was: {format_bytes(swapped_out_bytes)} swapped out, "
                f"{format_bytes(dropped_bytes)} dropped to be recomputed"
            )
        if tier_error:
            lines.append(f"  the space for swapped data fails now: {tier_error}")
        elif lacked_capacity:
            lines.append(
                "  the space for swapped data was full: with a larger host_budget or disk_budget, or more space on the "
                "disk, a smaller memory budget may be enough"
            )
        if self.least_freeing_gradients_bytes < _WORTH_REPORTING * least_budget_bytes:
            bound = "at least " if is_lower_bound else "about "
            lines.append(
                f"  if all gradients are set to None before each forward, it needs {bound}"
                f"{_need(self.least_freeing_gradients_bytes)}"
            )
        if device_type == "cpu":
            lines.append("  in torch's words: DefaultCPUAllocator: can't allocate memory within this budget")
        super().__init__("\n".join(lines))


def _need(size_bytes: int) -> str:
    """Return a size to set the budget to: whoever types it as text or as bytes has enough."""
    return f"{format_bytes(size_bytes, rounds_up=True)} ({size_bytes} bytes)"


def _exactly(size_bytes: int, other_bytes: int) -> str:
    """Return a size that can be told from another one."""
    text = format_bytes(size_bytes)
    is_alike = text in (format_bytes(other_bytes), format_bytes(other_bytes, rounds_up=True))
    return f"{text} ({size_bytes} bytes)" if is_alike else text


def _listed(sizes: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {format_bytes(size_bytes)}" for name, size_bytes in sizes)
