"""Plan files come back as they were written, and what is no plan file is one clear error."""

import gzip

import pytest

from torchdelta.errors import PlanError
from torchdelta.plan.file import read_plan, write_plan


def test_a_plan_comes_back(tmp_path, plan):
    """Equal, and the same bytes each time."""
    write_plan(plan, tmp_path / "a.plan")
    write_plan(plan, tmp_path / "b.plan")
    assert read_plan(tmp_path / "a.plan") == plan
    assert (tmp_path / "a.plan").read_bytes() == (tmp_path / "b.plan").read_bytes()
    assert gzip.decompress((tmp_path / "a.plan").read_bytes()).count(b"\n") == 1 + len(plan.absences) + len(
        plan.replays
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "damaged|not a plan's header"),
        (b"no gzip", "damaged"),
        (gzip.compress(b"", mtime=0), "not a plan's header"),
        (gzip.compress(b"{}", mtime=0), "line 1"),
        (gzip.compress(b'{"record":"absence"}', mtime=0), "line 1"),
        (gzip.compress(b'{"record":"nonsense"}', mtime=0), "line 1"),
    ],
)
def test_what_is_no_plan_file_is_one_line(tmp_path, content, said):
    """The error names the file and what is wrong with it."""
    path = tmp_path / "x.plan"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError, match=said) as caught:
        read_plan(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_refused(tmp_path, plan):
    """Half of a file is no plan."""
    path = tmp_path / "half.plan"
    write_plan(plan, path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(PlanError, match="damaged"):
        read_plan(path)


def test_a_newer_version_is_refused(tmp_path, plan):
    """What it means is not known here."""
    path = tmp_path / "new.plan"
    write_plan(plan, path)
    text = gzip.decompress(path.read_bytes()).replace(b'"version":1', b'"version":99')
    path.write_bytes(gzip.compress(text, mtime=0))
    with pytest.raises(PlanError, match="version 99 is newer"):
        read_plan(path)
