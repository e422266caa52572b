"""The meter agrees with storages that are known, and refuses to guess."""

import threading

import pytest
import torch

from torchdelta.cli.allocator_peak import AllocatorPeak, MeterError


def test_counts_live_and_peak_exactly():
    """Live bytes are what is held at the end, the peak includes what was held in between."""
    meter = AllocatorPeak()
    with meter:
        kept = torch.empty(1000, dtype=torch.uint8)
        dropped = torch.empty(5000, dtype=torch.uint8)
        del dropped
        late = torch.empty(300, dtype=torch.uint8)
    assert (meter.live_bytes, meter.peak_bytes) == (1300, 6000)
    assert meter.num_events == 4
    meter.check_live(kept.untyped_storage().nbytes() + late.untyped_storage().nbytes())


def test_totals_carry_over_segments():
    """A tensor of the first segment that dies in the second is taken off there."""
    meter = AllocatorPeak()
    with meter:
        first = torch.empty(4000, dtype=torch.uint8)
    with meter:
        second = torch.empty(2000, dtype=torch.uint8)
        del first
    assert [segment.live_bytes for segment in meter.segments] == [4000, 2000]
    assert [segment.peak_bytes for segment in meter.segments] == [4000, 6000]
    assert meter.peak_bytes == 6000
    assert second.numel() == meter.live_bytes


def test_sees_a_backward_pass():
    """What backward allocates counts: the peak of a chain is at least its saved activations."""
    meter = AllocatorPeak()
    with meter:
        weight = torch.ones(256, 256, requires_grad=True)
        out = weight
        for _ in range(8):
            out = torch.sigmoid(out)
        out.sum().backward()
        del out
    weight_bytes = weight.untyped_storage().nbytes()
    assert meter.peak_bytes >= 9 * weight_bytes
    meter.check_live(2 * weight_bytes)


def test_a_segment_that_sees_nothing_is_an_error():
    """Zero events means that the judge is blind, and that is no pass."""
    meter = AllocatorPeak()
    with pytest.raises(MeterError, match="no memory event"), meter:
        pass


def test_an_exception_inside_is_not_replaced():
    """The error of the measured code reaches the caller, and the profiler is closed for the next segment."""
    meter = AllocatorPeak()
    with pytest.raises(ZeroDivisionError), meter:
        _ = 1 / 0
    with meter:
        _kept = torch.empty(10)
    assert meter.peak_bytes >= 40


def test_segments_do_not_nest():
    """One meter, one segment at a time."""
    meter = AllocatorPeak()
    with meter:
        _kept = torch.empty(10)
        with pytest.raises(MeterError, match="do not nest"):
            meter.__enter__()
    assert meter.live_bytes == 40


def test_disagreement_with_known_storages_is_an_error():
    """An allocation by another thread is invisible to the profiler; the comparison finds that out."""
    hidden = []
    meter = AllocatorPeak()
    with meter:
        seen = torch.empty(1000, dtype=torch.uint8)
        worker = threading.Thread(target=lambda: hidden.append(torch.empty(1000, dtype=torch.uint8)))
        worker.start()
        worker.join()
    known_bytes = sum(tensor.untyped_storage().nbytes() for tensor in (seen, *hidden))
    assert meter.live_bytes == 1000
    with pytest.raises(MeterError, match="counts 1000 live bytes, but the known storages have 2000 bytes"):
        meter.check_live(known_bytes)
