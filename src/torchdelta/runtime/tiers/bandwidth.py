"""Running estimates of a link's bandwidth, measured on the transfers.

The bandwidth is bytes per busy second. A link is busy while at least one copy runs on it: concurrent copies count once,
and time in a queue does not count. Samples enter an exponential mean with weight 1 - exp(-bytes / 32 MiB): a tiny
transfer, which measures latency, changes the estimate little; a few hundred MiB replace it.

The processor time that the copying threads take for each byte is kept beside it: on a CPU, kernels that use all cores
wait for it.
"""

from __future__ import annotations

import math

__all__ = ["LinkEstimate"]

_MEMORY_BYTES = 32 << 20
# One copy in memory at 5 GB/s; the first transfers correct it.
_START_CPU_S_PER_BYTE = 2e-10
# A link that is never idle is sampled after this many bytes: many parts, since those that still run are missing.
_SAMPLE_BYTES = 64 << 20


class LinkEstimate:
    """The bandwidth of one direction of one tier. Not thread-safe: its tier holds a lock."""

    __slots__ = ("_busy_s", "_mark_s", "_num_running", "_sample_bytes", "bytes_per_s", "cpu_s_per_byte")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.cpu_s_per_byte = _START_CPU_S_PER_BYTE  # processor time of the copying threads
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

    def end(self, now_s: float, size_bytes: int, cpu_s: float = 0.0) -> None:
        """Note that a copy has ended, and the processor time that it took; `size_bytes` is 0 for one that failed."""
        self._num_running -= 1  # first: what follows may find no memory
        if size_bytes and cpu_s:
            weight = -math.expm1(-size_bytes / _MEMORY_BYTES)
            self.cpu_s_per_byte += weight * (cpu_s / size_bytes - self.cpu_s_per_byte)
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
