"""The region of torch's allocator on CUDA: its size, and when it is made and given back. The device is a stand-in."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.runtime.programs import UNLIMITED
from torchdelta import MemoryBudget
from torchdelta.arena import region
from torchdelta.arena.region import Region
from torchdelta.notices import warn_once
from torchdelta.pool.segment import segment_bytes
from torchdelta.trace.model import storage_versions

if TYPE_CHECKING:
    from torchdelta.trace.model import Trace

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.fixture(scope="module")
def trace() -> Trace:
    """A step whose hidden tensors have 8 MiB each."""
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with MemoryBudget(UNLIMITED) as budget:
        for _ in range(2):
            model(torch.randn(8192, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return budget.trace()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put down what the device is asked for, in its place."""
    made: list[Any] = []
    monkeypatch.setattr(region, "begin_pool", lambda _device: made.append("begin") or "pool")
    monkeypatch.setattr(region, "end_pool", lambda _device, pool: made.append(("end", pool)))
    # Another test may have compiled in this process, after which none is made.
    monkeypatch.setattr(region, "has_graph_trees", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: made.append("empty"))
    monkeypatch.setattr(torch, "UntypedStorage", lambda size_bytes, device: made.append((size_bytes, device.type)))
    warn_once.cache_clear()
    return made


def _region(trace: Trace | None, room_bytes: int = 1 << 40) -> Region:
    return Region(CPU, trace=lambda: trace, room_bytes=lambda: room_bytes)


def test_it_is_as_large_as_the_large_tensors_at_their_most(trace: Trace) -> None:
    """Not below the largest sum alive at a moment, and without the parameters, which are there all the time."""
    spans = []
    for versions in storage_versions(trace).values():
        size_bytes = max(version.size_bytes for version in versions)
        if versions[0].birth_op >= 0 and size_bytes > MIB:
            spans.append((versions[0].birth_op, versions[-1].death_op, size_bytes))
    load_bytes = max(
        sum(size_bytes for birth, death, size_bytes in spans if birth <= op < death) for op in range(len(trace.ops))
    )
    assert 12 * 8 * MIB <= load_bytes <= segment_bytes(trace) <= 1.1 * load_bytes


def test_it_is_made_once_and_given_back(trace: Trace, calls: list[Any]) -> None:
    """After the first step that has a trace; the segments of that step go first."""
    arena = _region(trace)
    arena.start()
    arena.on_step_end()
    arena.on_step_end()
    size_bytes = segment_bytes(trace) // (2 * MIB) * 2 * MIB
    assert calls == ["empty", "begin", (size_bytes, "cpu")]
    arena.stop()
    arena.stop()
    assert calls[3:] == [("end", "pool")]


def test_it_ends_before_a_graph_is_captured(trace: Trace, calls: list[Any]) -> None:
    """What a graph allocates would come from it, and is not the arena's to give back; others' patches stay."""
    original = torch.cuda.CUDAGraph.capture_begin
    arena = _region(trace)
    arena.on_step_end()
    assert torch.cuda.CUDAGraph.capture_begin is not original
    with contextlib.suppress(Exception):  # there is no graph here
        torch.cuda.CUDAGraph.capture_begin(None)
    assert arena.pool is None
    assert calls[3:] == [("end", "pool")]
    assert torch.cuda.CUDAGraph.capture_begin is original
    arena.on_step_end()
    assert len(calls) == 4


def test_it_waits_for_a_trace(calls: list[Any]) -> None:
    """Without one nobody knows how much it is."""
    arena = _region(None)
    arena.on_step_end()
    arena.stop()
    assert calls == []


def test_the_budget_bounds_it(trace: Trace, calls: list[Any]) -> None:
    """What the budget leaves is the most that it takes; for next to nothing there is none."""
    _region(trace, room_bytes=50 * MIB + 1).on_step_end()
    assert calls == ["empty", "begin", (50 * MIB, "cpu")]
    calls.clear()
    _region(trace, room_bytes=20 * MIB).on_step_end()
    assert calls == []


def test_a_device_that_is_full_gets_none(
    trace: Trace, calls: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pool is closed again, one line says so, and it is not asked for a second time."""

    def full(_size_bytes: int, device: torch.device) -> None:
        raise torch.OutOfMemoryError(f"{device} is out of memory.\nAnd more.")

    monkeypatch.setattr(torch, "UntypedStorage", full)
    arena = _region(trace)
    with caplog.at_level(logging.WARNING, "torchdelta"):
        arena.on_step_end()
        arena.on_step_end()
    assert calls == ["empty", "begin", ("end", "pool")]
    assert [record.getMessage().endswith("memory is allocated without it") for record in caplog.records] == [True]


def test_an_interrupt_leaves_no_pool(trace: Trace, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends the reservation, the stream allocates as before."""

    def interrupted(_size_bytes: int, device: torch.device) -> None:
        raise KeyboardInterrupt(device)

    monkeypatch.setattr(torch, "UntypedStorage", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _region(trace).on_step_end()
    assert calls == ["empty", "begin", ("end", "pool")]


def test_a_forked_child_has_none(trace: Trace, calls: list[Any]) -> None:
    """The pool is the parent's."""
    arena = _region(trace)
    arena.on_step_end()
    calls.clear()
    arena.leave_child()
    arena.on_step_end()
    arena.stop()
    assert calls == []


def test_expandable_segments_are_left_alone(trace: Trace, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has switched them on has no use for a region, and is told."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.8,expandable_segments:True")
    _region(trace).on_step_end()
    assert calls == []


def test_captured_graphs_have_pools_of_their_own(
    trace: Trace, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where compiled code may capture, nothing is routed."""
    monkeypatch.setattr(region, "has_graph_trees", lambda: True)
    _region(trace).on_step_end()
    assert calls == []
