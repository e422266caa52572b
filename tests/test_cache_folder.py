"""Where caches are when the user has no home directory, as in a container with a user id that has no account."""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from typing import TYPE_CHECKING

import pytest

from torchdelta import cache_folder
from torchdelta.config import Config
from torchdelta.errors import ConfigError
from torchdelta.machine.cache import cache_directory as machine_cache
from torchdelta.native.build import cache_directory as native_cache

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Hide the home directory; temporary files have a folder of the test's own."""

    def no_account(user: int) -> pwd.struct_passwd:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME", "TORCHDELTA_CACHE_DIR", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_account)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache_folder.temporary_folder.cache_clear()
    yield tmp_path
    cache_folder.temporary_folder.cache_clear()


def test_without_a_home_caches_are_among_the_temporary_files(temporary: Path) -> None:
    """All caches share one folder, which only its user can read and write, and which the next process finds again."""
    assert machine_cache() == native_cache()
    folder = machine_cache().parent
    assert folder.parent == temporary
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    cache_folder.temporary_folder.cache_clear()
    assert machine_cache().parent == folder


@pytest.mark.parametrize("home", ["no folder", "not writable"])
def test_a_home_that_cannot_be_written_is_none(temporary: Path, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    """A container sets it to `/` for a user id without an account."""
    path = temporary / "home"
    if home == "not writable":
        path.mkdir()
    monkeypatch.setenv("HOME", str(path))
    assert cache_folder.user_cache_folder() == path / ".cache"
    real = os.access
    monkeypatch.setattr(os, "access", lambda name, mode: not str(path).startswith(str(name)) and real(name, mode))
    assert cache_folder.user_cache_folder() == cache_folder.temporary_folder()
    (path / ".cache" / "torchdelta" / "built").mkdir(parents=True)  # a filled cache is read
    assert cache_folder.user_cache_folder() == path / ".cache"


@pytest.mark.parametrize("taken_by", ["a folder that others can write", "a link", "a file"])
def test_a_folder_of_others_is_not_used(temporary: Path, taken_by: str) -> None:
    """Code is loaded from the cache: if somebody else may have put it there, there is a new, private folder."""
    name = cache_folder.user_cache_folder()
    name.rmdir()
    if taken_by == "a link":
        (temporary / "elsewhere").mkdir(mode=0o700)
        name.symlink_to(temporary / "elsewhere")
    elif taken_by == "a file":
        name.touch()
    else:
        name.mkdir()
        name.chmod(0o777)
    cache_folder.temporary_folder.cache_clear()
    folder = cache_folder.user_cache_folder()
    assert folder not in (name, temporary / "elsewhere")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_swap_directory_in_a_missing_home_is_one_line(temporary: Path) -> None:
    """A settings file may begin a path with ~."""
    path = temporary / "job.toml"
    path.write_text('swap_dir = "~/swap"\n')
    with pytest.raises(ConfigError, match=r"job.toml: swap_dir='~/swap' names no home directory"):
        Config.from_file(path)
