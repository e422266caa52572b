"""Running estimates of a link's bandwidth, measured on the transfers.

The bandwidth is bytes per busy second. A link is busy while at least one copy runs on it: concurrent copies count once,
and time in a queue does not count. Samples enter an exponential mean with weight 1 - exp(-bytes / 32 MiB): a tiny
transfer, which measures latency, changes the estimate little; a few hundred MiB replace it.
"""

from __future__ import annotations

import math

__all__ = ["LinkEstimate"]

_MEMORY_BYTES = 32 << 20
# A link that is never idle is sampled after this many bytes: many parts, since those that still run are missing.
_SAMPLE_BYTES = 64 << 20


class LinkEstimate:
    """The bandwidth of one direction of one tier. Not thread-safe: its tier holds a lock."""

    __slots__ = ("_busy_s", "_mark_s", "_num_running", "_sample_bytes", "bytes_per_s")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._num_running = 0
        self._mark_s = 0.0
        self._busy_s = 0.0
        self._sample_bytes = 0

    def start(self, now_s: float) -> None:
        """Note that a copy begins."""
        if self._num_running:
            self._busy_s += now_s - self._mark_s
        self._num_running += 1
        self._mark_s = now_s

    def end(self, now_s: float, size_bytes: int) -> None:
        """Note that a copy has ended; `size_bytes` is 0 for one that failed."""
        self._num_running -= 1
        self._busy_s += now_s - self._mark_s
        self._mark_s = now_s
        self._sample_bytes += size_bytes
        if self._num_running and self._sample_bytes < _SAMPLE_BYTES:
            return
        if self._sample_bytes and self._busy_s > 0.0:
            weight = -math.expm1(-self._sample_bytes / _MEMORY_BYTES)
            # The mean is taken over seconds per byte, because the times of consecutive transfers add up.
            s_per_byte = (1.0 - weight) / self.bytes_per_s + weight * self._busy_s / self._sample_bytes
            self.bytes_per_s = 1.0 / s_per_byte
        self._busy_s = 0.0
        self._sample_bytes = 0
