"""The benchmark of the papers, tried on its smallest case."""

import argparse

import pytest
from msgspec.structs import replace

from benchmarks.__main__ import build_parser
from benchmarks.outcome import Outcome
from benchmarks.papers import command, subjects, tables
from benchmarks.papers.report import report
from torchdelta.machine.catalog import find
from torchdelta.trace.model import peak
from torchdelta.units import format_bytes


@pytest.fixture
def options():
    """What the command line gives for one case, two planners, and nothing written."""
    parser = build_parser({"papers": command})
    arguments = ["papers", "--no-write", "--cases", "resnet50@v100-32g", "--shares", "0.6", "--tables", "overheads"]
    arguments.append("floors")
    return parser.parse_args([*arguments, "--planners", "keep", "delta-2024"])


@pytest.mark.rest
def test_the_largest_plain_batch_fits_and_the_next_does_not():
    """By the same peak that a plan is held to."""
    machine = find("t4")
    size = subjects.largest_plain_batch("resnet50", machine, with_optimizer=True)
    assert size > 1
    for batch_size, fits in ((size, True), (size + 1, False)):
        step = subjects.step("resnet50", machine, batch_size, with_optimizer=True)
        assert (peak(step, with_workspace=True).size_bytes <= machine.memory_bytes) is fits


def test_the_tables_run_on_machines_that_price_kernels_by_their_kind_too():
    """The same case, on the profile that the tables were first made with, and on the catalog's machine."""
    case = subjects.CASES["resnet50@v100-32g"]
    assert case.machine.kernels == ""
    by_kind = replace(case, by_kind=True)
    assert by_kind.machine == find("v100-32g")
    assert by_kind.machine.kernels == "cuda"
    assert by_kind.name == case.name


@pytest.mark.rest
def test_a_cell_has_the_bound_below_every_plan(options: argparse.Namespace, capsys):
    """The knapsack has a plan at 60 %, keep has none; both tables are printed."""
    outcome = command.run(options)
    (row,) = outcome.data["overheads"]
    assert row["planners"]["keep"] == {"feasible": False, "least_budget_bytes": row["plain_peak_bytes"]}
    assert 0 < row["bound"]["overhead"] <= row["planners"]["delta-2024"]["overhead"]
    assert outcome.data["floors"][0]["least_budget_bytes"]["delta-2024"] >= row["lower_bound_bytes"]
    printed = capsys.readouterr().out
    assert "| resnet50@v100-32g | 60%" in printed
    assert "Least budgets found" in printed


def test_a_plan_far_from_the_bound_is_held_against_what_whole_decisions_prove(capsys):
    """Both bounds are printed, and the check takes the higher one."""
    entry = {"feasible": True, "overhead": 0.2}
    row = {"case": "resnet50@v100-32g", "share": 0.2, "budget_bytes": 10, "planners": {"torchdelta:best": entry}}
    row["bound"] = {"overhead": 0.195}
    assert not tables.is_far_from_bound(row)
    row["bound"] = {"overhead": 0.11}
    assert tables.is_far_from_bound(row)
    outcome = Outcome()
    text = report(outcome, {"overheads": [{**row, "whole_bound": {"overhead": 0.195}}]})
    assert "| 11.0          | 19.5                 | 20.0 " in text
    assert "0.50 points" in capsys.readouterr().out


def test_a_column_names_a_planner_its_class_and_its_effort():
    """The class and the effort may be left out."""
    assert tables.parse_label("torchdelta/extended:best") == ("torchdelta", "extended", "best")
    assert tables.parse_label("torchdelta:best") == ("torchdelta", None, "best")
    assert tables.parse_label("dtr") == ("dtr", None, "fast")


def test_a_larger_class_is_held_against_the_smaller_one():
    """Its column is found by its class; a plan of it that takes longer is told."""
    entries = {"torchdelta:best": 0.2, "torchdelta/extended:best": 0.25}
    planners = {name: {"feasible": True, "overhead": overhead} for name, overhead in entries.items()}
    row = {"case": "resnet50@v100-32g", "share": 0.2, "budget_bytes": 10, "planners": planners}
    outcome = Outcome()
    assert "torchdelta/extended:best" in report(outcome, {"overheads": [row]})
    (check,) = [check for check in outcome.checks if check.name.endswith("extended never worse")]
    assert not check.passed


def test_runs_of_single_cases_make_one_file():
    """A new row replaces the old one and keeps its other planners; cases come in their order."""
    old = {"case": "resnet50@a100-80g", "share": 0.6, "planners": {"keep": 1, "dtr": 2}}
    new = {"case": "resnet50@a100-80g", "share": 0.6, "planners": {"dtr": 3}}
    first = {"case": "resnet50@v100-32g", "share": 0.6, "planners": {}}
    both = command.merged({"overheads": [old], "floors": []}, {"overheads": [new, first]})
    assert both == {"overheads": [first, {**new, "planners": {"keep": 1, "dtr": 3}}]}


def test_autoswap_saves_something_without_waiting():
    """On AlexNet, the smallest of its models."""
    row = tables.autoswap("alexnet", find("t4"), 16)
    assert 0 < max(row["reduction"].values()) < 1


@pytest.mark.rest
def test_a_batch_is_also_held_against_gradient_accumulation():
    """Whose optimizer steps once a batch, too: that plain is faster a sample, so the slowdown against it is larger."""
    row = tables.batches(subjects.Case(model="alexnet", machine_name="t4"), "fast")
    for entry in filter(None, row["largest"].values()):
        assert entry["slowdown"] < entry["slowdown_accumulated"]
    text = report(Outcome(), {"batches": [row]})
    (first, *_) = filter(None, row["largest"].values())
    beside = f"({first['slowdown_accumulated']:.2f}), {format_bytes(first['host_bytes'])}"
    assert f"@ {first['slowdown']:.2f} {beside}" in text
    assert first["host_bytes"] > 0
