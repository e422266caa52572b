"""`torchdelta plan` and `torchdelta simulate`: what they answer, and one clear line for everything that goes wrong."""

import gzip
import json
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.cli.command import torchdelta as in_a_process
from tests.cli.inside import inside as torchdelta
from tests.planners.chains import MIB, chain
from torchdelta.cli.options import say_if_compiling
from torchdelta.machine.catalog import find
from torchdelta.plan.file import read_plan
from torchdelta.plan.validate import validate
from torchdelta.planners import names
from torchdelta.simulate import kernel
from torchdelta.trace.file import write_trace
from torchdelta.trace.model import peak
from torchdelta.units import parse_size

STEP = chain([(64 * MIB, 8e-3, 2e-3)] * 6)
ON = ("--machine", "a100-80g")
KNAPSACK = (*ON, "--planner", "delta-2024")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A trace file of six blocks."""
    path = tmp_path_factory.mktemp("step") / "step.trace"
    write_trace(STEP, path)
    return path


def test_a_plan_is_made_written_and_simulated(trace, tmp_path):
    """Both commands tell the same of it; the file holds a valid plan; names carry their units."""
    budget_bytes = peak(STEP).size_bytes * 6 // 10
    path = tmp_path / "step.plan"
    made = in_a_process("plan", trace, "--memory-budget", budget_bytes, *KNAPSACK, "-o", path, "--bound", "--json")
    facts = json.loads(made.stdout)
    assert facts["peak_bytes"] <= facts["budget_bytes"] == budget_bytes < facts["plain_peak_bytes"]
    assert facts["bound_time_s"] <= facts["time_s"] * (1 + 1e-9)
    assert facts["time_s"] == pytest.approx(facts["plain_time_s"] + facts["stall_s"] + facts["recompute_s"])
    assert facts["num_swapped"] + facts["num_recomputed"] > 0
    validate(STEP, read_plan(path))
    again = json.loads(torchdelta("simulate", trace, path, "--json").stdout)
    for name in ("peak_bytes", "time_s", "stall_s", "recompute_s", "swapped_out_bytes"):
        assert again[name] == facts[name]


def test_the_bound_of_a_budget_that_no_plan_of_its_class_holds(tmp_path):
    """A larger class may hold it: then the bound has no time, in JSON neither."""
    step = chain([(16 * MIB, 2e-2, 5e-3)] * 4, weight_bytes=32 * MIB, optimizer=True)
    write_trace(step, tmp_path / "step.trace")
    asked = (tmp_path / "step.trace", "--memory-budget", peak(step).size_bytes * 6 // 10, *ON, "--class", "all")
    said = torchdelta("plan", *asked, "--bound").stdout
    assert "bound        no plan of the class 'saved' fits\n" in said

    def refused(name):
        raise AssertionError(name)

    facts = json.loads(torchdelta("plan", *asked, "--bound", "--json").stdout, parse_constant=refused)
    assert facts["bound_time_s"] is None


@pytest.mark.rest
def test_where_memory_is_short_and_costs_time_more_thought_is_named(trace, tmp_path):
    """Not where there is room, not where the step loses nothing, and not for what another planner did."""
    fast = (*ON, "--effort", "fast", "--memory-budget")
    facts = json.loads(torchdelta("plan", trace, *fast, peak(STEP).size_bytes * 6 // 10, "--json").stdout)
    least_bytes = facts["least_saved_peak_bytes"]
    assert facts["budget_bytes"] < 1.8 * least_bytes  # but it loses nothing
    assert not facts["is_near_least"]
    tight = torchdelta("plan", trace, *fast, least_bytes)
    assert "the budget is 1.00 times the least" in tight.stdout
    least_bytes = int(tight.stdout.partition("times the least, ")[2].partition("(")[2].partition(" bytes")[0])
    assert parse_size(" ".join(tight.stdout.partition("times the least, ")[2].split()[:2])) >= least_bytes
    assert "--effort best or --class extended" in tight.stdout
    assert "--effort" not in torchdelta("plan", trace, *ON, "--effort", "best", "--memory-budget", least_bytes).stdout
    swapped = torchdelta("plan", trace, *fast, least_bytes, "--planner", "swap-all")
    assert "hint" not in swapped.stdout
    torchdelta("plan", trace, *fast, least_bytes - 1, code=78)

    dear = tmp_path / "dear.trace"
    write_trace(chain([(512 * MIB, 1e-3, 1e-3)] * 6), dear)  # no time to swap in, and recomputed for a price
    roomy = json.loads(torchdelta("plan", dear, *fast, "5GiB", "--json").stdout)
    assert roomy["overhead"] > 0.01
    assert roomy["budget_bytes"] > 1.8 * roomy["least_saved_peak_bytes"]
    assert not roomy["is_near_least"]


def test_a_planner_with_another_runtime_is_simulated_with_it(trace, tmp_path):
    """DELTA's published code waits for its copies: so do the figures of its plans, when made and when read back."""
    path = tmp_path / "step.plan"
    released = (*ON, "--planner", "delta-2022-released", "--memory-budget", peak(STEP).size_bytes * 6 // 10)
    facts = json.loads(torchdelta("plan", trace, *released, "-o", path, "--json").stdout)
    assert facts["stall_s"] >= facts["swapped_out_bytes"] / find("a100-80g").host_out_bytes_per_s
    again = json.loads(torchdelta("simulate", trace, path, "--json").stdout)
    assert again["time_s"] == facts["time_s"]


def test_a_plan_is_simulated_with_the_links_that_it_was_made_for(trace, tmp_path):
    """Its header names the machine and the links, which may be others than the machine's own."""
    path = tmp_path / "step.plan"
    slow = (*ON, "--link", "pcie3-x4", "--planner", "swap-all", "--memory-budget", peak(STEP).size_bytes * 6 // 10)
    facts = json.loads(torchdelta("plan", trace, *slow, "-o", path, "--json").stdout)
    assert facts["swapped_out_bytes"]
    assert json.loads(torchdelta("simulate", trace, path, "--json").stdout)["time_s"] == facts["time_s"]
    assert json.loads(torchdelta("simulate", trace, path, *ON, "--json").stdout)["time_s"] < facts["time_s"]


def test_an_answer_that_cannot_be_written_is_one_line(trace):
    """A full disk behind stdout; no traceback."""
    with pathlib.Path("/dev/full").open("w") as full:
        command = (sys.executable, "-m", "torchdelta", "simulate", str(trace), *ON)
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "torchdelta simulate: cannot write to stdout: No space left on device"


def test_a_plan_over_the_end_of_the_step_goes_through_its_file(tmp_path):
    """States that wait on the host from one step to the next: planned, written, read and simulated alike."""
    step = chain([(16 * MIB, 8e-3, 2e-3)] * 3, weight_bytes=64 * MIB, optimizer=True)
    trace, path = tmp_path / "step.trace", tmp_path / "step.plan"
    write_trace(step, trace)
    budget_bytes = peak(step).size_bytes - 128 * MIB
    arguments = (*ON, "--class", "all", "--memory-budget", budget_bytes, "-o", path, "--json")
    facts = json.loads(torchdelta("plan", trace, *arguments).stdout)
    plan = read_plan(path)
    validate(step, plan)
    assert any(absence.next_use_op >= len(step.ops) for absence in plan.absences)
    again = json.loads(torchdelta("simulate", trace, path, "--json").stdout)
    for name in ("peak_bytes", "time_s", "stall_s", "host_peak_bytes", "swapped_out_bytes"):
        assert again[name] == facts[name]


def test_what_a_swap_needs_stands_beside_it(trace):
    """Pinned host memory of an accelerator, the disk of a CPU, and how long planning took."""
    half = ("--planner", "swap-all", "--memory-budget", peak(STEP).size_bytes)
    made = torchdelta("plan", trace, *ON, *half, "--json")
    facts = json.loads(made.stdout)
    assert facts["swaps_to"] == "host"
    assert facts["host_peak_bytes"] > 0
    assert facts["disk_peak_bytes"] == 0
    assert 0 < facts["planning_s"] < 60
    lines = torchdelta("plan", trace, *ON, *half).stdout.splitlines()
    assert any(line.startswith("host memory  ") and line.endswith(" pinned, at most at once") for line in lines)
    assert any(line.startswith("planning     ") and line.endswith(" s") for line in lines)

    on_cpu = json.loads(torchdelta("plan", trace, "--machine", "cpu", *half, "--json").stdout)
    assert on_cpu["swaps_to"] == "disk"
    assert on_cpu["host_peak_bytes"] == 0
    assert on_cpu["disk_peak_bytes"] == facts["host_peak_bytes"]
    assert on_cpu["disk_written_bytes"] == on_cpu["swapped_out_bytes"] > 0
    # 64 MiB in 8 ms would go through a memory's copy unseen; a disk has 43 ms to do with each.
    assert on_cpu["overhead"] > 1
    lines = torchdelta("plan", trace, "--machine", "cpu", *half).stdout.splitlines()
    assert any(line.startswith("disk         ") for line in lines)
    assert not any(line.startswith("host memory") for line in lines)


def test_a_trace_of_another_kind_of_device_is_told(trace):
    """The machine of one kind is planned for with a note, that of the other without."""
    words = f"the trace is of a step on {STEP.header.device}, but "
    told = [
        words
        in torchdelta("plan", trace, *machine, "--planner", "swap-all", "--memory-budget", peak(STEP).size_bytes).stderr
        for machine in (("--machine", "cpu"), ON)
    ]
    assert told == [STEP.header.device != "cpu", STEP.header.device != "cuda"]
    assert any(told)


def test_text_says_the_same_for_people(trace):
    """A share of the machine's memory is a budget, too; a step that fits is left alone."""
    lines = torchdelta("plan", trace, "--memory-budget", "80%", *KNAPSACK).stdout.splitlines()
    by_name = {line.split()[0]: line for line in lines}
    assert "64.00 GiB" in by_name["budget"] or "GiB" in by_name["budget"]
    assert "+0.00 %" in by_name["time"]
    plain = torchdelta("simulate", trace, *ON).stdout
    assert "keep on a100-80g" in plain


def test_an_impossible_budget_names_the_least(trace):
    """Exit code 78, one line, and the budget that it names is possible."""
    done = torchdelta("plan", trace, "--memory-budget", "1MiB", *KNAPSACK, code=78)
    assert len(done.stderr.strip().splitlines()[-1:]) == 1
    assert "the least budget found is" in done.stderr
    assert done.stdout == ""
    least_bytes = int(done.stderr.split("(")[1].split(" bytes")[0])
    assert torchdelta("plan", trace, "--memory-budget", least_bytes, *KNAPSACK).stdout


def broken(tmp_path, edit):
    """A trace file whose records were edited by hand."""
    path = tmp_path / "broken.trace"
    write_trace(STEP, path)
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    edit(lines)
    path.write_bytes(gzip.compress("\n".join(json.dumps(line) for line in lines).encode() + b"\n"))
    return path


def negative_life(lines):
    """A buffer that dies before it is born."""
    next(line for line in lines if line["record"] == "buffer" and line["birth_op"] > 3)["death_op"] = 1


def cyclic_read(lines):
    """An op that reads what it will write only later."""
    ops = [line for line in lines if line["record"] == "op"]
    ops[0]["reads"] = [*ops[0]["reads"], ops[1]["writes"][0]]


def without_records(lines):
    """A header and an end that counts nothing."""
    end = lines[-1]
    lines[1:] = [{name: 0 if isinstance(value, int) else value for name, value in end.items()}]


@pytest.mark.parametrize("edit", [negative_life, cyclic_read])
def test_a_trace_that_cannot_be_is_refused(tmp_path, edit):
    """One line that names the record."""
    done = torchdelta("simulate", broken(tmp_path, edit), *ON, code=2)
    assert len(done.stderr.splitlines()) == 1
    assert "broken.trace" in done.stderr
    assert done.stdout == ""


def test_an_empty_trace_is_refused(tmp_path):
    """There is nothing to plan."""
    path = broken(tmp_path, without_records)
    done = torchdelta("plan", path, "--memory-budget", "1GiB", *KNAPSACK, code=2)
    assert len(done.stderr.splitlines()) == 1
    assert "no ops" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (
            ("--machine", "a100-800g", "--memory-budget", "1GiB"),
            "unknown machine 'a100-800g': did you mean a100-80g",
            2,
        ),
        ((*ON, "--planner", "delta-2023", "--memory-budget", "1GiB"), "did you mean delta-202", 2),
        ((*ON, "--effort", "bets", "--memory-budget", "1GiB"), "unknown effort 'bets': did you mean best?", 2),
        ((*ON, "--effort", "most", "--memory-budget", "1GiB"), "unknown effort 'most': use fast or best", 2),
        ((*ON, "--class", "save", "--memory-budget", "1GiB"), "unknown class 'save': did you mean saved?", 2),
        (
            (*ON, "--class", "most", "--memory-budget", "1GiB"),
            "unknown class 'most': use saved, extended, persistent or all",
            2,
        ),
        ((*KNAPSACK, "--class", "all", "--memory-budget", "1GiB"), "does not plan in the class 'all': use 'saved'", 2),
        ((*ON, "--planner", "torchdelta-all", "--memory-budget", "1GiB"), "with --class all", 2),
        ((*KNAPSACK, "--memory-budget", "1.5"), "is ambiguous", 2),
        ((*KNAPSACK, "--memory-budget", "8 potatoes"), "potatoes", 2),
    ],
)
def test_wrong_words_are_one_line(trace, arguments, said, code):
    """With the nearest that would work."""
    done = torchdelta("plan", trace, *arguments, code=code)
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr
    assert done.stdout == ""


