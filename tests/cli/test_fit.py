"""`torchdelta fit`: fits or not, the least budget and what sets it, the largest batches, and what to do."""

import json

import pytest

from tests.cli.inside import inside
from torchdelta.errors import TraceError
from torchdelta.machine.catalog import find
from torchdelta.machine.model import reserve_bytes
from torchdelta.trace import symbolic
from torchdelta.units import parse_size

MODEL = """
import torch
from torch import nn

def model(batch_size):
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(batch_size, 512)

def nothing(batch_size):
    return 42

def without_batch():
    return model(2)

def contrastive(batch_size):
    def step(model, x):
        made = model(x)
        (made @ made.t()).exp().mean().backward()
    return nn.Linear(64, 64), torch.randn(batch_size, 64), step
"""
OPTIONS = ("--machine", "t4", "--planner", "delta-2024", "--optimizer", "sgd")


@pytest.fixture
def _place(tmp_path, monkeypatch):
    """A directory on the path with a module that builds a small model."""
    (tmp_path / "small_for_fit.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("_place")
def test_every_question_is_answered():
    """A batch that needs a budget: its cost, the least budget and what sets it, batches that grow with patience."""
    done = inside("fit", "small_for_fit:model", *OPTIONS, "--memory-budget", "64MiB", "--batch-size", "3000", "--json")
    facts = json.loads(done.stdout)
    assert facts["fits"]
    assert not facts["fits_plain"]
    assert (
        facts["lower_bound_bytes"] <= facts["least_budget_bytes"] <= facts["budget_bytes"] < facts["plain_peak_bytes"]
    )
    assert facts["least_budget_op_name"].startswith("aten.")
    sizes = [tensor["size_bytes"] for tensor in facts["least_budget_tensors"]]
    assert sizes
    assert sizes == sorted(sizes, reverse=True)
    batches = [facts["largest_batch"][name] for name in ("1.05", "1.10", "1.25", "any")]
    assert batches == sorted(batches)
    assert facts["largest_plain_batch"] <= batches[0]
    assert batches[-1] >= 3000 * 0.99
    assert "MemoryBudget" in facts["recommendation"]


@pytest.mark.usefixtures("_place")
def test_sizes_that_are_shown_can_be_set():
    """The least budget is no less than it is, the recommended one no more than there is, and both are enough."""
    step = ("fit", "small_for_fit:model", *OPTIONS, "--batch-size", "3000", "--memory-budget")
    available_bytes = 67_000_001  # 63.896 MiB, which is nearer to 63.90 than to 63.89
    facts = json.loads(inside(*step, available_bytes, "--json").stdout)
    least_bytes = facts["least_budget_bytes"]
    shown = inside(*step, available_bytes).stdout
    assert "with MemoryBudget('63.89 MiB')" in shown
    assert parse_size(" ".join(shown.partition("least budget")[2].split()[:2])) >= least_bytes
    assert f"({least_bytes} bytes)" in shown
    # Nothing is left to round away.
    assert f"with MemoryBudget({least_bytes})" in inside(*step, least_bytes).stdout


@pytest.mark.usefixtures("_place")
def test_a_model_that_fits_needs_no_budget():
    """Said so, in words."""
    done = inside("fit", "small_for_fit:model", *OPTIONS, "--batch-size", "16")
    assert "fits as it is" in done.stdout
    assert "no budget is needed" in done.stdout


@pytest.mark.usefixtures("_place")
def test_a_batch_that_no_plan_holds_exits_with_78():
    """With the batch that would."""
    done = inside("fit", "small_for_fit:model", *OPTIONS, "--memory-budget", "64MiB", "--batch-size", "60000", code=78)
    assert "does not fit: use at most" in done.stdout


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("small_for_fit:nothing", "must return"),
        ("small_for_fit:nowhere", "nowhere"),
        ("absent:model", "absent"),
        ("small_for_fit", "small_for_fit"),
        ("small_for_fit:without_batch", "takes no batch size: give the function an argument for it"),
    ],
)
@pytest.mark.usefixtures("_place")
def test_a_function_that_cannot_be_used_is_one_line(function, said):
    """A module that does not import, a function that is not there, that takes or returns the wrong thing."""
    done = inside("fit", function, *OPTIONS, code=2)
    assert len(done.stderr.strip().splitlines()) == 1
    assert said in done.stderr
    assert done.stdout == ""


@pytest.mark.rest
@pytest.mark.usefixtures("_place")
def test_the_reserve():
    """By default tensors get the memory less a reserve, which is named; an option sets it."""
    step = ("fit", "small_for_fit:model", *OPTIONS, "--batch-size", "16")
    facts = json.loads(inside(*step, "--json").stdout)
    t4 = find("t4")
    assert facts["device_memory_bytes"] == t4.memory_bytes
    assert facts["reserve_bytes"] == reserve_bytes(t4)
    assert facts["budget_bytes"] + facts["reserve_bytes"] == t4.memory_bytes
    assert "t4, 13.23 GiB of 14.75 GiB (1.52 GiB are left to context and allocator: --reserve): batch 16 fits" in (
        inside(*step).stdout
    )
    facts = json.loads(inside(*step, "--json", "--reserve", "4GiB").stdout)
    assert facts["budget_bytes"] == t4.memory_bytes - 4 * 2**30
    assert json.loads(inside(*step, "--json", "--reserve", "0").stdout)["budget_bytes"] == t4.memory_bytes
    both = inside(*step, "--reserve", "1GiB", "--memory-budget", "8GiB", code=2)
    wrong = "--memory-budget limits tensors alone, so --reserve has no effect: leave one of them out"
    assert both.stderr == f"torchdelta fit: {wrong}\n"
    assert "leaves nothing of the 14.75 GiB of t4" in inside(*step, "--reserve", "15GiB", code=2).stderr


@pytest.mark.usefixtures("_place")
@pytest.mark.parametrize(("machine", "device"), [("cpu", "cpu"), ("t4", "cuda")])
def test_the_step_is_that_of_the_machines_device(monkeypatch, machine, device):
    """A CPU has other kernels, workspaces and optimizer ops than CUDA."""
    asked = []

    def trace(*_arguments, device, **_options):
        asked.append(device)
        raise TraceError("enough")

    monkeypatch.setattr(symbolic, "trace_step", trace)
    inside("fit", "small_for_fit:model", "--machine", machine, code=2)
    assert asked == [device]


@pytest.mark.usefixtures("_place")
def test_a_step_that_is_not_linear_in_its_batch_is_told():
    """The largest batches are then wrong."""
    assert "does not grow linearly" in inside("fit", "small_for_fit:contrastive", *OPTIONS).stderr
    assert "does not grow linearly" not in inside("fit", "small_for_fit:model", *OPTIONS).stderr
