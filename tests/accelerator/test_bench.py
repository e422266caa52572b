"""The GPU benchmark's harness on a device whose memory, streams and generators are not the host's."""

from __future__ import annotations

import pytest
import torch

from benchmarks.__main__ import build_parser
from benchmarks.gpu import command
from benchmarks.gpu.subjects import SUBJECTS
from tests.same_bits.judge import DEVICE

pytestmark = pytest.mark.accelerator


def options(*words: str) -> object:
    """Read a command line."""
    line = ["gpu", "--quick", "--device", DEVICE, "--tiny", "--no-write", *words]
    return build_parser({"gpu": command}).parse_args(line)


def test_the_harness_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits, active bytes and the race, with a model of no use."""
    name = "gpt2"
    monkeypatch.setattr(command, "SUBJECTS", {name: SUBJECTS[name]})
    # The libraries of a GPU need more for themselves than this model: nothing has to leave there.
    outcome = command.run(options("--share", "0.9") if DEVICE != "cuda" else options("--share", "1.2"))
    # Checkpointing saves no memory on this model, so what follows a plan at its peak does not fit.
    expected = {"transfers beside compute", "following at checkpoint's peak: memory suffices"}
    if DEVICE == "cuda":
        expected |= {"something left the device", "active bytes, torchdelta, following"}
        expected.add("active bytes, following at checkpoint's peak")
    failed = {check.name: check.detail for check in outcome.checks if not check.passed}
    assert {key: detail for key, detail in failed.items() if key.removeprefix(f"{name}: ") not in expected} == {}
    assert set(outcome.data[name]["rounds"][0]) == set(command.PEERS)
    blocks = outcome.data[name]["rounds"][0].values()
    assert all(block["peak_bytes"] > 0 for block in blocks if "error" not in block)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's, of its own making
def test_a_budget_that_is_too_small_ends_one_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a failed check with the budget's own words, and the results are still written."""
    monkeypatch.setattr(command, "SUBJECTS", {"gpt2": SUBJECTS["gpt2"]})
    outcome = command.run(options("--share", "0.01"))
    assert not outcome.passed
    assert "out of memory" in outcome.checks[-1].detail
    assert outcome.data["gpt2"]["error"].startswith("BudgetError")
    assert not torch.are_deterministic_algorithms_enabled() or DEVICE == "cuda"
