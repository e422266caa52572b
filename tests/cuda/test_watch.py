"""The watch on CUDA's allocator: bytes in use, peaks and limits between two readings; and pauses beside captures."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import _sleep as sleep

from tests.runtime.parts import running_session
from tests.same_bits.judge import Scope, bits_of, seed_everything
from torchdelta import Config, MemoryBudget
from torchdelta._torch.device import allocator_statistics
from torchdelta.native.device_watch import DeviceWatch, new_watch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]
DEVICE = torch.device("cuda", 0)
MIB = 1 << 20


def statistics() -> dict[str, int]:
    """Return the allocator's own figures."""
    found = allocator_statistics(DEVICE)
    assert found is not None
    return found


@pytest.fixture
def watch() -> DeviceWatch:
    """Return a watch that knows what is in use."""
    found = new_watch(DEVICE)
    assert found is not None
    torch.ones(1)
    counted_bytes = found.live_bytes()
    found.set_live(statistics()["current"], counted_bytes)
    found.take_peak_bytes()
    return found


def test_it_counts_what_the_allocator_counts(watch: DeviceWatch) -> None:
    """Small blocks to the byte; of large ones, what is not split off is missing: less than 1 MiB each."""
    before_bytes = statistics()["current"]
    small = [torch.ones(number) for number in (1, 100, 1000, 100_000)]
    assert watch.take_peak_bytes() == statistics()["current"] > before_bytes
    del small
    large = [torch.ones(3 * MIB + 7) for _ in range(4)]
    assert abs(watch.take_peak_bytes() - statistics()["current"]) < 4 * MIB
    del large
    torch.ones(10)
    assert watch.take_peak_bytes() >= 4 * 12 * MIB  # of before they were freed
    assert watch.take_peak_bytes() == before_bytes == statistics()["current"]


def test_memory_that_another_stream_uses_is_in_use(watch: DeviceWatch) -> None:
    """Until that stream is done, as in the allocator's active bytes."""
    side = torch.cuda.Stream()
    x = torch.ones(8 * MIB)
    with torch.cuda.stream(side):
        sleep(200_000_000)
        x.record_stream(side)
    before_bytes = statistics()["current"]
    watch.take_peak_bytes()
    del x
    assert watch.take_peak_bytes() == before_bytes == statistics()["current"]


def test_a_limit_calls_back_once(watch: DeviceWatch) -> None:
    """Soon after the allocation that passes it, also on autograd's thread."""
    passed: list[int] = []

    def read() -> int:
        counted_bytes = watch.live_bytes()
        watch.set_live(statistics()["current"], counted_bytes)
        return statistics()["current"]

    watch.set_limit(statistics()["current"] + 2 * MIB, read, lambda: passed.append(1))
    small = torch.ones(MIB // 8)
    assert not passed
    large = torch.ones(MIB)
    torch.ones(MIB)
    assert passed == [1]
    x = torch.ones(MIB, requires_grad=True)
    loss = x.exp().sum()
    watch.set_limit(statistics()["current"] + MIB, read, lambda: passed.append(2))
    loss.backward()
    torch.ones(1)
    assert passed == [1, 2]
    watch.clear_limit()
    torch.ones(8 * MIB)
    assert passed == [1, 2]
    del small, large


def test_peaks_of_steps_are_the_allocators() -> None:
    """What the summary says of a step is measured, workspaces inside ops included; also where it is not recorded."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    peaks_bytes = []
    with MemoryBudget("64GiB", Config(tier="memory")) as budget:
        for _ in range(6):
            torch.cuda.reset_peak_memory_stats()
            model(torch.randn(4096, 1024)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            peaks_bytes.append(statistics()["peak"])
        summary = budget.summary()
    assert summary.num_unrecorded_steps > 0
    for step, peak_bytes in zip(summary.steps[1:], peaks_bytes[1:], strict=True):
        assert abs(step.peak_bytes - peak_bytes) < 0.02 * peak_bytes


def test_a_graph_that_is_captured_in_a_pause() -> None:
    """Nothing is recorded, read or waited for while it is captured, and it replays as without a budget."""

    def train(scope: Scope) -> Any:
        seed_everything()
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, found = torch.randn(32, 64), []
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # here, libraries make the workspaces of that stream
            model(x).square().mean().backward()
            optimizer.zero_grad()
        torch.cuda.current_stream().wait_stream(side)
        with scope() as budget:
            for _ in range(6):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            torch.cuda.synchronize()
            assert budget is None or running_session().pause.is_on
            with torch.cuda.graph(graph, stream=side):
                loss = model(x).square().mean()
                loss.backward()
            for value in (1.0, 2.0):
                x.fill_(value)
                for parameter in model.parameters():
                    parameter.grad.zero_()
                graph.replay()
                found.append([loss.clone(), *(parameter.grad.clone() for parameter in model.parameters())])
            optimizer.zero_grad()
            model(torch.randn(32, 64)).square().mean().backward()
            found.append([parameter.grad.clone() for parameter in model.parameters()])
        return bits_of(found)

    assert train(lambda: MemoryBudget("64GiB", Config(tier="memory"))) == train(contextlib.nullcontext)
