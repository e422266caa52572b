"""Outages of a tier: after a failed copy the tier is not used for a while, longer with every further failure.

One failed copy says little: a disk that was full a moment ago may have space again, and a lost connection may come
back. Many failures in a row mean that the tier is broken, and each attempt costs time. So the pause after a failure
grows with every further failure, from a few ops to many steps, and one successful copy ends the outage. During a pause,
buffers that can be recomputed are dropped instead, and the others stay on the device. Pauses are counted in ops and not
in seconds, so that runs are reproducible.
"""

from __future__ import annotations

import logging
from typing import Final

_FIRST_PAUSE_OPS: Final = 32
_PAUSE_GROWTH: Final = 4
_LONGEST_PAUSE_OPS: Final = 1 << 17

_logger = logging.getLogger("torchdelta")


def pause_ops(num_failures: int) -> int:
    """Return for how many ops the tier is not used after a failure that follows `num_failures` others in a row."""
    return min(_FIRST_PAUSE_OPS * _PAUSE_GROWTH**num_failures, _LONGEST_PAUSE_OPS)


class Outage:
    """Tells whether a tier may be used now. Mutable; one for each scope."""

    __slots__ = ("num_failures", "reason", "resume_at")

    def __init__(self) -> None:
        self.num_failures = 0  # since the last successful copy
        self.reason = ""  # the text of the latest failure
        self.resume_at = 0  # on the op clock

    def is_on(self, clock: int) -> bool:
        """Return whether the tier must not be used at this op."""
        return self.num_failures > 0 and clock < self.resume_at

    def begin(self, clock: int, error: Exception) -> None:
        """Record a failure. The first of an outage is logged, because recomputing instead of swapping costs time."""
        if clock < self.resume_at:
            return  # a copy that was in progress when the first one failed: the same outage
        if self.num_failures == 0:
            # As text: a logging handler that keeps records would keep the error, its frames and their storages alive.
            _logger.warning(
                "%s: for now nothing is swapped: buffers are recomputed if possible, and the others stay on the device",
                str(error),
            )
        self.reason = str(error)
        self.resume_at = clock + pause_ops(self.num_failures)
        self.num_failures += 1

    def end_pause(self, clock: int) -> bool:
        """End a pause, because a refused step costs more than an attempt. Return whether there was one."""
        if not self.is_on(clock):
            return False
        self.resume_at = clock
        return True

    def end(self) -> None:
        """Record a successful copy."""
        if self.num_failures:
            _logger.info("the tier works again after %d failures", self.num_failures)
            self.num_failures = 0
            self.resume_at = 0
