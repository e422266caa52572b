"""The benchmark of the headlines: its runs compare like with like, and its search stops at the last batch that fits."""

from __future__ import annotations

import pytest
import torch

from benchmarks.headlines import command, runs
from benchmarks.headlines.cases import CASES
from benchmarks.outcome import Outcome
from torchdelta.errors import NativeError
from torchdelta.native.counting import new_counter
from torchdelta.runtime.errors import BudgetError

MODEL = "gpt2-nano"


@pytest.fixture
def _counted() -> None:
    if isinstance(new_counter(), NativeError):
        pytest.skip("no counting allocator")


def test_batches_are_at_least_the_papers_multiples():
    """A batch that is rounded down would be a smaller claim."""
    for case in CASES.values():
        for multiple in case.multiples:
            assert case.batch(multiple) / case.plain_batch == pytest.approx(multiple, rel=1e-9) or (
                case.batch(multiple) > multiple * case.plain_batch
            )


def test_accumulation_trains_on_every_sample_once():
    """Its parts are the batch, and their shares add up to it."""
    whole, parts = runs.build(MODEL, 5), runs.build(MODEL, 5, 2)
    samples = torch.cat([inputs[0] for _, inputs in parts.parts])
    assert torch.equal(samples, whole.parts[0][1][0])
    assert [share for share, _ in parts.parts] == pytest.approx([0.4, 0.4, 0.2])


@pytest.mark.rest
@pytest.mark.usefixtures("_counted")
def test_a_measured_batch_has_the_plain_losses():
    """Where all fits, both runs have them too, and times of every way are there."""
    limit_bytes = 4 * runs.plain_peak(MODEL, 3)
    found = runs.measure(MODEL, 3, limit_bytes, 2, num_timed=1)
    for name in ("reactive", "followed"):
        assert found[name]["same_losses"]
        assert found[name]["peak_bytes"] <= limit_bytes
        assert len(found["plain"]["losses"]) >= found[name]["num_steps"] > runs.NUM_BEFORE_PLAN
        assert len(found[name]["plain_times_s"]) == 2
    assert {"plain", "accumulated"} <= found.keys()


def test_the_search_ends_at_the_largest_batch(monkeypatch: pytest.MonkeyPatch):
    """With a batch that trains, and one that does not right above it."""

    class Standing:
        def __init__(self, batch_size: int) -> None:
            self.batch_size = batch_size

        def steps(self, num_steps: int) -> None:
            assert num_steps == runs.TRIAL_STEPS
            if self.batch_size > 23:
                raise torch.OutOfMemoryError("out of memory.")

    monkeypatch.setattr(runs, "build", lambda _model, batch_size: Standing(batch_size))
    found = runs.largest(MODEL, 3, runs.UNBOUNDED_BYTES)
    assert (found["largest_batch"], found["least_refused_batch"]) == (23, 24)
    assert not found["trials"][24]["trains"]


def test_wrong_losses_and_high_peaks_fail():
    """Each is a check of its own; a run that does not train fails as such."""
    good = {"peak_bytes": 90, "same_losses": True, "num_steps": 4, "sample_over_plain": 2.0}
    measured = {"limit_bytes": 100, "batch_size": 8, "reactive": good, "followed": good}
    assert outcome_of(measured) == []
    assert outcome_of({**measured, "followed": {**good, "peak_bytes": 101}}) == ["followed: peak"]
    assert outcome_of({**measured, "reactive": {**good, "same_losses": False}}) == [
        "reactive: plain's losses, bit for bit"
    ]
    refused = {"error": BudgetError.__name__, "least_budget_bytes": 120}
    assert outcome_of({**measured, "reactive": refused}) == ["reactive: trains"]


def outcome_of(measured) -> list[str]:
    """Return the checks that fail."""
    outcome = Outcome()
    command.check_runs(outcome, "model x2", measured)
    return [check.name.removeprefix("model x2 ") for check in outcome.checks if not check.passed]


def test_a_row_stands_for_each_run():
    """With the time per sample beside plain's at its largest batch, accumulation's and plain's at this one."""
    good = {"peak_bytes": 90, "same_losses": True, "num_steps": 4, "sample_over_plain": 1.5}
    measured = {
        "limit_bytes": 100,
        "batch_size": 8,
        "plain_peak_bytes": 250,
        "plain": {"sample_over_plain": 1.25},
        "accumulated": {"sample_over_plain": 0.75, "peak_bytes": 110},
        "reactive": good,
        "followed": {"error": "no", "least_budget_bytes": None},
    }
    first, second = command.rows_of("model", "x2", measured)
    assert first[2:] == ["2.50", "reactive", "0.9000", "yes", "1.500", "2.000 (1.10)", "1.200"]
    assert second[4] == "no plan"
    measured["followed"] = {"error": "no", "least_budget_bytes": 120}
    assert command.rows_of("model", "x2", measured)[1][4] == "does not train"
    assert len(first) == len(second) == len(command.HEADER)
