"""Steps that fit are not recorded on an accelerator either, once its allocator's peaks and limits can be watched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator.watch import StandinWatch
from tests.runtime.parts import running_session
from tests.same_bits.judge import DEVICE, run, state_of
from torchdelta import Config, MemoryBudget
from torchdelta._torch.device import allocator_statistics, reset_allocator_peak
from torchdelta.native.build import status_before_use
from torchdelta.native.saved_hooks import MODULE
from torchdelta.runtime.device import accelerator

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not status_before_use(MODULE, "").is_on, reason="needs the native parts"),
]
WIDTH, DEPTH = 256, 8


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch the stand-in's allocator, too."""
    if DEVICE != "cuda":
        monkeypatch.setattr(accelerator, "new_watch", StandinWatch)


class Training:
    """A step function whose batches are given, and what was seen of its steps."""

    def __init__(self, device: torch.device, batches: list[int]) -> None:
        self.device = device
        self.batches = batches
        self.were_recorded: list[bool] = []
        self.peaks_bytes: list[int] = []

    def __call__(self, scope: Any) -> dict[str, Any]:
        """Train."""
        self.were_recorded.clear()
        self.peaks_bytes.clear()
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(DEPTH))
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        with scope() as budget:
            for batch_size in self.batches:
                if budget is not None:
                    self.were_recorded.append(not running_session().pause.is_on)
                losses.append(self._step(model, optimizer, batch_size))
        return state_of(model, losses=losses)

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch_size: int) -> torch.Tensor:
        reset_allocator_peak(self.device)
        loss = model(torch.randn(batch_size, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        statistics = allocator_statistics(self.device)
        assert statistics is not None
        self.peaks_bytes.append(int(statistics["peak"]))
        return loss.detach()


def test_recording_pauses_and_the_bits_are_the_same(device: torch.device) -> None:
    """From the fourth step on nothing is recorded; the first makes the optimizer's states, two more are alike."""
    training = Training(device, [512] * 8)
    plain = run(training)
    budgets = [MemoryBudget("1TiB", Config(tier="memory"))]
    ours = run(training, lambda: budgets[0])
    assert ours.message == ""
    assert ours.observed == plain.observed
    assert training.were_recorded == [True] * 3 + [False] * 5
    summary = budgets[0].summary()
    assert summary.num_unrecorded_steps == 5
    assert all(step.peak_bytes > 0 for step in summary.steps)


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_a_larger_batch_resumes_recording_and_holds_the_budget(device: torch.device, share: float) -> None:
    """It is noticed at its first saved tensor, early enough for the rest of the step to fit."""
    batches = [512] * 6 + [8192] * 2 + [512] * 2
    training = Training(device, batches)
    plain = run(training)
    resident_bytes = min(training.peaks_bytes)
    budget_bytes = resident_bytes + int(share * (max(training.peaks_bytes) - resident_bytes))
    budgets = [MemoryBudget(budget_bytes, Config(tier="memory", planner=None))]
    ours = run(training, lambda: budgets[0])
    assert ours.message == ""
    assert ours.observed == plain.observed
    assert training.were_recorded[3:6] == [False] * 3
    assert training.were_recorded[7]  # the step after the larger one
    assert max(training.peaks_bytes[7:]) <= budget_bytes  # in the first, an op's own needs are not known yet
    assert budgets[0].summary().evicted
