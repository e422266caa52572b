"""How much memory there is."""

from __future__ import annotations

import os
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchdelta.errors import NativeError, SizeError
from torchdelta.host import HostMemory
from torchdelta.native.counting import new_counter
from torchdelta.runtime.device import memory
from torchdelta.runtime.device.memory import PeakMeter, device_memory_bytes, free_for_tensors, session_device
from torchdelta.runtime.state.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable


def test_memory_of_this_machine() -> None:
    """On CPU never more than the RAM, and never nothing."""
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 2**20 < device_memory_bytes() <= ram_bytes


def test_the_meter_is_exact_where_the_allocator_is_counted() -> None:
    """What was taken and given back in between is measured to the byte."""
    counter = new_counter()
    if isinstance(counter, NativeError):
        pytest.skip(f"no counting allocator here: {counter}")
    ledger = Ledger("cpu")
    ledger.usage.count_with(counter)
    try:
        with PeakMeter(ledger.device, ledger.usage) as meter:
            torch.empty(1000)
            torch.empty(2000)
    finally:
        counter.stop()
    assert meter.extra_bytes == 8000


def _host(free_bytes: int) -> HostMemory:
    return HostMemory(ram_bytes=2**40, available_bytes=free_bytes, cgroup_limit_bytes=None)


def test_what_is_free_on_a_cpu_leaves_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth, at least 256 MiB, for what is no tensor; existing tensors count; swapped ones may need room, too."""
    monkeypatch.setattr(memory, "session_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(memory, "read_host_memory", lambda: _host(10 * 2**30))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert free_for_tensors(2**30) == (
        10 * 2**30,
        "10.00 GiB free on cpu, plus 1.00 GiB of tensors that exist, less 1.00 GiB margin",
    )
    assert free_for_tensors(0, swap_bytes=2**30)[0] == 8 * 2**30
    assert free_for_tensors(0, swap_bytes=None)[0] == 4.5 * 2**30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_for_tensors(0)[0] == int(2.5 * 2**30) - 2**28
    monkeypatch.setattr(memory, "read_host_memory", lambda: _host(2**20))
    with pytest.raises(SizeError, match=r"budget 'auto' leaves nothing: 256\.00 KiB free on cpu"):
        free_for_tensors(0)


def test_what_is_free_on_a_gpu_counts_what_its_allocator_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free by the driver and held by this process, less 0.6 GiB and a sixteenth of the memory."""
    monkeypatch.setattr(memory, "session_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (10 * 2**30, 16 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 2 * 2**30)
    size_bytes, how = free_for_tensors(123)
    assert size_bytes == 11 * 2**30 - 6 * 2**30 // 10
    assert how == (
        "10.00 GiB free on cuda:0, plus 2.00 GiB held by this process's allocator, less 1.60 GiB reserve for context "
        "and fragmentation"
    )


@pytest.mark.parametrize("ask", [device_memory_bytes, lambda: free_for_tensors(0)], ids=["80%", "auto"])
def test_a_question_about_memory_leaves_the_device_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[], object]
) -> None:
    """A budget in percent begins CUDA before the script makes its device current: still it is for that device."""
    has_begun: list[str] = []

    def begin(what: str, answer: Any) -> Any:
        has_begun.append(what)
        return answer

    properties = types.SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(memory, "_has_asked_first", False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_options: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(has_begun))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: begin(f"{device}", properties))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: begin(f"{device}", (70 * 2**30, 80 * 2**30)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: begin(f"{device}", 0))
    monkeypatch.setenv("LOCAL_RANK", "1")
    current = 0
    ask()
    assert set(has_begun) == {"cuda:1"}
    assert session_device() == torch.device("cuda", 1)
    current = 3  # the script has chosen another one
    assert session_device() == torch.device("cuda", 3)
