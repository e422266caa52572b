"""The machine that steps are planned for, as measured by this session.

[Note: what copies take from kernels]
On a CPU, copies run on the cores that compute. If kernels use all cores, they lose about the processor time that the
copies take: the other cores wait at the end of each kernel. This time is that of the copying threads, and a part that
no thread's time shows: interrupts, and in a virtual machine the disk's work on the host, which shows as "steal". For
copies in place with direct I/O, the second part is the larger one by far. It is read for all processes together. What
is read while nothing is copied is taken off; without such a time, what others cause counts as the copies', up to the
time that the copies take. Until much has been copied, what it was on other machines counts, too.
"""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, Final

import torch

from torchdelta.host import read_stolen_s
from torchdelta.machine.model import Machine

if TYPE_CHECKING:
    from torchdelta.runtime.memory.transfers import Transfers

__all__ = ["MeasuredMachine"]

# Seconds of compute lost per second of processor time that copies take: what steps of a GPT-2 lost on 2 cores of an AMD
# EPYC, with 2 threads and, beside a free core, with 1 (benchmarks/results/overheads-copies*.json).
_LOST_ON_ALL_CORES: Final = 0.85
_LOST_BESIDE_FREE_CORES: Final = 0.4
# What interrupts and the hypervisor take for each byte to and from a disk, as measured there. At first it counts like a
# measurement of so many bytes: little has been copied when the first plan is made, and a reading may be a neighbour's.
_STOLEN_ON_ALL_CORES_S: Final = 2.5e-10
_STOLEN_BESIDE_FREE_CORES_S: Final = 3e-11
_ASSUMED_BYTES: Final = 128 << 20
# What the runtime itself takes of the training thread, for a swap (one copy each way, between which threads hand over
# the interpreter's lock) and for an op that is replayed from the native tape. Steps of a BERT and a GPT-2 whose kernels
# take next to nothing lost 0.4 to 0.7 ms for each swap. Python replays take 0.1 to 0.2 ms an op more, but most replays
# of a followed step are native: a small ResNet-50 was faster with plans made for 0.05 ms than with those for 0.15 ms.
_COPY_COMPUTE_S: Final = 2.5e-4
_REPLAY_COMPUTE_S: Final = 5e-5

# A virtual disk that read and wrote at once did so at 0.7 and 0.4 of its rates alone. The rates that a session measures
# contain some of that. Times predicted with this share were within 6 % (benchmarks/results/everything-planned.json).
_BOTH_WAYS_ON_DISK: Final = 0.55

_SHORTEST_S: Final = 0.5  # between two readings: the kernel counts in steps of 10 ms
_LARGEST_SHARE: Final = 1e-3  # of the time; a reading takes milliseconds on machines with hundreds of cores
_MEMORY_BYTES: Final = 256 << 20  # after so many more bytes, what was read before counts for a third


