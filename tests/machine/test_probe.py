"""The probe measures something that can be, keeps it, and finds it again."""

import datetime as dt
import json
import os
import socket

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from tests.trace.strategies import example
from torchdelta.cli.app import make_app
from torchdelta.errors import MachineError
from torchdelta.machine.cache import (
    CachedMachine,
    cache_directory,
    circumstances,
    difference,
    read_cached,
    write_cached,
)
from torchdelta.machine.catalog import find
from torchdelta.machine.disk import disk_rates
from torchdelta.machine.model import validate_machine
from torchdelta.machine.probe import _Cpu, probe
from torchdelta.machine.roofline import price
from torchdelta.machine.share import MAX_BYTES, Share
from torchdelta.simulate.compiled import code_folder
from torchdelta.trace.file import write_trace


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """A cache of the test's own, but for the compiled code of the simulation, which takes ten seconds to make anew."""
    code_folder()  # found once for the whole process
    monkeypatch.setenv("TORCHDELTA_CACHE_DIR", str(tmp_path / "cache"))


def test_this_machine(tmp_path):
    """A quick probe of the CPU gives a valid machine, leaves no file and torch's threads as they were."""
    threads = torch.get_num_threads()
    machine = probe("cpu", directory=tmp_path, quick=True)
    validate_machine(machine)
    assert set(machine.flops_per_s) == {"float32", "bfloat16", "float16"}
    assert machine.flops_per_s["float32"] > 1e6  # beside other work
    assert machine.memory_bytes_per_s > 1e6
    # The host's memory is the device's: the tier is the disk.
    assert machine.swaps_to == "disk"
    assert machine.host_out_bytes_per_s > 0
    assert machine.host_memory_bytes
    assert machine.disk_write_bytes_per_s == 0
    assert "measured" in machine.sources["host_in_bytes_per_s"]
    assert torch.get_num_threads() == threads
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_probed(tmp_path):
    """A device or a directory that is not there is one line."""
    with pytest.raises(MachineError, match="unknown device 'tpu'"):
        probe("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(MachineError, match="there is no CUDA device here"):
            probe("cuda")
    with pytest.raises(MachineError, match="cannot be measured: No such file"):
        disk_rates(tmp_path / "missing", size_bytes=2**22)


def test_the_command_measures_once(tmp_path):
    """The second call prints what the first one kept; 'local' then is that machine; --quick keeps nothing."""
    app, runner = make_app(), CliRunner()
    with pytest.raises(MachineError, match="machine 'local' was not measured yet: run `torchdelta probe`"):
        find("local")
    quick = runner.invoke(app, ["probe", "--device", "cpu", "--disk", str(tmp_path), "--quick", "--json"])
    machine = json.loads(quick.stdout)
    assert machine["name"] == "local-cpu"
    assert read_cached("cpu") is None
    machine.pop("measured_at")
    assert machine.pop("load") >= 0
    assert machine.pop("disk_directory") == str(tmp_path)
    kept = CachedMachine(
        torch_version=str(torch.__version__),
        measured_at="2026-01-01T00:00:00+00:00",
        load=0.25,
        machine=msgspec.convert(machine | {"description": "kept"}, type=type(find("cpu"))),
    )
    assert write_cached("cpu", kept).parent == cache_directory()
    assert find("local") == find("Local-CPU") == kept.machine
    again = runner.invoke(app, ["probe", "--device", "cpu", "--json"])
    assert json.loads(again.stdout)["description"] == "kept"
    text = runner.invoke(app, ["probe", "--device", "cpu"]).stdout
    assert "kept, measured " in text
    assert " days ago, at a load of 0.25 a core (2026-01-01T00:00:00+00:00)" in text
    assert "GB/s" in text
    failed = runner.invoke(app, ["probe", "--device", "tpu"])
    assert failed.exit_code == 2
    assert failed.stderr == "torchdelta probe: unknown device 'tpu': did you mean cpu? Known are cpu and cuda\n"


def test_another_disk_is_measured(tmp_path):
    """A directory that is named is measured, whatever is stored; without a name, the stored result counts."""
    directories = [tmp_path / name for name in ("first", "second")]
    for directory in directories:
        directory.mkdir()
    write_cached("cpu", CachedMachine(torch_version=str(torch.__version__), measured_at="", machine=find("cpu")))
    words = ["probe", "--device", "cpu", "--json"]
    seen = []
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(_Cpu, "machine", lambda *_: find("cpu"))
        for directory in (*directories, directories[1], None):
            asked = [] if directory is None else ["--disk", str(directory)]
            done = CliRunner().invoke(make_app(), [*words, *asked])
            assert json.loads(done.stdout)["disk_directory"] == str(directory or directories[1])
            seen.append(done.stderr)
    assert "the stored result was measured with the disk of an unknown directory, not " in seen[0]
    assert f"with the disk of {directories[0]}, not {directories[1]}" in seen[1]
    assert seen[2:] == ["", ""]


def test_the_disk_of_the_settings_file_is_measured(tmp_path, monkeypatch):
    """Swaps of a run here go to its swap_dir."""
    (tmp_path / "swap").mkdir()
    (tmp_path / "torchdelta.toml").write_text('swap_dir = "swap"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_Cpu, "machine", lambda *_: find("cpu"))
    done = CliRunner().invoke(make_app(), ["probe", "--device", "cpu", "--json"])
    assert json.loads(done.stdout)["disk_directory"] == str(tmp_path / "swap")


def test_what_a_stored_result_was_measured_with():
    """Other threads, another processor (a home directory that machines share) or another torch: measured again."""
    here = {"torch_version": "2", "num_threads": 2, "processor": "new", "disk_directory": None}
    old = CachedMachine(torch_version="2", measured_at="", machine=find("cpu"))  # as earlier versions wrote it
    assert difference(old, **here) == ""
    same = msgspec.structs.replace(old, num_threads=2, processor="new", disk_directory="/x")
    assert difference(same, **here) == ""
    assert difference(msgspec.structs.replace(same, num_threads=4), **here) == "on 4 threads, not 2"
    assert difference(msgspec.structs.replace(same, processor="old"), **here) == "on old, not new"
    assert difference(same, **here | {"torch_version": "3"}) == "with torch 2, not 3"
    assert difference(same, **here | {"disk_directory": "/y"}) == "with the disk of /x, not /y"


def test_a_result_says_how_often_it_was_measured(tmp_path):
    """The disk has fewer rounds than the rest, and its latency is a median."""
    sources = probe("cpu", directory=tmp_path, quick=True).sources
    assert sources["memory_bytes_per_s"] == "measured, best of 5"
    assert sources["host_in_bytes_per_s"].startswith("measured, best of 3, ")
    assert sources["link_latency_s"] == "measured, median of 32"


def test_what_is_shared(tmp_path):
    """--share writes a small file with rates and kernels, which the ledger reads; it names neither person nor host."""
    path = tmp_path / "share.json"
    words = ["probe", "--device", "cpu", "--disk", str(tmp_path), "--quick", "--share", str(path)]
    assert CliRunner().invoke(make_app(), words).exit_code == 0
    share = msgspec.json.decode(path.read_bytes(), type=Share)
    assert path.stat().st_size <= MAX_BYTES
    assert len(share.kernels) == 13
    assert all(kernel.time_s > 0 and kernel.op().name == kernel.name for kernel in share.kernels)
    assert socket.gethostname() not in path.read_text()
    refused = CliRunner().invoke(make_app(), [*words[:-1], str(tmp_path / "missing" / "share.json")])
    assert refused.exit_code == 2


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"version":2}'])
def test_a_damaged_cache_is_no_cache(content):
    """It is measured again, never an error."""
    cache_directory().mkdir(parents=True)
    (cache_directory() / "machine-cpu.json").write_bytes(content)
    assert read_cached("cpu") is None


def test_where_the_cache_is(monkeypatch, tmp_path):
    """The project's variable first, then XDG's if absolute, then ~/.cache."""
    monkeypatch.delenv("TORCHDELTA_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == tmp_path / ".cache" / "torchdelta"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "torchdelta"


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    """One line names the file; no half-written one is left."""
    if os.geteuid() == 0:
        (tmp_path / "cache").write_bytes(b"a file where the directory should be")
    else:
        (tmp_path / "cache").mkdir(mode=0o500)
    kept = CachedMachine(torch_version="2", measured_at="", machine=find("cpu"))
    with pytest.raises(MachineError, match="cannot keep the measured machine"):
        write_cached("cpu", kept)
    monkeypatch.undo()


def test_the_best_round_counts(monkeypatch):
    """Work of others in most of the rounds changes nothing."""
    cpu = _Cpu(quick=True)
    rounds_s = iter([1.0, 7.0, 9.0, 2.0, 8.0, 7.0])
    monkeypatch.setattr(cpu, "time_round", lambda _run, num_runs: next(rounds_s) * num_runs)
    assert cpu.seconds_of(lambda: None) == 2.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("flops_per_s", {"float32": 1e8}), ("memory_bytes_per_s", 1e6), ("host_out_bytes_per_s", 1e5)],
)
def test_what_cannot_be_right_is_refused_and_not_kept(monkeypatch, tmp_path, field, value):
    """A busy machine measured 0.0001 TFLOP/s, and kept it."""
    measured = msgspec.structs.replace(find("cpu"), **{field: value})
    monkeypatch.setattr(_Cpu, "machine", lambda *_: measured)
    with pytest.raises(MachineError, match=rf"{field} was measured as 1e\+.., which is implausible: below .* is idle"):
        probe("cpu")
    done = CliRunner().invoke(make_app(), ["probe", "--device", "cpu", "--disk", str(tmp_path)])
    assert done.exit_code == 1
    assert "which is implausible" in done.stderr
    assert read_cached("cpu") is None


