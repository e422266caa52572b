"""What `make frameworks` requires of three trainings, without a framework."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tools.frameworks import training
from tools.frameworks.framework import FRAMEWORKS

if TYPE_CHECKING:
    from pathlib import Path

PEAK_BYTES = 1000 << 20
BUDGET_BYTES = 700 << 20


def compare(monkeypatch: pytest.MonkeyPatch, directory: Path, name: str, **outcome: Any) -> str:
    """Compare three trainings, of which the last one in the budget has an outcome of its own."""
    outcome = {"weights": b"same", "peak_bytes": BUDGET_BYTES, "recompute_ms": 1.0} | outcome
    runs = iter(({"weights": b"same"}, {"weights": b"same", "peak_bytes": PEAK_BYTES}, outcome))

    def train(_command: list[str], options: dict[str, Any], _directory: Path) -> training.Trained:
        run = next(runs)
        summary = {
            "peak_bytes": run.get("peak_bytes", 0),
            "recomputed_bytes": int(run.get("recompute_ms", 0)),
            "swapped_out_bytes": 0,
        }
        (directory / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
        logged = f"{{'torchdelta/peak_gib': '{summary['peak_bytes'] / 2**30:.4}', 'torchdelta/recompute_ms': "
        assert ("memory_budget" in options) == (run is outcome and FRAMEWORKS[name].is_plugin)
        return training.Trained(run["weights"], f"{logged}'{run.get('recompute_ms', 0)}'}}")

    monkeypatch.setattr(training, "_train", train)
    return training.compare(FRAMEWORKS[name], directory / "python", "LoRA", directory)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_what_is_required(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The peak comes from the callback's logs where the budget stands in the YAML, otherwise from the summary."""
    assert compare(monkeypatch, tmp_path, name) == "same weights in 700.00 MiB, plain takes 1000.00 MiB"


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ({"weights": b"other"}, "weights differ"),
        ({"peak_bytes": BUDGET_BYTES + (1 << 20)}, "in a budget of"),
        ({"peak_bytes": 0}, "in a budget of"),
        ({"recompute_ms": 0.0}, "nothing was evicted"),
    ],
    ids=["weights", "above", "no peak", "nothing evicted"],
)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_what_fails(
    name: str, outcome: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Other weights, a peak above the budget or none at all, and a budget that pressed nothing."""
    with pytest.raises(training.FrameworkError, match=words):
        compare(monkeypatch, tmp_path, name, **outcome)
