"""Plans of every planner can be followed: those of the larger classes as far as saved tensors go."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.runtime.programs import UNLIMITED, running
from tests.sampling import sample
from torchdelta.planners import classes_of, names

WIDTH, NUM_ROWS, DEPTH, NUM_STEPS = 64, 4096, 6, 6  # activations of 1 MiB: AutoSwap leaves what is smaller
WAIT_S = 240.0


def _train(budget: int | str, planner: str | None = None) -> tuple[list[torch.Tensor], list[int], tuple[int, int, int]]:
    """Train a few steps. Return the parameters, the peaks, and the numbers of steps, absences and replays followed."""
    torch.manual_seed(0)
    layers = [part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with running(budget, planner=planner, tier="memory") as (memory_budget, session):
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model(torch.randn(NUM_ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
            if planner is not None and step == 1:
                assert session.programs.wait(WAIT_S), planner
        latest = session.programs.latest
        program = latest.schedule if latest is not None else None
    peaks = [one.peak_bytes for one in memory_budget.summary().steps]
    evictions = 0 if program is None else sum(map(len, program.evictions.values()))
    found = (session.follower.num_followed_steps, evictions, 0 if program is None else program.num_not_carried_out)
    return [parameter.detach().clone() for parameter in model.parameters()], peaks, found


@pytest.mark.usefixtures("needs_counter")
@pytest.mark.parametrize("planner", sample([name for name in names() if classes_of(name)[0] != "saved"], 3))
def test_plans_of_the_larger_classes_are_followed(planner: str) -> None:
    """Online rules as they were played, and AutoSwap's swaps: the plain bits inside the budget."""
    expected, plain_peaks, _ = _train(UNLIMITED)
    budget = int(0.75 * max(plain_peaks[1:]))
    found, peaks, (num_followed, num_evictions, _) = _train(budget, planner)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert max(peaks) <= budget
    assert num_followed == NUM_STEPS - 2
    assert num_evictions