def test_without_a_disk_nothing_can_be_swapped():
    """A copy within the memory frees nothing."""
    machine = probe("cpu", quick=True)
    assert (machine.swaps_to, machine.host_memory_bytes) == ("disk", 0)
    assert "nothing can be swapped" in machine.sources["host_out_bytes_per_s"]


def test_how_old_and_how_busy():
    """The age in its largest unit, and the load."""
    then = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    cached = CachedMachine(torch_version="2", measured_at=then.isoformat(), load=1.5, machine=find("cpu"))
    for age, said in (
        (dt.timedelta(seconds=5), "a moment ago"),
        (dt.timedelta(minutes=5), "5 minutes ago"),
        (dt.timedelta(hours=5), "5 hours ago"),
        (dt.timedelta(days=50), "50 days ago"),
    ):
        assert circumstances(cached, now=then + age) == f"measured {said}, at a load of 1.50 a core"
    unknown = msgspec.structs.replace(cached, measured_at="", load=None)
    assert circumstances(unknown) == "measured at an unknown time, at an unknown load"


def test_a_measured_machine_says_so_where_it_is_used(tmp_path):
    """On stderr, and in the JSON."""
    write_cached(
        "cpu", CachedMachine(torch_version="2", measured_at="2026-01-01T00:00:00Z", load=3, machine=find("cpu"))
    )
    write_trace(price(example(), find("cpu")), tmp_path / "step.trace")
    words = ["simulate", str(tmp_path / "step.trace"), "--machine", "local-cpu", "--json"]
    done = CliRunner().invoke(make_app(), words)
    assert done.exit_code == 0
    assert "torchdelta: cpu was measured " in done.stderr
    assert "at a load of 3.00 a core" in done.stderr
    facts = json.loads(done.stdout)
    assert (facts["machine_measured_at"], facts["machine_load"]) == ("2026-01-01T00:00:00Z", 3)
