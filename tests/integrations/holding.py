"""Memory that other tests hold: a budget counts it, so shares of a peak are taken of what comes on top of it."""

from __future__ import annotations

import gc

import torch

from torchdelta.runtime.record.scan import count_tensors


def held_bytes() -> int:
    """Return the bytes of the tensors that a budget opened now would find, after what is garbage was collected."""
    gc.collect()
    return count_tensors(torch.device("cpu"))


def share_of_peak(peak_bytes: int, share: float, held: int) -> int:
    """Return a budget that leaves a share of what a training took, beside the bytes that were held before it."""
    return held + int((peak_bytes - held) * share)