def test_files_that_are_not_there_or_something_else_are_one_line(trace, tmp_path):
    """A missing trace, a plan that is a trace, a plan of another step."""
    torchdelta("simulate", tmp_path / "none.trace", *ON, code=2)
    assert len(torchdelta("simulate", trace, trace, code=2).stderr.splitlines()) == 1
    other = tmp_path / "other.trace"
    write_trace(chain([(64 * MIB, 8e-3, 2e-3)] * 3), other)
    path = tmp_path / "other.plan"
    torchdelta("plan", other, "--memory-budget", "1GiB", *KNAPSACK, "-o", path)
    done = torchdelta("simulate", trace, path, code=2)
    assert "belongs to another trace" in done.stderr.splitlines()[-1]
    assert "machine is needed" in torchdelta("simulate", trace, code=2).stderr


def test_planners_are_listed():
    """Without a trace, a budget or a machine, for `plan` and for `fit`."""
    for command in ("plan", "fit"):
        lines = torchdelta(command, "--planner", "list").stdout.splitlines()
        assert [line.split()[0] for line in lines] == list(names())
        assert any(line.split() == ["torchdelta", "saved,", "extended,", "persistent,", "all"] for line in lines)


def test_times_without_launches_are_marked(tmp_path):
    """Where launches would add a tenth or more, on a machine that does not price them."""
    for milliseconds, is_marked in ((1e-3, True), (1.0, False)):
        path = tmp_path / "step.trace"
        step = chain([(64 * MIB, 8e-3 * milliseconds, 2e-3 * milliseconds)] * 6)
        write_trace(step, path)
        assert "launches are left out" not in torchdelta("simulate", path, *ON).stdout
        on = ("--machine", "cpu")
        done = torchdelta("simulate", path, *on)
        assert ("launches are left out of these times" in done.stdout) == is_marked
        facts = json.loads(torchdelta("simulate", path, *on, "--json").stdout)
        num_timed = sum(op.time_s > 0 for op in step.ops)
        assert facts["launches_left_out_s"] == pytest.approx(5e-6 * num_timed if is_marked else 0)


