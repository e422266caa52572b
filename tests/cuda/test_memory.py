"""Memory on CUDA: active bytes, libraries' workspaces, out-of-memory errors, and transfers beside compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.cuda import _sleep as sleep

from benchmarks.gpu import overlap
from tests.same_bits.judge import bits_of
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta.runtime.current import current_session
from torchdelta.runtime.device.counter import DeviceCounter

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cuda
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def _small_device() -> Iterator[None]:
    """Let the process have little more than it has now."""
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (512 << 20)) / total_bytes)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def test_the_counter_says_what_torch_says() -> None:
    """Active bytes, blocks that wait for another stream among them; asking changes no peak."""
    counter = DeviceCounter(DEVICE)
    assert counter.live_bytes() == torch.cuda.memory_stats(DEVICE)["active_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    side = torch.cuda.Stream()
    x = torch.ones(8 << 20)
    peak_bytes = torch.cuda.max_memory_allocated()
    with torch.cuda.stream(side):
        sleep(200_000_000)
        x.record_stream(side)
    before_bytes = counter.live_bytes()
    del x
    assert counter.live_bytes() == before_bytes  # freed, and still in use over there
    side.synchronize()
    counter.mark()
    torch.ones(8 << 20).sum()
    assert counter.freed_bytes() >= 8 << 22
    assert torch.cuda.max_memory_allocated() >= peak_bytes


def test_workspaces_that_stay_are_counted() -> None:
    """What cuBLAS keeps for a thread and stream is in the total from then on, and is no op's own workspace."""
    with MemoryBudget("8GiB", Config(tier="memory")):
        session = current_session()
        assert session is not None
        x = torch.randn(512, 512, requires_grad=True)
        for _ in range(3):
            (x @ x).sum().backward()
        session.ledger.usage.ask_counter(fresh=True)
        total_bytes = session.ledger.usage.total_bytes
        assert total_bytes == torch.cuda.memory_stats(DEVICE)["active_bytes.all.current"]
        need = session.recorder.needs.need(
            torch.ops.aten.mm.default._torchdelta_facts, torch.ops.aten.mm.default, (x, x), None
        )
        assert need.workspace_bytes < 4 << 20


@pytest.mark.usefixtures("_small_device")
def test_out_of_memory_in_an_op_is_torchs_own_error() -> None:
    """The device itself is full although the budget is not: the error reaches the program, and training goes on."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    with MemoryBudget("1TiB", Config(tier="memory")):
        hidden = model(torch.randn(32, 64))
        with pytest.raises(torch.OutOfMemoryError) as raised:
            torch.empty(4 << 30, dtype=torch.uint8)
        assert not isinstance(raised.value, BudgetError)
        del raised
        hidden.pow(2).mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_transfers_run_beside_compute() -> None:
    """The device's own events: copies between host and device, and kernels at the same time."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(8)])

    def step() -> None:
        model(torch.randn(8192, 2048)).pow(2).mean().backward()
        model.zero_grad()

    with MemoryBudget("1TiB", Config(decisions="swap", tier="memory")) as budget:
        step()
        found = overlap.measure(step)
    assert budget.summary().swapped_in_bytes > 0
    assert found.copy_s > 0
    assert found.both_s > 0


def test_a_pinned_batch_that_comes_without_blocking() -> None:
    """The usual way of feeding: pinned on the host, copied without waiting, in a loop that reuses the buffer."""

    def train(budget: MemoryBudget | None) -> object:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 8))
        staging = torch.empty(64, 256, device="cpu", pin_memory=True)
        generator = torch.Generator(device="cpu").manual_seed(1)
        copied = torch.cuda.Event()
        if budget is not None:
            budget.start()
        for _ in range(4):
            staging.copy_(torch.randn(64, 256, device="cpu", generator=generator))
            batch = staging.to("cuda", non_blocking=True)
            copied.record()
            loss = model(batch).pow(2).mean()
            copied.synchronize()
            staging.zero_()
            loss.backward()
            loss.item()
        if budget is not None:
            budget.stop()
        return bits_of([parameter.grad for parameter in model.parameters()])

    plain = train(None)
    for decisions in ("recompute", "swap"):
        assert train(MemoryBudget("1TiB", Config(decisions=decisions, tier="memory"))) == plain


def test_the_state_of_a_generator_is_small() -> None:
    """A replayed random op keeps a seed and an offset, and not the host generator's five thousand bytes."""
    torch.cuda.init()
    assert torch.cuda.default_generators[0].get_state().numel() == 16
