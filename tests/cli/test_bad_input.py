"""Whatever is wrong with what a command is given: one clear line, exit code 2 or 78 (a budget), and nothing written."""

import gzip
import json
import re

import pytest
from msgspec import structs
from typer.testing import CliRunner

from tests.cli.inside import inside
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
    damaged_gzip = gzip.compress(b"") + b"\x1f\x8b\x08" + b"\0" * 7 + b"\xff" * 20  # a member that cannot be inflated
    for suffix in ("jsonl", "pickle", "json"):
        (tmp_path / f"damaged.{suffix}.gz").write_bytes(damaged_gzip)
    lives = "".join(
        f"b{i},{start},{end},4096\n" for i, (start, end) in enumerate([(0, 3), (3, 9), (0, 9), (9, 21), (0, 21)])
    )
    (tmp_path / "lives.csv").write_text(f"id,lower,upper,size\n{lives}")
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


def plan(trace, *more):
    """The words of `plan`, with a planner that is quick."""
    return ("plan", trace, *ON, "--planner", "delta-2024", "--memory-budget", "80%", *more)


def fit(function, *more):
    """The words of `fit`."""
    return ("fit", function, *ON, "--planner", "delta-2024", *more)


def run(*more):
    """The words of `run`."""
    return ("run", "--memory-budget", "1GiB", *more)


