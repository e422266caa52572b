"""The machine that steps are planned for, as measured by this session."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import torch

from torchdelta.machine.model import Machine

if TYPE_CHECKING:
    from torchdelta.runtime.tiers.base import Tier

__all__ = ["measured_machine"]

# Seconds of compute lost per second of processor time that copies take. Steps of a GPT-2 on 2 cores of an AMD EPYC,
# beside copies of other memory at 0.4 GB/s, lost 4.3 to 4.9 times the processor time of copies in place, and 1.7 to 2.0
# times that of staged ones (benchmarks/results/overheads-copies.json; 3.6 to 5.2 times in an earlier run): the other
# core waits at the end of each kernel, caches are cold, and the kernel's disk work is not counted in any thread's time.
# With 1 thread, measured on another processor, a core is free, and the lost time was a fifth of the processor time.
_LOST_ON_ALL_CORES: Final = 4.0
_LOST_BESIDE_FREE_CORES: Final = 0.3
# What the runtime itself takes of the training thread, for a swap (one copy each way, between which threads hand over
# the interpreter's lock) and for an op that is replayed, from its recording in forward to its replay. Steps of a BERT
# and a GPT-2 whose kernels take next to nothing lost 0.4 to 0.7 ms for each swap, and 0.1 to 0.2 ms for each replayed
# op.
_COPY_COMPUTE_S: Final = 2.5e-4
_REPLAY_COMPUTE_S: Final = 1.5e-4


def measured_machine(tier: Tier, device: torch.device, budget_bytes: int) -> Machine:
    """Return the machine of a session.

    Args:
        tier: Where buffers are swapped to; its links run as its transfers did.
        device: Where the training runs.
        budget_bytes: The budget.
    """
    lost_s_per_s = copy_compute_s = replay_compute_s = 0.0
    if device.type == "cpu":
        copy_compute_s, replay_compute_s = _COPY_COMPUTE_S, _REPLAY_COMPUTE_S
        uses_all = torch.get_num_threads() >= len(os.sched_getaffinity(0))
        lost_s_per_s = _LOST_ON_ALL_CORES if uses_all else _LOST_BESIDE_FREE_CORES
    return Machine(
        name="measured",
        memory_bytes=budget_bytes,
        flops_per_s={"float32": 1e12},  # not used: op times are those of the trace
        memory_bytes_per_s=1e10,  # not used
        swaps_to="disk" if tier.name == "disk" else "host",
        host_out_bytes_per_s=tier.write_bytes_per_s,
        host_in_bytes_per_s=tier.read_bytes_per_s,
        out_compute_s_per_byte=tier.write_cpu_s_per_byte * lost_s_per_s,
        in_compute_s_per_byte=tier.read_cpu_s_per_byte * lost_s_per_s,
        copy_compute_s=copy_compute_s,
        replay_compute_s=replay_compute_s,
        host_memory_bytes=tier.capacity_bytes,
    )
