"""`torchdelta env` tells what a bug report needs."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tests.cli.command import torchdelta
from tests.cli.inside import inside
from torchdelta.cli.env import file_system_type

MOUNTS = """\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:25 / /volatile rw shared:4 - tmpfs tmpfs rw
31 22 8:2 / /scratch\\040disk rw - xfs /dev/sdb1 rw
32 30 8:3 / /volatile rw - btrfs /dev/sdc1 rw
"""


def test_json_is_one_object_with_sizes_as_ints(tmp_path):
    """Versions, memory, device and swap directory are there; a variable that is set is shown."""
    done = torchdelta("env", "--json", env={"TORCHDELTA_SWAP_DIR": str(tmp_path)})
    facts = json.loads(done.stdout)
    assert facts["torch"] == torch.__version__
    assert facts["ram_bytes"] > 2**26
    assert facts["num_usable_cores"] >= 1
    assert facts["swap_dir"] == facts["TORCHDELTA_SWAP_DIR"] == str(tmp_path)
    assert facts["swap_dir_free_bytes"] >= 0
    assert facts["swap_dir_write_bytes_per_s"] > 0
    assert facts["caching_allocator"].split(":")[0] in {"on", "off"}
    assert facts["arena_allocator"].split(":")[0] in {"on", "off"}
    assert done.stderr == ""


def test_a_swap_directory_that_cannot_be_used_is_said(tmp_path, monkeypatch):
    """The report is most needed where something is wrong: it still comes, with the reason."""
    monkeypatch.setenv("TORCHDELTA_SWAP_DIR", str(tmp_path / "missing"))
    facts = json.loads(inside("env", "--json").stdout)
    assert "missing" in facts["swap_dir_error"]


def test_the_swap_directory_of_the_settings_file_is_measured(tmp_path, monkeypatch):
    """It is the one that a run here uses."""
    (tmp_path / "swap").mkdir()
    (tmp_path / "torchdelta.toml").write_text('swap_dir = "swap"\n')
    monkeypatch.chdir(tmp_path)
    facts = json.loads(inside("env", "--json").stdout)
    assert facts["swap_dir"] == facts["settings"]["swap_dir"]["value"] == str(tmp_path / "swap")
    assert facts["swap_dir_write_bytes_per_s"] > 0


def test_without_any_directory_for_swaps_the_rest_is_shown(monkeypatch):
    """No directory of temporary files can be used."""

    def nowhere():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    facts = json.loads(inside("env", "--json").stdout)
    assert "no directory for the swap file" in facts["swap_dir_error"]
    assert facts["torch"] == torch.__version__


def test_text_has_one_fact_a_line():
    """The same facts for people, sizes with their unit."""
    lines = inside("env").stdout.splitlines()
    by_name = {line.split()[0]: line for line in lines}
    assert {"torchdelta", "python", "torch", "device", "swap_dir"} <= set(by_name)
    assert "GiB (" in by_name["ram_bytes"]


def test_an_unknown_variable_is_shown_whatever_its_name_ends_in(monkeypatch):
    """What is said of it is no size."""
    for name in ("TORCHDELTA_x_bytes", "TORCHDELTA_x_bytes_per_s"):
        monkeypatch.setenv(name, "1")
    lines = inside("env").stdout.splitlines()
    said = [line.split(maxsplit=1)[1] for line in lines if line.startswith("TORCHDELTA_x_")]
    assert [text.partition(":")[0] for text in said] == ["not read", "not read"]


def test_the_file_system_is_that_of_the_deepest_and_latest_mount(tmp_path):
    """Of two mounts at one place the later lies on top; blanks in paths are escaped by the kernel."""
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(MOUNTS)
    assert file_system_type(Path("/usr"), mountinfo) == "ext4"
    assert file_system_type(Path("/volatile/x"), mountinfo) == "btrfs"
    assert file_system_type(Path("/scratch disk/swap"), mountinfo) == "xfs"
    assert file_system_type(Path("/usr"), tmp_path / "missing") is None


def test_the_version_is_shown():
    """`--version` answers without torch."""
    assert torchdelta("--version").stdout.startswith("torchdelta 0.")


@pytest.mark.parametrize("words", ["--version", pytest.param("env", marks=pytest.mark.rest)])
def test_a_full_disk_is_one_line(words):
    """Where stdout cannot be written."""
    command = [sys.executable, "-m", "torchdelta", words]
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(": cannot write to stdout: No space left on device\n")
    assert done.stderr.count("\n") == 1


def test_settings_stand_beside_where_they_are_from(tmp_path, monkeypatch):
    """Each key of the settings file: from the environment, the file or the default; a wrong one is said."""
    (tmp_path / "torchdelta.toml").write_text('memory_budget = "8GiB"\npolicy = "lru"\n')
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as variables:
        variables.setenv("TORCHDELTA_POLICY", "dtr")
        variables.setenv("TORCHDELTA_POLCY", "lru")
        facts = json.loads(inside("env", "--json").stdout)
    path = str(tmp_path / "torchdelta.toml")
    assert facts["settings"]["memory_budget"] == {"value": "8GiB", "from": path}
    assert facts["settings"]["policy"] == {"value": "dtr", "from": "TORCHDELTA_POLICY"}
    assert facts["settings"]["tier"] == {"value": "disk", "from": "default"}
    assert facts["TORCHDELTA_POLCY"] == "not read: did you mean TORCHDELTA_POLICY?"
    lines = inside("env").stdout.splitlines()
    assert [line.split()[2:] for line in lines if line.startswith("setting policy ")] == [["lru", f"({path})"]]
    (tmp_path / "torchdelta.toml").write_text('policy = "lruu"\n')
    assert "did you mean 'lru'" in json.loads(inside("env", "--json").stdout)["settings_error"]


def test_a_torch_that_cannot_be_imported_is_said(tmp_path):
    """A library of CUDA that is missing is an OSError without a file name."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    facts = json.loads(torchdelta("env", "--json", env={"PYTHONPATH": str(tmp_path)}).stdout)
    assert facts["torch"] == "cannot be imported: libcudart.so.13: cannot open shared object file"