USAGE, INFEASIBLE = 2, 78
# For each command: what is given, what is said of it, and the exit code.
CASES = {
    # Files that are not there or cannot be written, names that are not known, values that make no sense.
    "no trace": (("simulate", "none.trace", *ON), "cannot read 'none.trace': there is no such file", USAGE),
    "no trace to plan": (plan("none.trace"), "cannot read 'none.trace': there is no such file", USAGE),
    "a directory for a trace": (("simulate", "directory", *ON), "cannot read 'directory': it is a directory", USAGE),
    "no plan": (("simulate", "step.trace", "none.plan"), "cannot read 'none.plan': there is no such file", USAGE),
    "a directory for a plan": (("simulate", "step.trace", "directory"), "'directory': it is a directory", USAGE),
    "no event log": (("trace", "none.jsonl"), "cannot read 'none.jsonl': there is no such file", USAGE),
    "no lives": (("pool", "none.csv"), "cannot read 'none.csv': there is no such file", USAGE),
    "no placement": (("pool", "lives.csv", "--validate", "none.csv"), "cannot read 'none.csv'", USAGE),
    "no script": (run("none.py"), "no script 'none.py'", USAGE),
    "no name of a script": (run(""), "no script ''", USAGE),
    "no plan to follow": (run("--plan", "none.plan", "bad_models.py"), "cannot read 'none.plan': there is no", USAGE),
    "a directory of settings": (run("--config", "directory", "bad_models.py"), "cannot read 'directory': it is", USAGE),
    "a trace-out into nowhere": (run("--trace-out", "no/x", "bad_models.py"), "there is no directory 'no'", USAGE),
    "a link to itself": (("simulate", "loop", *ON), "'loop' cannot be used: Too many levels of symbolic links", USAGE),
    "a name that is too long": (plan("n" * 300), "cannot be used: File name too long", USAGE),
    "below a file": (("pool", "lives.csv/x"), "cannot read 'lives.csv/x': there is no such file", USAGE),
    "no module": (fit("bat_models:linear"), "no module 'bat_models'", USAGE),
    "no function": (fit("bad_models:lineer"), "bad_models has no function 'lineer': did you mean linear?", USAGE),
    "no disk": (
        ("probe", "--quick", "--device", "cpu", "--disk", "no"),
        "no' cannot be measured: there is no such directory",
        USAGE,
    ),
    "a plan into a directory": (plan("step.trace", "-o", "directory"), "'directory': it is a directory", USAGE),
    "a plan into nowhere": (plan("step.trace", "-o", "no/x.plan"), "there is no directory 'no'", USAGE),
    "a plan into a device": (plan("step.trace", "-o", "/dev/null"), "'/dev/null': it is not a regular", USAGE),
    "a trace into a directory": (("trace", "bad_models:linear", "-o", "directory"), "it is a directory", USAGE),
    "a placement into nowhere": (("pool", "lives.csv", "-o", "no/x.csv"), "there is no directory 'no'", USAGE),
    "a picture into nowhere": (("pool", "lives.csv", "--svg", "no/x.svg"), "there is no directory 'no'", USAGE),
    "a summary into nowhere": (
        run("--summary-json", "no/x.json", "bad_models.py"),
        "cannot write 'no/x.json': there is no directory 'no'",
        USAGE,
    ),
    "no machine": (("simulate", "step.trace", "--machine", "abacus"), "unknown machine 'abacus': use local, ", USAGE),
    "nearly a machine": (
        ("plan", "step.trace", "--machine", "h10-80", "--memory-budget", "1GiB"),
        "unknown machine 'h10-80': did you mean h100-80g",
        USAGE,
    ),
    "nearly a planner": (fit("bad_models:linear", "--planner", "delta-224"), "did you mean delta-2024?", USAGE),
    "no planner": (plan("step.trace", "--planner", "zzz"), "unknown planner 'zzz': use autoswap-aoa, ", USAGE),
    "nearly an effort": (plan("step.trace", "--effort", "fats"), "'fats': did you mean fast? Known are fast", USAGE),
    "nearly a class": (plan("step.trace", "--class", "extend"), "'extend': did you mean extended? Known", USAGE),
    "nearly a class to fit": (fit("bad_models:linear", "--class", "ALL"), "'ALL': did you mean all? Known", USAGE),
    "a class of another planner": (plan("step.trace", "--class", "all"), "in the class 'all': use 'saved'", USAGE),
    "no optimizer": (fit("bad_models:linear", "--optimizer", "lion"), "unknown optimizer 'lion': use none, ", USAGE),
    "nearly an optimizer": (
        ("trace", "bad_models:linear", "--optimizer", "adam"),
        "unknown optimizer 'adam': did you mean adamw?",
        USAGE,
    ),
    "nearly a device": (("trace", "bad_models:linear", "--device", "cud"), "'cud': did you mean cuda?", USAGE),
    "no device": (
        ("probe", "--device", "tpu"),
        "unknown device 'tpu': did you mean cpu? Known are cpu and cuda",
        USAGE,
    ),
    "nearly a solver": (("pool", "lives.csv", "--solver", "smartpol"), "'smartpol': did you mean smartpool?", USAGE),
    "nearly a policy": (("demo", "--policy", "dtrr"), "policy='dtrr' is not allowed: did you mean 'dtr'?", USAGE),
    "nearly a policy to run": (
        run("--policy", "swaponly", "bad_models.py"),
        "policy='swaponly' is not allowed: did you mean 'swap-only'?",
        USAGE,
    ),
    "nearly a tier": (
        run("--tier", "dsk", "bad_models.py"),
        "tier='dsk' is not allowed: did you mean 'disk'?",
        USAGE,
    ),
    "nearly a command": (("plam",), "no such command 'plam': did you mean 'plan'? (see `torchdelta --help`)", USAGE),
    "nearly an option": (
        plan("step.trace", "--efort", "best"),
        "no such option: --efort: did you mean --effort? (see `torchdelta plan --help`)",
        USAGE,
    ),
    "nearly a link": (plan("step.trace", "--link", "pcie4-x9"), "unknown link 'pcie4-x9': did you mean", USAGE),
    "nearly a planner to run": (
        run("--planner", "delta-224", "bad_models.py"),
        "planner='delta-224' is not allowed: did you mean 'delta-2024'?",
        USAGE,
    ),
    "no planner to run": (run("--planner", "zzz", "bad_models.py"), "or None (outside of Python: none)", USAGE),
    "a planner with a long name": (plan("step.trace", "--planner", "x" * 300), "'" + "x" * 60 + "...'", USAGE),
    "no machine at all": (("plan", "step.trace", "--memory-budget", "1GiB"), "missing option '--machine'", USAGE),
    "no machine and no plan": (("simulate", "step.trace"), "a machine is needed: --machine a100-80g", USAGE),
    "an option that is no number": (
        fit("bad_models:linear", "--batch-size", "two"),
        "invalid value for '--batch-size'",
        USAGE,
    ),
    "no batch": (
        fit("bad_models:linear", "--batch-size", "0"),
        "--batch-size 0 is not allowed: use 1 to 1000000",
        USAGE,
    ),
    "no batch to trace": (("trace", "bad_models:linear", "--batch-size", "-1"), "--batch-size -1 is not", USAGE),
    "a batch without end": (fit("bad_models:linear", "--batch-size", "9" * 40), "use 1 to 1000000", USAGE),
    "no layers": (("demo", "--layers", "0"), "--layers 0 is not allowed: use 1 to 1000000", USAGE),
    "layers without end": (("demo", "--layers", "9" * 40), "use 1 to 1000000", USAGE),
    "a budget of nothing": (plan("step.trace", "--memory-budget", "0"), "0 bytes: a size is at least 1 byte", USAGE),
    "a budget below nothing": (plan("step.trace", "--memory-budget", "-1GiB"), "(a size is positive)", USAGE),
    "a budget that is no number": (run("--memory-budget", "nan", "bad_models.py"), "'nan' is not a size", USAGE),
    "digits of another script": (plan("step.trace", "--memory-budget", "\u0663"), "is not a size", USAGE),
    "a budget of thousands of digits": (run("--memory-budget", "9" * 5000, "bad_models.py"), "is not a size", USAGE),
    "a time limit that is no number": (("pool", "lives.csv", "--time-limit", "nan"), "a time limit of nan s", USAGE),
    "a width between": (("demo", "--width", "100"), "--width 100 is not a multiple of 64", USAGE),
    "a budget without a unit": (plan("step.trace", "--memory-budget", "0.5"), "write '50%' for a share", USAGE),
    "a budget of few bytes": (plan("step.trace", "--memory-budget", "4"), "'4' is 4 bytes: name the unit", USAGE),
    "a budget above the machine": (
        plan("step.trace", "--memory-budget", "100GiB"),
        "100.00 GiB is more than the 79.15 GiB of",
        USAGE,
    ),
    "a budget to fit above the machine": (
        fit("bad_models:linear", "--memory-budget", "100GiB"),
        "100.00 GiB is more than the 79.15 GiB of",
        USAGE,
    ),
    "a share above all": (("demo", "--memory-budget", "120%"), "'120%' is more than 100%", USAGE),
    "a budget of another unit": (fit("bad_models:linear", "--memory-budget", "8Gi"), "has an unknown unit", USAGE),
    "a reserve of everything": (
        fit("bad_models:linear", "--reserve", "80GiB"),
        "leaves nothing of the 79.15 GiB",
        USAGE,
    ),
    "a capacity without a unit": (("pool", "lives.csv", "--capacity", "1.5"), "capacity 1.5 is ambiguous", USAGE),
    "an alignment of nothing": (("pool", "lives.csv", "--alignment", "0"), "an alignment of 0 bytes", USAGE),
    "a seed below zero": (("pool", "lives.csv", "--seed", "-1"), "a seed of -1 makes no sense", USAGE),
    "a time limit below zero": (("pool", "lives.csv", "--time-limit", "-1"), "a time limit of -1.0 s", USAGE),
    # Outputs that would replace inputs.
    "a trace over its log": (("trace", "endless.jsonl", "-o", "./endless.jsonl"), "it is the input, too", USAGE),
    "a plan over its trace": (plan("step.trace", "-o", "step.trace"), "it is the trace, too: use another name", USAGE),
    "a trace over its script": (run("--trace-out", "bad_models.py", "bad_models.py"), "it is the script, too", USAGE),
    "a trace over its plan": (
        run("--plan", "step.plan", "--trace-out", "step.plan", "bad_models.py"),
        "it is the plan, too",
        USAGE,
    ),
    "a summary over the trace": (
        run("--trace-out", "x.trace", "--summary-json", "x.trace", "bad_models.py"),
        "cannot write 'x.trace': it is the trace, too",
        USAGE,
    ),
    # Files that are damaged, and steps that cannot be traced.
    "a cut trace": (("simulate", "cut.trace", *ON), "the compressed data end too soon: the file was cut", USAGE),
    "a trace without its end": (plan("short.trace"), "the file ends without an end record: it was cut short", USAGE),
    "a newer trace": (plan("newer.trace"), "newer torchdelta: format version 9, this one reads 3", USAGE),
    "a flipped bit": (plan("flipped.trace"), "flipped.trace: line", USAGE),
    "a trace that is text": (plan("text.trace"), "text.trace: not a trace: the file is not gzip-compressed", USAGE),
    "an empty trace file": (plan("empty.trace"), "empty.trace: the file is empty", USAGE),
    "a cut plan": (
        ("simulate", "step.trace", "cut.plan"),
        "the compressed data end too soon: the file was cut",
        USAGE,
    ),
    "a plan without its end": (("simulate", "step.trace", "short.plan"), "without an end record: it was cut", USAGE),
    "a newer plan": (("simulate", "step.trace", "newer.plan"), "newer torchdelta: format version 9", USAGE),
    "a plan that is text": (("simulate", "step.trace", "text.plan"), "not a plan: the file is not gzip", USAGE),
    "an empty plan file": (("simulate", "step.trace", "empty.plan"), "empty.plan: the file is empty", USAGE),
    "a trace for a plan": (("simulate", "step.trace", "step.trace"), "its format is 'torchdelta-trace'", USAGE),
    "a plan for a trace": (plan("step.plan"), "not a trace: its format is 'torchdelta-plan'", USAGE),
    "a plan for a smaller step": (
        ("simulate", "larger.trace", "step.plan"),
        "the budget of 424.80 MiB is passed by 95.20 MiB at",
        USAGE,
    ),
    "events of sizes without end": (
        ("trace", "endless.jsonl", "--whole", "-o", "x.trace"),
        "is larger than any memory",
        USAGE,
    ),
    "a damaged log": (("trace", "damaged.jsonl.gz", "-o", "x.trace"), "cannot read the event log: Error -3", USAGE),
    "a damaged snapshot": (("trace", "damaged.pickle.gz", "-o", "x.trace"), "cannot read the snapshot: Error", USAGE),
    "a damaged profile": (("trace", "damaged.json.gz", "-o", "x.trace"), "cannot read the profile: Error -3", USAGE),
    "a function that returns nothing": (fit("bad_models:nothing"), "returned NoneType: it must return", USAGE),
    "a function that leaves": (fit("bad_models:leaving"), "leaving cannot be called: SystemExit: 3", USAGE),
    "a function of one batch": (fit("bad_models:fixed"), "gives the same step at batch sizes 2 and 4", USAGE),
    "a step without backward": (fit("bad_models:forward"), "the step of bad_models:forward ran no backward", USAGE),
    "a step that fails": (fit("bad_models:failing"), "failing cannot be traced: ValueError: of the step", USAGE),
    "a step that asks": (fit("bad_models:asking"), "asking cannot be traced: it asks for the value", USAGE),
    "lives that are no CSV": (("pool", "bad_models.py"), "bad_models.py has no column 'id'", USAGE),
    "a placement that is none": (("pool", "lives.csv", "--validate", "lives.csv"), "no column 'offset'", USAGE),
    # A budget that cannot be held.
    "a budget below the least": (
        plan("step.trace", "--memory-budget", "1MiB"),
        "the least budget found is",
        INFEASIBLE,
    ),
}


