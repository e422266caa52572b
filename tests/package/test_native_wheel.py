"""The wheel of `make native-wheel`: its native modules are prebuilt, and no compiler is needed beside it."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import torchdelta
from tests.package.running import SMOKE, run
from torchdelta.native.build import prebuilt_path
from torchdelta.native.modules import NATIVE_MODULES

REPOSITORY = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.rest,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler here"),
]


@pytest.fixture(scope="module")
def native_wheel(wheel, tmp_path_factory):
    """Make the wheel from the pure one."""
    pytest.importorskip("wheel", reason="needs the extra `release`")
    output = tmp_path_factory.mktemp("native")
    subprocess.run(
        [sys.executable, "-m", "tools.native_wheel", "--wheel", str(wheel), "--output", str(output)],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    )
    (path,) = output.iterdir()
    return path


@pytest.fixture(scope="module")
def installed(native_wheel, tmp_path_factory):
    """Install the wheel into a directory, by pip, which compares its tags with this Python."""
    directory = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(directory)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(native_wheel)], check=True)
    return directory


@pytest.fixture
def no_compiler(tmp_path):
    """Return variables with which each compilation fails, and nothing that was built before is found."""
    return {"CXX": "/bin/false", "TORCH_EXTENSIONS_DIR": str(tmp_path)}


def test_it_is_the_pure_wheel_with_the_modules(native_wheel, wheel, tmp_path):
    """Its tags name this Python and platform, its version names torch, and its RECORD is right."""
    name, version, python, abi, platform = native_wheel.stem.split("-")
    assert (name, version.partition("+")[0]) == ("torchdelta", torchdelta.__version__)
    assert version.partition("+")[2] == "torch" + torch.__version__.replace("+", ".")
    assert python == f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert abi.startswith(python)
    assert platform.startswith("linux_")
    subprocess.run([sys.executable, "-m", "wheel", "unpack", "--dest", str(tmp_path), str(native_wheel)], check=True)
    (headers,) = tmp_path.glob("*/*.dist-info/WHEEL")
    assert {"Root-Is-Purelib: false", f"Tag: {python}-{abi}-{platform}"} <= set(headers.read_text().splitlines())
    prebuilt = {f"torchdelta/native/prebuilt/{prebuilt_path(module.source).name}" for module in NATIVE_MODULES}
    assert _content(native_wheel) - _content(wheel) == prebuilt
    assert _content(wheel) < _content(native_wheel)


def test_it_names_no_folder_of_the_machine_that_built_it(native_wheel):
    """Neither torch's nor a temporary one."""
    with zipfile.ZipFile(native_wheel) as archive:
        modules = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    assert len(modules) == len(NATIVE_MODULES)
    folders = [str(Path(torch.__file__).parents[1]), str(REPOSITORY), "torchdelta-native-wheel-"]
    assert [folder for folder in folders for module in modules if folder.encode() in module] == []


def test_it_trains_inside_a_budget_without_a_compiler(installed, no_compiler, tmp_path):
    """Native parts are in use, without a line of the log; losses and parameters are equal bit for bit."""
    done = run(installed, SMOKE, **no_compiler)
    result = json.loads(done.stdout)
    assert result["is_equal"]
    assert result["peak_bytes"] <= result["budget_bytes"] < result["plain_peak_bytes"]
    assert result["native"] == "built"
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_every_module_is_loaded_from_the_wheel(installed, no_compiler):
    """Those, too, that a short training does not need."""
    code = (
        "from torchdelta.native.build import load; from torchdelta.native.modules import NATIVE_MODULES; "
        "print(*(load(module).__file__ for module in NATIVE_MODULES), sep='\\n')"
    )
    files = [Path(line) for line in run(installed, "-c", code, **no_compiler).stdout.splitlines()]
    assert len(files) == len(NATIVE_MODULES)
    assert {path.parent for path in files} == {installed / "torchdelta" / "native" / "prebuilt"}


def test_env_says_that_they_are_prebuilt(installed, no_compiler):
    """`torchdelta env` builds and loads none of them."""
    pytest.importorskip("typer")
    facts = json.loads(run(installed, "-m", "torchdelta", "env", "--json", **no_compiler).stdout)
    assert facts["counting_allocator"] == "on: prebuilt; installed at the first budget"


def _content(path):
    with zipfile.ZipFile(path) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}
