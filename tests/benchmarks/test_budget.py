"""The benchmark of the budget holds the library to what a BudgetError advises."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from benchmarks import budget
from benchmarks.outcome import Outcome

PLAIN_BYTES = 1_000_000
LEAST_BYTES = 400_000  # of a run that frees its gradients, as the benchmark's own loop does
KEEPING_BYTES = 600_000  # of one that keeps them


class Library:
    """Stands for the runs in processes of their own: what finishes, and what an error names."""

    def __init__(self, *, named_bytes: int, freeing_bytes: int) -> None:
        self.named = {"least_budget_bytes": named_bytes, "least_freeing_gradients_bytes": freeing_bytes}

    def run(self, _function: str, *, budget_bytes: int, keeps_gradients: bool = False, **_: Any) -> dict[str, Any]:
        """Run a worker."""
        needed_bytes = KEEPING_BYTES if keeps_gradients else LEAST_BYTES
        if budget_bytes >= needed_bytes:
            return {"outcome": "finished", "budget_bytes": budget_bytes}
        error = {"type": "BudgetError", "step": 0, "since_scope_s": 0.1, **self.named}
        return {"outcome": "budget_error", "budget_bytes": budget_bytes, "error": error}


def failed_checks(library: Library, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Look for the least budget with this library, and return the kinds of checks that fail."""
    monkeypatch.setattr(budget, "run_worker", library.run)
    options = argparse.Namespace(policy=None, threads=1, timeout=60)
    outcome = Outcome()
    case = budget.Case(options, outcome, "small", "sgd")
    case.plain_peak_bytes, case.plain_step_s = PLAIN_BYTES, 1.0
    case.data["shares"] = {}
    case.measure_least()
    assert outcome.checks
    return {check.name.rsplit(": ", 1)[1] for check in outcome.checks if not check.passed}


def test_right_advice_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both numbers are right, and differ by the gradients."""
    library = Library(named_bytes=KEEPING_BYTES, freeing_bytes=LEAST_BYTES)
    assert failed_checks(library, monkeypatch) == set()


@pytest.mark.parametrize(
    ("named_bytes", "freeing_bytes", "kind"),
    [
        (KEEPING_BYTES - 1, LEAST_BYTES, "named least is enough"),
        (LEAST_BYTES, LEAST_BYTES, "named least is enough"),
        (KEEPING_BYTES, KEEPING_BYTES, "named least that frees gradients"),
        (KEEPING_BYTES, LEAST_BYTES * 9 // 10, "named least that frees gradients"),
    ],
)
def test_wrong_advice_fails(named_bytes: int, freeing_bytes: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that keeps its gradients does not fit into what was named, or the other number is no least."""
    assert failed_checks(Library(named_bytes=named_bytes, freeing_bytes=freeing_bytes), monkeypatch) == {kind}
