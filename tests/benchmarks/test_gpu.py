"""The GPU benchmark's arithmetic and its harness, tried where there is no GPU."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.__main__ import build_parser
from benchmarks.gpu import command, overlap
from benchmarks.gpu.subjects import SUBJECTS
from torchdelta.native.build import is_switched_off

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda s: (s[0], s[0] + s[1])), max_size=12)


@given(spans, spans)
def test_overlap_is_what_counting_moment_by_moment_gives(
    kernels: list[overlap.Span], copies: list[overlap.Span]
) -> None:
    """Spans may nest, touch and repeat."""
    running = {moment for start, end in kernels for moment in range(start, end)}
    travelling = {moment for start, end in copies for moment in range(start, end)}
    found = overlap.sum_up(kernels, copies)
    assert round(found.kernel_s * 1e9) == len(running)
    assert round(found.copy_s * 1e9) == len(travelling)
    assert round(found.both_s * 1e9) == len(running & travelling)
    assert 0 <= found.share <= 1


@pytest.mark.rest
def test_the_harness_holds_bits_and_budget_against_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU, with a model of no use, every part but the device's own events runs."""
    monkeypatch.setattr(command, "SUBJECTS", {"gpt2": SUBJECTS["gpt2"]})
    parser = build_parser({"gpu": command})
    options = parser.parse_args(["gpu", "--quick", "--device", "cpu", "--tiny", "--share", "0.85", "--no-write"])
    gc.collect()  # what other tests left behind in cycles would count against a budget of kilobytes
    outcome = command.run(options)
    # Tensors of a few kilobytes stay, so following cannot train at the peak of checkpointing here.
    at_checkpoint = f"{command.AT_CHECKPOINT}: memory suffices"
    assert {check.name.partition(": ")[2] for check in outcome.checks} == {
        at_checkpoint,
        "plain equals plain",
        "same bits",
        "same bits, following",
        "active bytes from the second step on",
        "active bytes from the second step on, following",
        "active bytes, torchdelta, following",
        "something left the device",
    }
    failed = [(check.name, check.detail) for check in outcome.checks if not check.passed]
    failed = [(name, detail) for name, detail in failed if not name.endswith(at_checkpoint)]
    if is_switched_off():  # the workspace of ops is estimated then: a few of the 608 KB of the budget may be missing
        failed = [
            (name, detail)
            for name, detail in failed
            if not (name.endswith("active bytes from the second step on") and float(detail.partition(" ")[0]) < 1.01)
        ]
    assert failed == []
    assert len(outcome.data["gpt2"]["rounds"]) == 2
    assert set(outcome.data["gpt2"]["rounds"][0]) | {command.AT_CHECKPOINT} == set(command.PEERS)
