"""What a plan was asked for: the step, and what its program has to know of its request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdelta.runtime.follow.program import Key
    from torchdelta.runtime.follow.step_log import StepLog
    from torchdelta.trace.model import Trace

__all__ = ["Asked"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request for a plan.

    Attributes:
        key: Which step it is.
        start_bytes: The bytes in use at its first save.
        step: Its trace, and what was logged while it was traced.
        margin_bytes: So much less than the budget was asked for.
        num_plans: How many plans of this step were asked for, with this one.
        num_retraces: How often the step has been traced again.
        unseen_bytes: Bytes in use that no trace shows.
    """

    key: Key
    start_bytes: int
    step: tuple[Trace, StepLog]
    margin_bytes: int
    num_plans: int
    num_retraces: int
    unseen_bytes: int

    def without_margin(self) -> Asked | None:
        """Return this request for all of the budget that a plan can use; None if it is not the first one."""
        return replace(self, margin_bytes=self.unseen_bytes, num_plans=2) if self.num_plans == 1 else None