class MeasuredMachine:
    """The links of a session's tier, and what copies take from its kernels. Mutable.

    Args:
        transfers: Moves buffers to the tier and back.
        device: Where the training runs.
        budget_bytes: The budget.
    """

    def __init__(self, transfers: Transfers, device: torch.device, budget_bytes: int) -> None:
        self._transfers = transfers
        self._device = device
        self._budget_bytes = budget_bytes
        self._stolen_s = self._stolen_bytes = 0.0  # beside copies, and their bytes; older ones count less
        self._assumed_bytes = float(_ASSUMED_BYTES)  # for which `_STOLEN_ON_ALL_CORES_S` counts
        self._idle_rate: float | None = None  # seconds stolen in a second without copies
        self._shortest_s = _SHORTEST_S  # between two readings
        self._read_s = -math.inf  # the time of the latest reading
        self._read_bytes = 0  # what had been moved by then
        self._read_stolen_s: float | None = None  # what it was
        # What a byte takes from kernels on its way out, and in, as learned from the times of steps.
        self._learned_s: tuple[float, float] | None = None

    def observe(self) -> None:
        """Read what copies took since the latest reading, if that was some time ago. Call this between steps."""
        now_s = time.perf_counter()
        if self._device.type != "cpu" or now_s - self._read_s < self._shortest_s:
            return
        stolen_s, counters = read_stolen_s(), self._transfers.counters
        moved_bytes = counters.swapped_out_bytes + counters.swapped_in_bytes
        if stolen_s is not None and self._read_stolen_s is not None:
            self._add(stolen_s - self._read_stolen_s, moved_bytes - self._read_bytes, now_s - self._read_s)
        self._read_s, self._read_bytes, self._read_stolen_s = now_s, moved_bytes, stolen_s
        self._shortest_s = max(_SHORTEST_S, (time.perf_counter() - now_s) / _LARGEST_SHARE)

    def _add(self, stolen_s: float, moved_bytes: int, time_s: float) -> None:
        if stolen_s < 0.0:  # this thread may use other processors than at the latest reading
            return
        if not moved_bytes:
            rate = stolen_s / time_s
            self._idle_rate = rate if self._idle_rate is None else (self._idle_rate + rate) / 2
            return
        kept = math.exp(-moved_bytes / _MEMORY_BYTES)
        stolen_s = max(0.0, stolen_s - (self._idle_rate or 0.0) * time_s)
        self._stolen_s = self._stolen_s * kept + stolen_s
        self._stolen_bytes = self._stolen_bytes * kept + moved_bytes
        self._assumed_bytes *= kept

    def learn(self, planned: Machine, more_s: float, swapped_bytes: int) -> bool:
        """Learn what copies take from kernels, from steps that took more or less time than predicted.

        Return whether copies can explain it: their cost must lie between zero and the time that they last. See [Note: a
        wrong prediction] in predictions.py.

        Args:
            planned: The machine that the steps were planned for.
            more_s: Seconds by which a step took longer; negative if it took less.
            swapped_bytes: What is copied out and in again in a step.
        """
        if not swapped_bytes or self._device.type != "cpu":
            return False
        both_s = planned.out_compute_s_per_byte + planned.in_compute_s_per_byte + more_s / swapped_bytes
        out_most_s, in_most_s = 1.0 / planned.host_out_bytes_per_s, 1.0 / planned.host_in_bytes_per_s
        share = both_s / (out_most_s + in_most_s)
        if not 0.0 <= share <= 1.0:
            return False
        self._learned_s = share * out_most_s, share * in_most_s
        return True

    def forget(self) -> None:
        """Forget what was learned from the times of steps."""
        self._learned_s = None

    def now(self) -> Machine:
        """Return the machine as it has run so far. Opens the tier.

        See [Note: what copies take from kernels].
        """
        tier = self._transfers.tier
        out_s = in_s = copy_compute_s = replay_compute_s = 0.0
        if self._device.type == "cpu":
            self.observe()
            copy_compute_s, replay_compute_s = _COPY_COMPUTE_S, _REPLAY_COMPUTE_S
            uses_all = torch.get_num_threads() >= len(os.sched_getaffinity(0))
            lost_s_per_s = _LOST_ON_ALL_CORES if uses_all else _LOST_BESIDE_FREE_CORES
            assumed_s = _STOLEN_ON_ALL_CORES_S if uses_all else _STOLEN_BESIDE_FREE_CORES_S
            if tier.name != "disk":
                assumed_s = 0.0
            # Of what others may have caused, a copy is charged no more than the time that it takes.
            num_bytes = max(1.0, self._stolen_bytes + self._assumed_bytes)
            stolen_s = (self._stolen_s + assumed_s * self._assumed_bytes) / num_bytes
            out_s = (tier.write_cpu_s_per_byte + min(stolen_s, 1.0 / tier.write_bytes_per_s)) * lost_s_per_s
            in_s = (tier.read_cpu_s_per_byte + min(stolen_s, 1.0 / tier.read_bytes_per_s)) * lost_s_per_s
            out_s, in_s = self._learned_s or (out_s, in_s)
        return Machine(
            name="measured",
            memory_bytes=self._budget_bytes,
            flops_per_s={"float32": 1e12},  # not used: op times are those of the trace
            memory_bytes_per_s=1e10,  # not used
            swaps_to="disk" if tier.name == "disk" else "host",
            host_out_bytes_per_s=tier.write_bytes_per_s,
            host_in_bytes_per_s=tier.read_bytes_per_s,
            both_ways_factor=_BOTH_WAYS_ON_DISK if tier.name == "disk" else 1.0,
            out_compute_s_per_byte=out_s,
            in_compute_s_per_byte=in_s,
            copy_compute_s=copy_compute_s,
            replay_compute_s=replay_compute_s,
            host_memory_bytes=tier.capacity_bytes,
        )
