"""The wheel under test: that of TORCHDELTA_DIST (`make package`), else one built from this checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory that holds one pure wheel and one sdist."""
    named = os.environ.get("TORCHDELTA_DIST")
    if named:
        return REPOSITORY / named
    directory = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--directory", str(directory)],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    )
    return directory


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    """Return the pure wheel."""
    (found,) = dist.glob("*-none-any.whl")  # `make native-wheel` puts others beside it
    return found


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory for PYTHONPATH that holds what the wheel installs."""
    directory = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory
