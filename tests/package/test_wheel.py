"""What the built package contains, and what installing it brings along."""

import email
import re
import tarfile
import zipfile
from pathlib import Path

import torchdelta

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "src" / "torchdelta"


def metadata_of(wheel):
    """Return the headers of the wheel's METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_installing_it_brings_torch_and_msgspec_alone(wheel):
    """Everything else is an extra."""
    requirements = metadata_of(wheel).get_all("Requires-Dist")
    without_extra = {re.split(r"[^\w-]", line)[0] for line in requirements if "extra ==" not in line}
    assert without_extra == {"torch", "msgspec"}


def test_one_wheel_serves_every_python(wheel):
    """It is pure Python: native parts are built where it runs."""
    assert wheel.name == f"torchdelta-{torchdelta.__version__}-py3-none-any.whl"
    assert metadata_of(wheel)["Requires-Python"] == ">=3.11"


def test_the_wheel_holds_the_whole_package(wheel):
    """Every source, the native ones and the marker of types included, and nothing that was built."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("/LICENSE")]
    sources = {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == sources
    assert {"torchdelta/py.typed", "torchdelta/native/counting.cpp", "torchdelta/native/arena.h"} <= names
    assert {Path(name).suffix for name in names} <= {".py", ".cpp", ".h", ".typed"}
    assert len(licences) == 1


def test_pytest_finds_the_plugin(wheel):
    """By the entry point that it looks for."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        text = archive.read(name).decode()
    assert "[pytest11]\ntorchdelta = torchdelta.integrations.pytest\n" in text


def test_the_sdist_can_be_built_and_tested(dist):
    """A distributor gets the tests, the benchmarks and the documents too."""
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "CHANGELOG.md", "PKG-INFO"} <= names
    assert {"src/torchdelta/__init__.py", "tests/conftest.py", "tools/matrix/smoke.py", "docs/pool.md"} <= names
    assert not any(name.endswith((".so", ".pyc")) for name in names)
