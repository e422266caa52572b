"""`torchdelta pool`: what a user sees, and one line for whatever goes wrong."""

import errno
import gzip
import json

import pytest

from tests.cli.command import torchdelta
from tests.cli.inside import inside
from tests.planners.chains import chain
from torchdelta.trace.file import write_trace
from torchdelta.whole_file import WholeFile

pytest.importorskip("numba")

from torchdelta.pool import solvers

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


@pytest.mark.parametrize("option", ["-o", "--svg"])
def test_a_full_disk_leaves_the_old_file(example, tmp_path, monkeypatch, option):
    """One line says why there is no new one."""
    old = tmp_path / "old"
    old.write_text("old", encoding="utf-8")

    def full(_file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(WholeFile, "close", full)
    done = inside("pool", example, "--fast", option, old, code=1)
    assert "old" in done.stderr
    assert done.stderr.endswith("No space left on device\n")
    assert len(done.stderr.splitlines()) == 1
    assert old.read_text(encoding="utf-8") == "old"


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
        ("lower,upper,size,id\n0,1,5,a\n0,1,5\n", (), "row 2 ends before its id"),
        (
            EXAMPLE,
            ("--capacity", "3"),
            "no placement within 3 B was found: the best needs 12 B (9 B more), none needs less than 12 B",
        ),
        (
            "id,lower,upper,size\na,0,1,2000\n",
            ("--capacity", "1999B"),
            "the best needs 1.96 KiB (2000 bytes, 1 B more), none needs less than 1.95 KiB",
        ),
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
    done = inside("pool", path, *options, code=1 if "the best needs" in words else 2)
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-o", "lives.csv"), "cannot write 'lives.csv': it is the input, too"),
        (("--svg", "./lives.csv"), "cannot write 'lives.csv': it is the input, too"),
        (("-o", "link.csv"), "cannot write 'link.csv': it is the input, too"),
        (("-o", "both", "--svg", "../x/both"), "cannot write 'both': it is the picture, too"),
    ],
)
def test_no_file_is_written_over_another(tmp_path, monkeypatch, options, words):
    """Neither over the input, by whatever name, nor the picture over the placement."""
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    path = tmp_path / "x" / "lives.csv"
    path.write_text(EXAMPLE, encoding="utf-8")
    (tmp_path / "x" / "link.csv").symlink_to(path)
    done = inside("pool", "lives.csv", *options, code=2)
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert path.read_text(encoding="utf-8") == EXAMPLE
    assert not (tmp_path / "x" / "both").exists()


def test_a_slow_baseline_is_left_out_with_a_word(example, tmp_path, monkeypatch):
    """The placement is written before the others are tried."""
    monkeypatch.setattr(solvers, "_MOST_STEPS", 4)
    done = inside("pool", example, "--json")
    assert {row["solver"] for row in json.loads(done.stdout)["pools"]} == {"torchdelta", "cnmem", "torch-caching"}
    assert "smartpool is left out" in done.stderr
    assert "smartpool" in inside("pool", example, "--solver", "smartpool").stdout

    def fails(*_):
        raise KeyboardInterrupt

    output, picture = tmp_path / "placement.csv", tmp_path / "placement.svg"
    monkeypatch.setattr(solvers, "quick_baselines", fails)
    inside("pool", example, "-o", output, "--svg", picture, code=130)
    assert "valid            yes" in inside("pool", example, "--validate", output).stdout
    assert picture.exists()


def test_a_placement_that_names_a_life_twice_is_refused(example, tmp_path):
    """Even where the last offset of it were right."""
    output = tmp_path / "placement.csv"
    inside("pool", example, "-o", output)
    output.write_text(output.read_text(encoding="utf-8") + "b1,0,3,4,7\n", encoding="utf-8")
    done = inside("pool", example, "--validate", output, code=2)
    assert "more than one offset for 'b1'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("offset", [2**63 - 1, -(2**63), 10**30])
def test_an_offset_beyond_what_can_be_added_up_is_refused(example, tmp_path, offset):
    """The footprint would be a wrong number."""
    wrong = tmp_path / "wrong.csv"
    wrong.write_text(f"id,offset\nb1,{offset}\nb2,0\nb3,4\nb4,0\nb5,8\n", encoding="utf-8")
    done = inside("pool", example, "--validate", wrong, code=2)
    assert "the offset of 'b1' passes 2**62 bytes" in done.stderr


def test_ids_of_any_spelling_come_back(tmp_path):
    """Spaces, commas and quotes in them: what is written is what is read."""
    path, output = tmp_path / "lives.csv", tmp_path / "placement.csv"
    ids = ['" a"', "a", '"a "', '"  , ""b"', '""']
    path.write_text("id,lower,upper,size\n" + "".join(f"{id_},0,9,4\n" for id_ in ids), encoding="utf-8")
    inside("pool", path, "-o", output)
    assert "valid            yes" in inside("pool", path, "--validate", output).stdout


@pytest.mark.parametrize("head", ["id , lower ,upper, size", "\n \n\nid,lower,upper,size"])
def test_spaces_and_blank_lines_of_the_head_do_not_matter(tmp_path, head):
    """As people write tables by hand."""
    path = tmp_path / "lives.csv"
    path.write_text(f"{head}\na , 0 , 1 , 5\n", encoding="utf-8")
    assert json.loads(inside("pool", path, "--json").stdout)["footprint_bytes"] == 5


def test_moments_at_the_ends_of_64_bits_are_drawn(tmp_path):
    """The distance between them is no number of 64 bits; the longest life is drawn over the whole width."""
    path, picture = tmp_path / "lives.csv", tmp_path / "placement.svg"
    path.write_text(f"id,lower,upper,size\na,{-(2**63)},{2**63 - 1},5\nb,0,2,7\n", encoding="utf-8")
    inside("pool", path, "--svg", picture)
    drawn = picture.read_text(encoding="utf-8")
    assert '<rect x="64.00"' in drawn
    assert 'width="1072.00"' in drawn


def test_a_compressed_event_log_is_read(tmp_path):
    """As `torchdelta trace` reads it."""
    events = [
        {"op": op, "id": id_, "size_bytes": size, "time_s": 0.0}
        for _ in range(8)
        for op, id_, size in (("alloc", 1, 64), ("alloc", 2, 32), ("write", 2, 32), ("free", 2, 32), ("free", 1, 64))
    ]
    path = tmp_path / "events.jsonl.gz"
    path.write_bytes(gzip.compress("".join(f"{json.dumps(event)}\n" for event in events).encode()))
    assert json.loads(inside("pool", path, "--json").stdout)["footprint_bytes"] == 96


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
