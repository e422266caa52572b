"""A step that outgrows its limit is found, and one that was only rewritten is not."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from tests.integrations.grown_steps import BUILDERS, HARMLESS, REGRESSIONS
from tests.sampling import sample
from torchdelta.errors import ConfigError, MachineError, SizeError
from torchdelta.integrations.fits import Limit, Size, limit_of, message, size_of
from torchdelta.trace.symbolic import traced_step

HEADROOM = 1.05  # what a test leaves above the step of today


@functools.cache
def limit_above(builder: str) -> Limit:
    """Return a limit that leaves the step as it was a little headroom."""
    plenty = limit_of(machine="rtx4090")
    today = size_of(BUILDERS[builder], plenty)
    assert today.fits
    assert today.growth_bytes == 0
    return limit_of(round(today.plain_peak.size_bytes * HEADROOM), machine="rtx4090")


def size_after(builder: str, options: dict[str, bool]) -> Size:
    """Return the size of a step after a change."""
    return size_of(functools.partial(BUILDERS[builder], **options), limit_above(builder))


@pytest.mark.parametrize("change", sample(REGRESSIONS, 5, 4))
def test_a_regression_is_found(change):
    """With a limit 5 % above what the step took before it."""
    assert not size_after(*REGRESSIONS[change]).fits


@pytest.mark.parametrize("change", sample(HARMLESS, 5, 3))
def test_a_harmless_change_passes(change):
    """Within the same limit."""
    assert size_after(*HARMLESS[change]).fits


def test_there_are_twenty_of_each():
    """A list that is cut short would prove less than it says."""
    assert len(REGRESSIONS) >= 20
    assert len(HARMLESS) >= 20


def test_what_is_said_of_a_peak():
    """The peak, the excess, the op and the tensors that set it, and a least budget that is below the limit."""
    limit = limit_above("language")
    text = message(size_after("language", {"kept_logits": True}), limit)
    lines = text.splitlines()
    assert lines[0].startswith("the step outgrows 31.13 MiB on rtx4090: its peak is 37.65 MiB, 6.52 MiB too much")
    assert "aten._log_softmax_backward_data.default" in lines[1]
    assert "8.00 MiB  activation, made by aten." in text
    assert "in head" in text
    # What the model itself keeps cannot leave, but for a few small tensors.
    assert lines[-1] == "the least budget is 37.16 MiB: it does not fit inside a MemoryBudget either"
    by_hand = message(size_after("uncheckpointed", {"attention_by_hand": True}), limit_above("uncheckpointed"))
    assert by_hand.splitlines()[-1].endswith("it would still train")


def test_what_is_said_of_growth():
    """What each step leaves, and where that ends after the steps of a run."""
    limit = limit_of("1GiB", machine="rtx4090")
    size = size_of(functools.partial(BUILDERS["language"], kept_outputs=True), limit)
    assert size.growth_bytes == 4 * 128 * 4096 * 4
    assert not size.fits  # 1,000 steps of 8 MiB
    text = message(size, limit)
    assert "each step leaves 8.00 MiB in memory that the next one does not free: step 1000 peaks at 7.8" in text
    assert "constant, kept from before the step" in text
    few = limit_of("1GiB", machine="rtx4090", num_steps=20)
    assert size_of(functools.partial(BUILDERS["language"], kept_outputs=True), few).fits


def test_a_step_may_be_meant_to_run_inside_a_budget():
    """Then it fits down to the least budget, and not below."""
    function = BUILDERS["uncheckpointed"]
    plain = size_of(function, limit_of("1GiB", machine="rtx4090")).plain_peak.size_bytes
    assert size_of(function, limit_of(round(plain * 0.9), machine="rtx4090", inside_budget=True)).fits
    tight = limit_of(round(plain * 0.3), machine="rtx4090", inside_budget=True)
    size = size_of(function, tight)
    assert not size.fits
    assert "it does not fit inside a MemoryBudget either" in message(size, tight)


def test_the_size_is_the_machines_without_the_reserve():
    """Where the marker names none; a share is one of all its memory."""
    assert limit_of(machine="rtx4090").size_bytes == pytest.approx(21.56 * 2**30, rel=1e-3)
    assert limit_of("50%", machine="rtx4090").size_bytes == pytest.approx(11.82 * 2**30, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({}, ConfigError, "fits needs a machine by its name"),
        ({"machine": "rtx4091"}, MachineError, "rtx4090"),
        ({"size": "8 potatoes", "machine": "t4"}, SizeError, "potatoes"),
        ({"size": 0.8, "machine": "t4"}, SizeError, "80%"),
        (
            {"size": "32GiB", "machine": "rtx4090"},
            ConfigError,
            "tensors can take at most 21.56 GiB of the 23.64 GiB of rtx4090",
        ),
        ({"machine": "t4", "num_steps": 0}, ConfigError, "num_steps 0 is no number of steps"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, error, said):
    """Which says what is wrong and what works."""
    with pytest.raises(error) as caught:
        limit_of(**arguments)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def growing(keep: str):
    """A small step that leaves something behind."""
    model = nn.Linear(256, 256)
    kept: list[object] = []

    def step(model, inputs):
        output = model(inputs)
        loss = output.square().mean()
        loss.backward()
        model.zero_grad()
        if keep == "output":
            kept.append(output)
        elif keep == "storage of a view":
            kept.append(output[0].detach())
        elif keep == "once":
            kept[:] = [output]
        elif keep == "late" and len(kept) < 2:
            kept.append(torch.ones(1000))

    return model, torch.randn(128, 256), step


@pytest.mark.parametrize(
    ("keep", "growth_bytes"),
    [("nothing", 0), ("output", 131072), ("storage of a view", 131072), ("once", 0), ("late", 0)],
)
def test_growth_is_what_every_step_leaves(keep, growth_bytes):
    """Kept views keep their whole storage; what is replaced, or made once, is no growth."""
    traced = traced_step(lambda: growing(keep))
    assert traced.growth_bytes == growth_bytes


@pytest.mark.parametrize(("machine", "device"), [("cpu", "cpu"), ("rtx4090", "cuda")])
def test_the_step_is_that_of_the_machines_device(machine, device):
    """A CPU has other kernels, workspaces and optimizer ops than CUDA."""
    assert size_of(BUILDERS["language"], limit_of(machine=machine)).trace.header.device == device
