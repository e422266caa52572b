"""The load of a trace against an allocator played by hand, and the figures that are read off it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.strategies import example, traces
from torchdelta.trace.model import (
    BEFORE_STEP,
    Peak,
    Trace,
    counts,
    live_buffers,
    load_curve,
    peak,
    storage_versions,
)


def replayed_load(trace: Trace) -> list[int]:
    """Play an allocator over the ops: allocate what each writes, count, free what is gone before the next op."""
    allocated = {b.storage_id: b.size_bytes for b in trace.buffers if b.birth_op == BEFORE_STEP}
    load: list[int] = []
    for op in trace.ops:
        living = {b.storage_id for b in trace.buffers if b.death_op > op.index}
        allocated = {storage_id: size for storage_id, size in allocated.items() if storage_id in living}
        for id_ in op.writes:
            allocated[trace.buffers[id_].storage_id] = trace.buffers[id_].size_bytes
        load.append(sum(allocated.values()))
    return load


@given(traces(resize=True))
def test_load_is_what_an_allocator_counts(trace: Trace) -> None:
    """The load curve equals the bytes of an allocator that serves the ops one by one."""
    assert load_curve(trace) == replayed_load(trace)


@given(traces(resize=True))
def test_peak_is_the_first_maximum(trace: Trace) -> None:
    """The peak names the first op at which the load is highest, with and without workspaces."""
    load = replayed_load(trace)
    assert peak(trace) == Peak(op=load.index(max(load)), size_bytes=max(load))
    with_workspace = [size + op.workspace_bytes for size, op in zip(load, trace.ops, strict=True)]
    assert load_curve(trace, with_workspace=True) == with_workspace
    assert peak(trace, with_workspace=True).size_bytes == max(with_workspace)


@pytest.mark.rest
@given(traces(resize=True), st.data())
def test_live_buffers_explain_the_load(trace: Trace, data: st.DataObject) -> None:
    """The buffers that are alive at an op add up to the load there, one for each storage, largest first."""
    op = data.draw(st.integers(0, len(trace.ops) - 1))
    live = live_buffers(trace, op)
    assert sum(buffer.size_bytes for buffer in live) == load_curve(trace)[op]
    assert len({buffer.storage_id for buffer in live}) == len(live)
    assert [b.size_bytes for b in live] == sorted((b.size_bytes for b in live), reverse=True)


@pytest.mark.rest
@given(traces())
def test_counts_add_up(trace: Trace) -> None:
    """The summary's parts add up to its totals."""
    summary = counts(trace)
    assert summary.num_ops == len(trace.ops)
    largest = (max(buffer.size_bytes for buffer in versions) for versions in storage_versions(trace).values())
    assert sum(summary.bytes_by_kind.values()) == sum(largest)
    assert summary.num_buffers == len(trace.buffers)
    assert summary.peak == peak(trace)


def test_example_has_the_documented_figures() -> None:
    """The worked example of the format's page has the load and the peaks that stand there."""
    trace = example()
    assert load_curve(trace) == [104, 104, 108, 112, 160, 132, 84]
    assert peak(trace) == Peak(op=4, size_bytes=160)
    assert peak(trace, with_workspace=True) == Peak(op=5, size_bytes=196)
    assert [buffer.id for buffer in live_buffers(trace, 6)] == [1, 7, 8, 4]
    summary = counts(trace)
    assert (summary.before_step_bytes, summary.saved_bytes) == (56, 48)
    assert summary.bytes_by_kind == {"parameter": 24, "input": 32, "activation": 52, "temporary": 52, "gradient": 24}
