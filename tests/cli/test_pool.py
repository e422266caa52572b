"""`torchdelta pool`: what a user sees, and one line for whatever goes wrong."""

import json

import pytest

from tests.cli.command import torchdelta
from tests.cli.inside import inside
from tests.planners.chains import chain
from torchdelta.trace.file import write_trace

pytest.importorskip("numba")

EXAMPLE = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"


@pytest.fixture
def example(tmp_path):
    """Lives that fit into 12 bytes."""
    path = tmp_path / "lives.csv"
    path.write_text(EXAMPLE, encoding="utf-8")
    return path


def test_a_placement_is_told_written_drawn_and_checked(example, tmp_path):
    """The table with every pool, the CSV with the input's columns and offsets, a picture, and the check of that CSV."""
    output, picture = tmp_path / "placement.csv", tmp_path / "placement.svg"
    done = inside("pool", example, "-o", output, "--svg", picture, "--json")
    facts = json.loads(done.stdout)
    assert facts["footprint_bytes"] == facts["lower_bound_bytes"] == 12
    assert facts["proved_optimal"] is True
    assert {row["solver"] for row in facts["pools"]} == {"torchdelta", "smartpool", "cnmem", "torch-caching"}
    lines = output.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "id,lower,upper,size,offset"
    assert [line.rsplit(",", 1)[0] for line in lines[1:]] == EXAMPLE.splitlines()[1:]
    assert picture.read_text(encoding="utf-8").count("<title>") == 5
    checked = inside("pool", example, "--validate", output)
    assert "valid            yes" in checked.stdout
    table = inside("pool", example).stdout
    assert "proved optimal   yes" in table
    assert "torch-caching" in table


def test_a_wrong_placement_is_refused(example, tmp_path):
    """Everything at 0: the first two that meet are named."""
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("id,offset\nb1,0\nb2,0\nb3,0\nb4,0\nb5,0\n", encoding="utf-8")
    done = inside("pool", example, "--validate", wrong, code=2)
    assert "share addresses at moment 0" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", (), "has no column 'id'"),
        ("id,lower,upper,size\n", (), "has no lives"),
        ("id,lower,upper\na,0,1\n", (), "has no column 'size'"),
        ("id,lower,upper,size\na,0,1,4\na,0,1,4\n", (), "'a' occurs twice"),
        ("id,lower,upper,size\na,2,1,4\n", (), "'a' ends at 1 before it starts at 2"),
        ("id,lower,upper,size\na,0,1,-4\n", (), "size of -4 bytes"),
        ("id,lower,upper,size\na,0,1,many\n", (), "the size of 'a' is 'many', not a whole number"),
        ("id,lower,upper,size\na,0,1\n", (), "the size of 'a' is None"),
        (EXAMPLE, ("--capacity", "3"), "'b1' needs 4 B, more than the capacity of 3 B"),
        (
            EXAMPLE,
            ("--capacity", "11"),
            "no placement within 11 B was found: the best needs 12 B (1 B more), none needs less than 12 B",
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path, text, options, words):
    """What is wrong, with the number; no traceback, and an exit code."""
    path = tmp_path / "lives.csv"
    path.write_text(text, encoding="utf-8")
    done = inside("pool", path, *options, code=1 if "was found" in words else 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_capacity_of_thousands_of_digits_is_one_line(tmp_path):
    """Python itself refuses to read such a number."""
    path = tmp_path / "lives.csv"
    path.write_text(EXAMPLE, encoding="utf-8")
    done = inside("pool", path, "--capacity", "9" * 5000, code=2)
    assert "is not a size" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_file_is_one_line(tmp_path):
    """Whatever its name says it is."""
    for name in ("none.csv", "none.trace"):
        done = torchdelta("pool", tmp_path / name, code=2)
        assert "there is no such file" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_plan_whose_footprint_is_within_the_budget(tmp_path):
    """`plan --pool` says both numbers: what is alive at most, and what that takes with its addresses."""
    write_trace(chain([(8 << 20, 2e-3, 1e-4), (4 << 20, 8e-3, 5e-4)] * 4), tmp_path / "step.trace")
    options = ("--memory-budget", "64MiB", "--machine", "a100-80g", "--effort", "fast", "--pool")
    facts = json.loads(inside("plan", tmp_path / "step.trace", *options, "--json").stdout)
    assert facts["peak_bytes"] <= facts["footprint_bytes"] <= 64 << 20
    assert "footprint    " in inside("plan", tmp_path / "step.trace", *options).stdout
