"""The accelerator that computes late, itself: its threads go on, and what is queued in one mode runs in another."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from tests.racecheck.paths import Bench

pytestmark = pytest.mark.racecheck
NUM_COPIES = 3000


def test_threads_do_not_block_each_other(bench: Bench) -> None:
    """A thread that copies, and one that records events: neither holds the device's lock while it needs the GIL.

    Where one does, this test ends only by the time limit of its process.
    """
    streams = [torch.Stream(bench.device) for _ in range(2)]
    copied: list[int] = []

    def copy() -> None:
        target = torch.empty(4, device=bench.device)
        with streams[0]:
            for number in range(NUM_COPIES):
                target.copy_(torch.full((4,), float(number)))
        copied.append(int(target.sum()))

    with bench.schedule(0) as (found, _):
        thread = threading.Thread(target=copy)
        thread.start()
        while thread.is_alive():
            torch.Event(bench.device).record(streams[1])
        thread.join()
    assert found == []
    assert copied == [4 * (NUM_COPIES - 1)]


@pytest.mark.parametrize("queues_in_inference_mode", [True, False])
def test_inference_mode_at_the_launch_or_later(bench: Bench, queues_in_inference_mode: bool) -> None:
    """A batch norm is queued in one mode and runs in the other; its statistics are those of the CPU."""
    torch.manual_seed(0)
    norm, x = nn.BatchNorm2d(3), torch.randn(2, 3, 4, 4)
    late = nn.BatchNorm2d(3).to(bench.device)
    late_x = x.to(bench.device)
    norm(x)
    with bench.schedule(0) as (found, _):
        bench.extension.set_mode(2, 0)  # nothing runs before the host waits
        with torch.inference_mode(mode=queues_in_inference_mode):
            late(late_x)
        with torch.inference_mode(mode=not queues_in_inference_mode):
            torch.accelerator.synchronize()
    assert found == []
    assert late.running_var is not None
    assert norm.running_var is not None
    assert torch.equal(late.running_var.cpu(), norm.running_var)


def test_batch_norm_without_training(bench: Bench) -> None:
    """Its meta kernel promises statistics that the CPU's kernel does not make; the rest of what it makes is right."""
    x, ones = torch.randn(2, 3, 4, 4), torch.ones(3)
    plain = torch.ops.aten._native_batch_norm_legit(x, None, None, ones, ones, False, 0.1, 1e-5)
    with bench.schedule(0) as (found, _):
        late_x, late_ones = x.to(bench.device), ones.to(bench.device)
        late = torch.ops.aten._native_batch_norm_legit(late_x, None, None, late_ones, late_ones, False, 0.1, 1e-5)
    assert found == []
    assert torch.equal(late[0].cpu(), plain[0])


class Seen(TorchDispatchMode):
    """Notes the ops that it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an op, and run it."""
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_late_kernels_are_no_ops_of_the_caller(bench: Bench) -> None:
    """A convolution of the CPU calls other ops; the mode of whoever lets it run must not be handed them."""
    conv = nn.Conv2d(32, 8, 1, bias=False).to(bench.device)
    x = torch.randn(8, 32, 32, 32).to(bench.device)
    with bench.schedule(0) as (found, _):
        bench.extension.set_mode(2, 0)
        with torch.no_grad(), Seen() as seen:
            conv(x)
            torch.accelerator.synchronize()
    assert found == []
    assert seen.names == ["aten.convolution.default"]