COMMANDS = {"run", "demo", "trace", "probe", "plan", "simulate", "fit", "pool", "env"}


def refused(words):
    """Run a command and return its one line."""
    done = CliRunner().invoke(make_app(), [str(word) for word in words])
    assert done.stdout == ""
    assert done.exception is None or isinstance(done.exception, SystemExit)
    *before, line = done.stderr.splitlines()
    # What a planner says before it starts is no part of the error.
    assert [said for said in before if "planning within" not in said and "compiling the planner" not in said] == []
    command = f"torchdelta {words[0]}" if words[0] in COMMANDS else "torchdelta"
    assert line.startswith(f"{command}: ")
    assert not line.startswith(f"{command}: torchdelta")
    assert not line.endswith(".")
    return line, done.exit_code


@pytest.mark.parametrize("case", CASES)
def test_one_clear_line(folder, case):
    """It names what was given and what is wrong with it."""
    before = sorted(folder.iterdir())
    words, said, code = CASES[case]
    line, exit_code = refused(words)
    assert said in line
    assert exit_code == code
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


def test_no_command_at_all_shows_the_help():
    """Once, and no line that says nothing."""
    done = CliRunner().invoke(make_app(), [])
    assert done.exit_code == 2
    assert done.output.count("Commands") == 1
    assert "torchdelta: " not in done.output


def test_what_was_probed_is_shown_even_if_it_cannot_be_kept(tmp_path, monkeypatch):
    """It took seconds to measure."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHDELTA_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr("torchdelta.machine.probe.probe", lambda *_arguments, **_options: find("a100-80g"))
    done = inside("probe", "--device", "cpu", "--json", code=1)
    assert json.loads(done.stdout)["name"] == "a100-80g"
    assert "cannot keep the measured machine" in done.stderr
    assert "set TORCHDELTA_CACHE_DIR" in done.stderr
    assert len(done.stderr.splitlines()) == 1
