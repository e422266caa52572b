"""A file is written whole, or what was there before stays."""

import resource
import stat
import subprocess
import sys
from contextlib import contextmanager

import pytest

from torchdelta.whole_file import write_whole


@contextmanager
def full():
    """Files cannot grow, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def old(tmp_path):
    """A file that only its owner may read, and a link to it."""
    path = tmp_path / "old.json"
    path.write_text("old")
    path.chmod(0o600)
    (tmp_path / "link.json").symlink_to(path)
    return path


def test_a_file_is_replaced_with_its_permissions(old):
    """Also through a link, which stays one."""
    link = old.with_name("link.json")
    write_whole(link, b"new")
    assert old.read_text() == "new"
    assert link.is_symlink()
    assert stat.S_IMODE(old.stat().st_mode) == 0o600
    assert sorted(old.parent.iterdir()) == [link, old]


def test_a_write_that_fails_leaves_the_old_file(old):
    """Nothing else stays, and the error has the name that was given."""
    with pytest.raises(OSError, match="File too large") as caught, full():
        write_whole(old, b"new")
    assert caught.value.filename == str(old)
    assert old.read_text() == "old"
    assert len(list(old.parent.iterdir())) == 2


def test_a_log_is_not_replaced(tmp_path):
    """The file that stderr goes to gets the text at its end, under whatever name."""
    log = tmp_path / "log"
    code = (
        f"import sys; from torchdelta.whole_file import write_whole as w; w('/dev/stderr', b'2'); w({str(log)!r}, b'3')"
    )
    with log.open("w") as stderr:
        stderr.write("1")
        stderr.flush()
        subprocess.run([sys.executable, "-c", code], stderr=stderr, check=True)
    assert log.read_text() == "123"
