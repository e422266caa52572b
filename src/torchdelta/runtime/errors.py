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

    It is a `torch.OutOfMemoryError` with one argument that contains " out of memory.", which is how batch-size finders
    recognise an out-of-memory error, so that they shrink the batch and go on.

    Attributes:
        budget_bytes: The budget that was too small.
        least_budget_bytes: The least budget that the run needs, including the optimizer's states, and gradients that
            are not freed between one backward and the next forward.
        least_freeing_gradients_bytes: The least budget if all gradients are set to None before each forward.
        op: The op that needs the least budget.
        module: The path of the module whose forward ran this op; empty outside of modules.
        groups: Bytes by group (parameters, gradients, ...) at that op; their sum is `least_budget_bytes`.
        largest: The largest tensors at that op, as names and bytes.
        is_lower_bound: Whether the run may need more, because it was not surveyed to the end of a backward.
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
    ) -> None:
        self.budget_bytes = budget_bytes
        self.least_budget_bytes = least_budget_bytes
        self.least_freeing_gradients_bytes = least_freeing_gradients_bytes or least_budget_bytes
        self.op = op
        self.module = module
        self.groups = groups or {}
        self.largest = largest
        self.is_lower_bound = is_lower_bound
        bound = "at least " if is_lower_bound else ""
        first_line = (
            f"the memory budget of {format_bytes(budget_bytes)} is out of memory. "
            f"The least budget for this run is {bound}{format_bytes(least_budget_bytes)} "
            f"({least_budget_bytes} bytes), set by {op}{f' in {module}' if module else ''}"
            ". Give it that, or a smaller batch."
        )
        lines = [first_line]
        if self.groups:
            lines.append(f"needed there: {_listed(self.groups.items())}")
        if largest:
            lines.append(f"largest there: {_listed(largest)}")
        if swapped_out_bytes or dropped_bytes:
            lines.append(
                f"every buffer that can be evicted was evicted: {format_bytes(swapped_out_bytes)} swapped out, "
                f"{format_bytes(dropped_bytes)} dropped to be recomputed"
            )
        if lacked_capacity:
            lines.append(
                "the tier was full, so some buffers could not be swapped out: a smaller memory budget may be enough "
                "with a larger host_budget or disk_budget"
            )
        if self.least_freeing_gradients_bytes < _WORTH_REPORTING * least_budget_bytes:
            lines.append(
                f"{bound}{format_bytes(self.least_freeing_gradients_bytes)} ({self.least_freeing_gradients_bytes} "
                "bytes) is enough if all gradients are set to None before each forward"
            )
        super().__init__("\n".join(lines))


def _listed(sizes: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {format_bytes(size_bytes)}" for name, size_bytes in sizes)
