"""Plan files come back as they were written, and what is no plan file is one clear error."""

import gzip
import json

import pytest
from msgspec.structs import replace

from torchdelta.errors import PlanError
from torchdelta.plan.file import read_plan, write_plan

HEADER = b'{"record":"header","format":"torchdelta-plan","version":3,"planner":"p","machine":"m","budget_bytes":1,'
HEADER += b'"num_ops":1,"num_buffers":1}\n'
END = b'{"record":"end","num_absences":0,"num_replays":0}\n'


def refused(path):
    """Return the one line that says why a file is no plan."""
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def test_a_plan_comes_back(tmp_path, plan):
    """Equal, and the same bytes each time: a header, a line for each absence and replay, and the end."""
    write_plan(plan, tmp_path / "a.plan")
    write_plan(plan, tmp_path / "b.plan")
    assert read_plan(tmp_path / "a.plan") == plan
    assert (tmp_path / "a.plan").read_bytes() == (tmp_path / "b.plan").read_bytes()
    lines = [json.loads(line) for line in gzip.decompress((tmp_path / "a.plan").read_bytes()).splitlines()]
    assert len(lines) == 2 + len(plan.absences) + len(plan.replays)
    assert lines[-1] == {"record": "end", "num_absences": len(plan.absences), "num_replays": len(plan.replays)}


@pytest.mark.parametrize("version", [1, 2])
def test_older_versions_are_read(tmp_path, plan, version):
    """They had no moments of copies out beside the last use; version 1 had no end record either."""
    write_plan(plan, tmp_path / "new.plan")
    records = [json.loads(line) for line in gzip.decompress((tmp_path / "new.plan").read_bytes()).splitlines()]
    records[0]["version"] = version
    for record in records:
        for name in ("links", "synchronous", "out_op", "return_rank", "carried_s"):
            record.pop(name, None)
    kept = records[: -1 if version == 1 else None]
    old = b"".join(json.dumps(record).encode() + b"\n" for record in kept)
    (tmp_path / "old.plan").write_bytes(gzip.compress(old, mtime=0))
    found = read_plan(tmp_path / "old.plan")
    assert found.replays == plan.replays
    assert [absence.queued_op for absence in found.absences] == [absence.last_use_op for absence in plan.absences]
    assert found.header == replace(plan.header, links=None)
    plain = [replace(absence, out_op=None, return_rank=0, carried_s=0.0) for absence in plan.absences]
    assert list(found.absences) == plain


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is empty"),
        (b"no gzip", "not a plan: the file is not gzip-compressed"),
        (gzip.compress(b""), "the file is empty"),
        (gzip.compress(b"{}"), "line 1: not the header of a plan"),
        (gzip.compress(b"\xff\xfe"), "line 1: not the header of a plan"),
        (gzip.compress(HEADER.replace(b"-plan", b"-trace")), "line 1: not a plan: its format is 'torchdelta-trace'"),
        (gzip.compress(HEADER.replace(b":3", b":5")), "newer torchdelta: format version 5, this one reads 4"),
        (gzip.compress(HEADER.replace(b":3", b":0")), "unknown format version 0, this torchdelta reads 1, 2, 3, 4"),
        (gzip.compress(HEADER + b'{"record":"nonsense"}\n'), "line 2: Invalid value 'nonsense'"),
        (gzip.compress(HEADER + b'{"record":"absence"}\n'), "line 2: Object missing required field"),
        (gzip.compress(HEADER), "line 2: the file ends without an end record: it was cut short"),
        (gzip.compress(HEADER + END.replace(b"0", b"7", 1)), "announces 7 absences and 0 replays; the file has 0"),
        (gzip.compress(HEADER + END + END), "line 3: there is a record after the end record"),
    ],
)
def test_what_is_no_plan_file_is_one_line(tmp_path, content, said):
    """The error names the file and what is wrong with it."""
    (tmp_path / "x.plan").write_bytes(content)
    assert said in refused(tmp_path / "x.plan")


def test_a_truncated_file_is_refused(tmp_path, plan):
    """Wherever it was cut, before or after compression."""
    write_plan(plan, tmp_path / "whole.plan")
    whole = (tmp_path / "whole.plan").read_bytes()
    lines = gzip.decompress(whole).splitlines(keepends=True)
    cut = tmp_path / "cut.plan"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        refused(cut)
    for count in range(1, len(lines)):
        cut.write_bytes(gzip.compress(b"".join(lines[:count])))
        assert "cut short" in refused(cut)


def test_what_cannot_be_read_or_written_is_one_line(tmp_path, plan):
    """A file that is not there, a directory, a directory that is not there; nothing is left behind."""
    assert "cannot read the plan: No such file" in refused(tmp_path / "none.plan")
    (tmp_path / "folder").mkdir()
    assert "cannot read the plan: Is a directory" in refused(tmp_path / "folder")
    for path in (tmp_path / "folder", tmp_path / "none" / "x.plan"):
        with pytest.raises(PlanError, match="cannot write the plan"):
            write_plan(plan, path)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
