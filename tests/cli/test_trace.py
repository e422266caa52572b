"""`torchdelta trace` writes the trace of any function's step, or says in one line why not."""

import functools
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from tests.cli.command import torchdelta
from tests.trace.imports.logs import played
from tests.trace.imports.profiles import Written, two_layers
from tests.trace.strategies import example
from torchdelta.cli.app import make_app
from torchdelta.cli.trace import _default_output
from torchdelta.trace.file import read_trace
from torchdelta.trace.model import counts

ROOT = Path(__file__).parents[2]
MODELS = """
import torch

def linear(batch_size=2):
    return torch.nn.Linear(8, 4), torch.randn(batch_size, 8)

def nothing():
    return None

width = 8
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with modules in it, good and bad, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "needy.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "leaving.py").write_text("raise SystemExit(3)\n")
    yield tmp_path
    sys.modules.pop("models", None)


def test_a_trace_is_written_and_described(folder):
    """The file holds the step, and --json its numbers, priced on the machine asked for."""
    done = torchdelta(
        "trace", "models:linear", "-o", "step.trace", "--batch-size", 16, "--machine", "A100", "--json", cwd=folder
    )
    facts = json.loads(done.stdout)
    step = read_trace(folder / "step.trace")
    assert facts["batch_size"] == step.header.batch_size == 16
    assert facts["peak_bytes"] == counts(step).peak.size_bytes
    assert facts["parameter_bytes"] == 4 * (8 * 4 + 4)
    assert facts["time_s"] == counts(step).time_s > 0
    assert facts["machine"] == "a100-80g"
    assert facts["time_low_s"] < facts["time_s"] < facts["time_high_s"]
    assert any("launches take" in reason for reason in facts["extrapolates"])  # a step of microseconds
    assert done.stderr == ""
    text = CliRunner().invoke(make_app(), ["trace", "models.py:linear", "-o", str(folder / "step.trace")]).stdout
    assert "at batch size 2, on cuda" in text
    assert "at the peak, op" in text


def test_predicted_times_have_intervals_and_links(folder):
    """`simulate` shows how far a time may be off and why it extrapolates; a link is refused by name, or priced."""
    invoke = functools.partial(CliRunner().invoke, make_app())
    trace = str(folder / "step.trace")
    invoke(["trace", "models.py:linear", "-o", trace])
    on = ["simulate", trace, "--machine", "rtx4090"]
    shown = invoke(on).stdout
    assert re.search(
        r"^time +[\d.]+ ms, [\d.]+ to [\d.]+  \(plain [\d.]+ ms, [\d.]+ to [\d.]+; \+0\.00 %\)$", shown, re.MULTILINE
    )
    assert re.search(r"^extrapolated launches take \d+% of the time", shown, re.MULTILINE)
    assert "ms, " not in invoke([*on[:-1], "cpu"]).stdout.split("plain")[1].splitlines()[0]
    assert invoke([*on, "--link", "pcie3-x8"]).exit_code == 0
    wrong = invoke([*on, "--link", "pcie3-x7"])
    assert wrong.exit_code == 2
    assert "unknown link 'pcie3-x7': did you mean pcie" in wrong.stderr


def test_logs_and_snapshots_of_others(folder):
    """An event log and a memory snapshot become traces by their suffix; the iteration is found."""
    events = played(example(), 4)
    (folder / "log.jsonl").write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    done = CliRunner().invoke(make_app(), ["trace", "log.jsonl", "-o", "step.trace", "--json"])
    assert json.loads(done.stdout)["peak_bytes"] == counts(example()).peak.size_bytes
    assert "iteration of" in read_trace(folder / "step.trace").header.comment
    entries = [
        {"action": "alloc" if e.op == "alloc" else "free_completed", "addr": e.id, "size": e.size_bytes, "time_us": 0}
        for e in events
        if e.op in {"alloc", "free"}
    ]
    (folder / "snap.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [entries]}))
    done = CliRunner().invoke(make_app(), ["trace", "snap.pickle", "-o", "step.trace", "--json", "--whole"])
    assert json.loads(done.stdout)["peak_bytes"] == counts(example()).peak.size_bytes


def test_profiles_of_a_gpu(folder):
    """A profile becomes a trace; beside a function it gives its times to the step that is traced."""
    (folder / "profile.json").write_text(two_layers())
    done = CliRunner().invoke(make_app(), ["trace", "profile.json", "--json"])
    facts = json.loads(done.stdout)
    assert facts["path"] == "profile.trace"
    assert facts["time_s"] == pytest.approx(100e-6)
    profiled = Written()
    profiled.op("aten::linear", [[16, 8], [4, 8], [4]], kernel_us=3000.0, inner="aten::nothing")
    profiled.op("aten::addmm", [[4], [16, 8], [8, 4]], kernel_us=2500.0)
    profiled.op("aten::mm", [[4, 16], [16, 8]], kernel_us=1500.0, node="AddmmBackward0")
    profiled.step(3, 0)
    (folder / "step.json").write_text(profiled.text())
    options = ["--batch-size", "16", "--machine", "a100", "--optimizer", "none", "--profile", "step.json"]
    done = CliRunner().invoke(make_app(), ["trace", "models:linear", *options])
    assert "as profiled (7.00 ms in all)" in done.stdout, done.output
    times = {op.name: op.time_s for op in read_trace(folder / "linear.trace").ops}
    assert times["aten.addmm.default"] == pytest.approx(2.5e-3)
    assert times["aten.mm.default"] == pytest.approx(1.5e-3)


REFUSED = {
    "a profile of nothing": (["models:linear", "--profile", "no.json", "--machine", "t4"], "cannot read 'no.json'"),
    "a profile alone": (["models:linear", "--profile", "models.py"], "--profile needs --machine"),
    "a profile of a log": (
        ["log.jsonl", "--profile", "models.py", "--machine", "t4"],
        "name the MODULE:FUNCTION to trace as well",
    ),
    "no profile": (["models:linear", "--profile", "models.py", "--machine", "t4"], "models.py: not a profile of"),
    "no log": (["missing.jsonl"], "cannot read 'missing.jsonl': there is no such file"),
    "no snapshot": (["models.pickle"], "cannot read 'models.pickle': there is no such file"),
    "no colon": (["models"], "'models' names no function: write MODULE:FUNCTION"),
    "no module": (["modles:linear"], "no module 'modles'"),
    "no file": (["modles.py:linear"], "no file 'modles.py'"),
    "no function": (["models:liner"], "models has no function 'liner': did you mean linear?"),
    "no callable": (["models:width"], "models:width is of type int and cannot be called"),
    "no syntax": (["broken:f"], "broken cannot be imported: SyntaxError"),
    "needs a package": (["needy:f"], "needy cannot be imported: it needs 'a_package_that_is_not_there'"),
    "leaves": (["leaving:f"], "leaving cannot be imported: SystemExit: 3"),
    "wrong thing": (["models:nothing"], "models:nothing returned NoneType: it must return (model, inputs)"),
    "no machine": (["models:linear", "--machine", "a101"], "unknown machine 'a101': did you mean a100-80g"),
    "no device": (["models:linear", "--device", "tpu"], "unknown device 'tpu': did you mean cpu?"),
    "no optimizer": (["models:linear", "--optimizer", "lion"], "unknown optimizer 'lion'"),
    "no directory": (
        ["models:linear", "-o", "there/step.trace"],
        "cannot write 'there/step.trace': there is no directory 'there'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line(folder, case):
    """Each failure is one line on stderr that says what to change; nothing is written."""
    arguments, message = REFUSED[case]
    # In this process: a process of its own for each would import torch as often.
    done = CliRunner().invoke(make_app(), ["trace", "-o", "step.trace", *arguments])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("torchdelta trace: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (folder / "step.trace").exists()


def test_bad_input_from_a_shell(folder):
    """The same in a process of its own, without a traceback."""
    done = torchdelta("trace", "modles:linear", "-o", "step.trace", cwd=folder, code=2)
    assert done.stderr.startswith("torchdelta trace: no module 'modles'")
    assert done.stderr.count("\n") == 1


@pytest.mark.rest
def test_gpt2_xl_takes_little_memory(tmp_path):
    """1.5 billion parameters are traced in less than 2 GiB of memory."""
    code = (
        "import resource, subprocess, sys;"
        "subprocess.run([sys.executable, '-m', 'torchdelta', *sys.argv[1:]], check=True);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    arguments = ["trace", "benchmarks.models:gpt2_xl", "-o", str(tmp_path / "xl.trace"), "--batch-size", "2", "--json"]
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    facts, peak_kib = done.stdout.splitlines()
    assert json.loads(facts)["parameter_bytes"] > 5.8 * 2**30
    assert int(peak_kib) * 1024 < 2 * 2**30


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("models:linear", "linear.trace"),
        ("train.py:make.model", "make.model.trace"),
        ("logs/run.jsonl.gz", "run.trace"),
        ("/logs/snapshot.pickle", "snapshot.trace"),
    ],
)
def test_the_name_of_the_file_has_a_default(given, name):
    """The function's, or that of the log without its suffixes; in the current directory."""
    assert _default_output(given) == Path(name)


@pytest.mark.usefixtures("folder")
def test_a_trace_without_a_name_is_written():
    """And its name is told."""
    done = CliRunner().invoke(make_app(), ["trace", "models:linear", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["path"] == "linear.trace"
    assert read_trace("linear.trace").ops
