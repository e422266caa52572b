"""The one error of the runtime that needs torch: a budget that cannot hold.

The tree is drawn in torchdelta/errors.py.
"""

from __future__ import annotations

import torch

from torchdelta.errors import TorchdeltaError
from torchdelta.units import format_bytes


class BudgetError(torch.OutOfMemoryError, TorchdeltaError):
    """The step does not fit into the budget, whatever leaves the device.

    It is a `torch.OutOfMemoryError` with one argument that contains " out of memory.", which is how batch-size finders
    recognise an out-of-memory error, so that they shrink the batch and go on.

    Attributes:
        budget_bytes: The budget that was too small.
        least_budget_bytes: The least budget at which this step would have got through.
        op: The op that sets it.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        least_budget_bytes: int,
        op: str,
        largest: list[tuple[str, int]],
        is_lower_bound: bool = False,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.least_budget_bytes = least_budget_bytes
        self.op = op
        bound = "at least " if is_lower_bound else ""
        text = (
            f"the memory budget of {format_bytes(budget_bytes)} is out of memory. "
            f"The least budget for this step is {bound}{format_bytes(least_budget_bytes)} "
            f"({least_budget_bytes} bytes), set by {op}"
        )
        if largest:
            text += "; largest there: " + ", ".join(
                f"{name} {format_bytes(size_bytes)}" for name, size_bytes in largest
            )
        super().__init__(text + ". Give it that, or a smaller batch.")