def test_the_first_plan_says_that_it_compiles(monkeypatch, tmp_path, capsys):
    """Once on a machine: where compiled code lies, nothing is said."""
    stats = SimpleNamespace(cache_path=str(tmp_path))
    function = SimpleNamespace(stats=stats, __module__="torchdelta.simulate.kernel", __name__="evaluate")
    monkeypatch.setattr(kernel, "evaluate", function)
    say_if_compiling()
    assert capsys.readouterr().err == "torchdelta: compiling the planner, once per version: about ten seconds more\n"
    (tmp_path / "kernel.evaluate-93.py311.nbi").touch()
    say_if_compiling()
    assert capsys.readouterr().err == ""


def test_compiled_code_is_kept_where_it_is_looked_for(trace):
    """After a plan there is something to be found, so that the next process is told nothing of it, but of the step."""
    torchdelta("plan", trace, "--memory-budget", "80%", *KNAPSACK)
    assert list(pathlib.Path(kernel.evaluate.stats.cache_path).glob("kernel.*.nbi"))
    again = in_a_process("plan", trace, "--memory-budget", "80%", *KNAPSACK)
    assert "compiling" not in again.stderr
    assert f"torchdelta: {trace}: planning within " in again.stderr
    assert " ms on a100-80g\n" in again.stderr
