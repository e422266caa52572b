"""The contract with torch: what only an accelerator can run, as far as that can be told without one.

A torch release that changes one fails here, by name.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from torchdelta._torch import device as torch_device

if TYPE_CHECKING:
    import pytest


def test_numeric_environment_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switches that CUDA's kernels read are there in every build, are recorded, and can be set back."""
    monkeypatch.setattr(torch_device, "reads_cuda_settings", True)
    before = torch_device.numeric_environment()
    assert len(before) >= 5 + 1 + 5
    # Not through torch.backends: what tests of torch import freezes its flags for the whole process.
    torch._C._set_cudnn_benchmark(not torch._C._get_cudnn_benchmark())
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    changed = torch_device.numeric_environment()
    assert changed != before
    torch_device.set_numeric_environment(before)
    assert torch_device.numeric_environment() == before
    torch_device.set_numeric_environment(changed)
    assert torch_device.numeric_environment() == changed
    torch_device.set_numeric_environment(before)


def test_what_cuda_builds_read() -> None:
    """CUDA's settings are read where torch was built for it, and nothing is captured on any other device."""
    assert torch_device.reads_cuda_settings == torch.backends.cuda.is_built()
    assert not torch_device.capture_reader(torch.device("cpu"))()


def test_names_that_only_an_accelerator_can_run() -> None:
    """What is asked of accelerators exists by these names; the tests in accelerator/ call it."""
    assert callable(torch._C._accelerator_getDeviceStats)
    assert callable(torch._C._accelerator_resetPeakStats)
    assert not torch_device.has_graph_trees() or "torch._inductor" in sys.modules
    assert torch_device.default_generator_of(torch.device("cpu")) is torch.default_generator
    assert callable(torch.accelerator.current_stream)
    assert callable(torch.accelerator.set_stream)
