"""The outages of a tier: after a copy that failed it is left alone for a while, each time for longer.

One failed copy says little: a disk that was full a moment ago may have room again, and a lost link may come back. Many
in a row say much, and each costs a wait. So the pause after a failure grows with every further one, from a few ops to
many steps, and one copy that arrives ends the outage. Meanwhile what can be recomputed leaves by that way, and the rest
stays. The pauses are counted in ops and not in seconds, so that a run can be repeated.
"""

from __future__ import annotations

import logging
from typing import Final

from torchdelta.runtime import faults

_FIRST_PAUSE_OPS: Final = 32
_PAUSE_GROWTH: Final = 4
_LONGEST_PAUSE_OPS: Final = 1 << 17

_logger = logging.getLogger("torchdelta")


class Outage:
    """Whether a tier may be asked now. Mutable; one for each scope."""

    __slots__ = ("num_failures", "resume_at")

    def __init__(self) -> None:
        self.num_failures = 0  # since a copy arrived
        self.resume_at = 0  # op clock

    def is_on(self, clock: int) -> bool:
        """Say whether the tier is to be left alone at this op."""
        return self.num_failures > 0 and clock < self.resume_at

    def begin(self, clock: int, error: Exception) -> None:
        """Note a failure. The first is told in the log, so that nobody wonders where the time goes."""
        if clock < self.resume_at:
            return  # a copy that was under way when the first one failed: the same outage
        if self.num_failures == 0:
            # As text: a handler that keeps its records would keep the error, its frames, and the storages in them.
            _logger.warning("%s: for now what can be recomputed is recomputed, and the rest stays", str(error))
        pause_ops = min(_FIRST_PAUSE_OPS * _PAUSE_GROWTH**self.num_failures, _LONGEST_PAUSE_OPS)
        self.num_failures += 1
        self.resume_at = clock + pause_ops
        if faults.is_disabled("tier-retry"):
            self.resume_at = 1 << 62

    def end(self) -> None:
        """Note a copy that arrived."""
        if self.num_failures:
            _logger.info("the tier works again after %d failures", self.num_failures)
            self.num_failures = 0
            self.resume_at = 0
