"""Whatever is wrong with what a command is given: one clear line, an exit code that is not 0, and nothing written."""

import gzip
import json
import re

import pytest
from msgspec import structs
from typer.testing import CliRunner

from tests.planners.chains import MIB, chain
from torchdelta.cli.app import make_app
from torchdelta.machine.catalog import find
from torchdelta.plan.file import write_plan
from torchdelta.planners import get
from torchdelta.trace.file import write_trace
from torchdelta.trace.model import peak

_TIMED = chain([(64 * MIB, 8e-3, 2e-3)] * 4)
# With FLOPs, or the commands would say that they take the recorded times.
STEP = structs.replace(_TIMED, ops=tuple(structs.replace(op, flops=10**9, dtype="float32") for op in _TIMED.ops))
ON = ("--machine", "a100-80g")
MODELS = """
import torch

def linear(batch_size=2):
    return torch.nn.Linear(8, 4), torch.randn(batch_size, 8)

def nothing(batch_size=2):
    return None

def leaving(batch_size=2):
    raise SystemExit(3)

def fixed(batch_size=2):
    return torch.nn.Linear(8, 4), torch.randn(16, 8)

def forward(batch_size=2):
    def step(model, inputs):
        return model(inputs).sum()
    return torch.nn.Linear(8, 4), torch.randn(batch_size, 8), step

def failing(batch_size=2):
    def step(model, inputs):
        raise ValueError("of the\\nstep")
    return torch.nn.Linear(8, 4), torch.randn(batch_size, 8), step

def asking(batch_size=2):
    def step(model, inputs):
        if model(inputs).sum() > 0:
            pass
    return torch.nn.Linear(8, 4), torch.randn(batch_size, 8), step
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory: a step, its plan, and both damaged in every way."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    write_trace(STEP, "step.trace")
    write_plan(get("delta-2024")(STEP, find("a100-80g"), peak(STEP).size_bytes * 6 // 10), "step.plan")
    for name in ("step.trace", "step.plan"):
        whole = (tmp_path / name).read_bytes()
        lines = gzip.decompress(whole).splitlines(keepends=True)
        damaged = {
            "cut": whole[:-30],
            "short": gzip.compress(b"".join(lines[:-2])),
            "newer": gzip.compress(b"".join([re.sub(rb'"version":\d', b'"version":9', lines[0], count=1), *lines[1:]])),
            "flipped": whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :],
            "text": b"".join(lines),
            "empty": b"",
        }
        for kind, content in damaged.items():
            (tmp_path / name.replace("step", kind)).write_bytes(content)
    (tmp_path / "bad_models.py").write_text(MODELS)
    larger = (structs.replace(buffer, size_bytes=2 * buffer.size_bytes) for buffer in STEP.buffers)
    write_trace(structs.replace(STEP, buffers=tuple(larger)), "larger.trace")
    (tmp_path / "endless.jsonl").write_text('{"op": "alloc", "id": 1, "size_bytes": 1%s, "time_s": 0.0}' % ("0" * 400))
    (tmp_path / "directory").mkdir()
    return tmp_path


def plan(trace, *more):
    """The words of `plan`, with a planner that is quick."""
    return ("plan", trace, *ON, "--planner", "delta-2024", "--memory-budget", "80%", *more)


def fit(function, *more):
    """The words of `fit`."""
    return ("fit", function, *ON, "--planner", "delta-2024", *more)


CASES = {
    "no trace": (("simulate", "none.trace", *ON), "none.trace: cannot read the trace: No such file"),
    "a directory for a trace": (("simulate", "directory", *ON), "directory: cannot read the trace: Is a directory"),
    "a cut trace": (("simulate", "cut.trace", *ON), "the compressed data end too soon: the file was cut short"),
    "a trace without its end": (plan("short.trace"), "the file ends without an end record: it was cut short"),
    "a newer trace": (plan("newer.trace"), "newer torchdelta: format version 9, this one reads 2"),
    "a flipped bit": (plan("flipped.trace"), "flipped.trace: line"),
    "a trace that is text": (plan("text.trace"), "text.trace: not a trace: the file is not gzip-compressed"),
    "an empty trace file": (plan("empty.trace"), "empty.trace: the file is empty"),
    "no plan": (("simulate", "step.trace", "none.plan"), "none.plan: cannot read the plan: No such file"),
    "a directory for a plan": (("simulate", "step.trace", "directory"), "cannot read the plan: Is a directory"),
    "a cut plan": (("simulate", "step.trace", "cut.plan"), "the compressed data end too soon: the file was cut short"),
    "a plan without its end": (("simulate", "step.trace", "short.plan"), "without an end record: it was cut short"),
    "a newer plan": (("simulate", "step.trace", "newer.plan"), "newer torchdelta: format version 9"),
    "a plan that is text": (("simulate", "step.trace", "text.plan"), "not a plan: the file is not gzip-compressed"),
    "an empty plan file": (("simulate", "step.trace", "empty.plan"), "empty.plan: the file is empty"),
    "a trace for a plan": (("simulate", "step.trace", "step.trace"), "not a plan: its format is 'torchdelta-trace'"),
    "a plan for a trace": (plan("step.plan"), "not a trace: its format is 'torchdelta-plan'"),
    "no machine": (("simulate", "step.trace", "--machine", "abacus"), "unknown machine 'abacus'"),
    "a plan into a directory": (plan("step.trace", "-o", "directory"), "cannot write 'directory': it is a directory"),
    "a plan into nowhere": (plan("step.trace", "-o", "no/x.plan"), "there is no directory 'no'"),
    "a plan into a device": (plan("step.trace", "-o", "/dev/null"), "cannot write '/dev/null': it is not a regular"),
    "a trace into a directory": (("trace", "bad_models:linear", "-o", "directory"), "it is a directory"),
    "a function that returns nothing": (fit("bad_models:nothing"), "returned NoneType: it must return (model, inputs)"),
    "a function that leaves": (fit("bad_models:leaving"), "bad_models:leaving cannot be called: SystemExit: 3"),
    "a function of one batch": (fit("bad_models:fixed"), "fixed gives the same step at batch sizes 2 and 4"),
    "a step without backward": (fit("bad_models:forward"), "the step of bad_models:forward ran no backward"),
    "no batch": (fit("bad_models:linear", "--batch-size", "0"), "batch size 0 is not allowed: use 1 or more"),
    "a plan for a smaller step": (
        ("simulate", "larger.trace", "step.plan"),
        "the budget of 424.80 MiB is passed by 99824436 bytes",
    ),
    "events of sizes without end": (("trace", "endless.jsonl", "--whole", "-o", "x.trace"), "come to more than 4 EiB"),
    "a step that fails": (fit("bad_models:failing"), "bad_models:failing cannot be traced: ValueError: of the step"),
    "a step that asks": (fit("bad_models:asking"), "bad_models:asking cannot be traced: it asks for the value"),
    "no function": (fit("bad_models:lineer"), "bad_models has no function 'lineer': did you mean linear?"),
    "no module": (fit("bat_models:linear"), "no module 'bat_models'"),
    "no optimizer": (fit("bad_models:linear", "--optimizer", "lion"), "unknown optimizer 'lion'"),
    "no planner": (("fit", "bad_models:linear", *ON, "--planner", "keeper"), "unknown planner 'keeper'"),
    "no device": (("probe", "--device", "tpu"), "device 'tpu' cannot be probed: use cpu or cuda"),
    "no disk": (("probe", "--quick", "--device", "cpu", "--disk", "no"), "'no'"),
}


def refused(words):
    """Run a command and return its one line."""
    done = CliRunner().invoke(make_app(), [str(word) for word in words])
    assert done.exit_code in {1, 2, 78}
    assert done.stdout == ""
    assert done.exception is None or isinstance(done.exception, SystemExit)
    *before, line = done.stderr.splitlines()
    # What a planner says before it starts is no part of the error.
    assert [said for said in before if "planning within" not in said and "compiling the planner" not in said] == []
    assert line.startswith("torchdelta: ")
    assert "torchdelta: torchdelta" not in line
    assert not line.endswith(".")
    return line, done.exit_code


@pytest.mark.parametrize("case", CASES)
def test_one_clear_line(folder, case):
    """It names what was given and what is wrong with it."""
    before = sorted(folder.iterdir())
    words, said = CASES[case]
    line, _ = refused(words)
    assert said in line
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.parametrize("planner", ["torchdelta", "keep", "checkpoint"])
def test_an_impossible_budget(folder, planner):
    """Exit code 78, who planned, and the least budget that was found."""
    line, code = refused(("plan", "step.trace", *ON, "--planner", planner, "--memory-budget", "1MiB", "-o", "x.plan"))
    assert code == 78
    assert f"planner {planner}: no plan within 1.00 MiB was found: the least budget found is" in line
    assert not (folder / "x.plan").exists()


def test_what_the_model_prints_is_no_answer(folder):
    """With --json stdout is one object, whatever a user's module and function print."""
    (folder / "talking.py").write_text(
        "print('imported')\n" + MODELS.replace("    return torch", "    print(1)\n    return torch", 1)
    )
    done = CliRunner().invoke(make_app(), ["trace", "talking:linear", "-o", "t.trace", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["path"] == "t.trace"
    assert done.stderr == "imported\n1\n"
