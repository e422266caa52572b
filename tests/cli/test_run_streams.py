"""`torchdelta run` keeps a script's exit code and its outputs, whatever the script makes of the process.

It may close or replace stdout and stderr, fork, and change the working directory.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.cli.command import torchdelta
from tests.cli.inside import run_inside

BUDGET = ("--memory-budget", "1GiB")
TRAIN = """\
import sys, torch
def train():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
"""
TEE = """\
class Tee:
    def __init__(self, stream):
        self.stream = stream
    def write(self, text):
        self.stream.write(text)
    def flush(self):
        self.stream.flush()
"""


@pytest.fixture
def script(tmp_path):
    """Write a script; returns a function that takes its text."""

    def write(text):
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("redirection", "options"),
    [
        ("2>&1 >&3 | true", ["--progress"]),
        (">&- 2>&-", []),
        pytest.param("2>/dev/full", ["--json"], marks=pytest.mark.rest),
        pytest.param("2>&-", ["--progress"], marks=pytest.mark.rest),
    ],
)
def test_a_stream_that_cannot_be_written(script, tmp_path, redirection, options):
    """Closed, full, or without a reader: the exit code is the script's, and the file of the summary is written."""
    path = script(f"{TRAIN}train()\nsys.exit(3)\n")
    summary, code = tmp_path / "summary.json", tmp_path / "code"
    words = ["-m", "torchdelta", "run", *BUDGET, *options, "--summary-json", str(summary), str(path)]
    line = f'exec 3>/dev/null; {{ "$0" "$@"; echo $? > {code}; }} {redirection}'
    subprocess.run(["/bin/sh", "-c", line, sys.executable, *words], check=False, stdin=subprocess.DEVNULL)
    assert code.read_text() == "3\n"
    assert len(json.loads(summary.read_text())["steps"]) == 1


@pytest.mark.parametrize(
    ("taker", "code"),
    [
        ("Tee(sys.stderr)", 1),
        pytest.param("object()", 120, marks=pytest.mark.rest),  # Python's own: it cannot be flushed at the end
    ],
)
def test_a_script_may_put_its_own_object_in_place_of_stderr(script, taker, code):
    """One that can write gets the summary, and so does a text of `sys.exit`; one that cannot is passed over."""
    path = script(f"{TRAIN}{TEE}train()\nsys.stderr = {taker}\nsys.exit('no more data')\n")
    done = torchdelta("run", *BUDGET, "--progress", "--json", path, code=code)
    lines = done.stderr.splitlines()
    assert "no more data" in lines
    assert len(json.loads(lines[-1])["steps"]) == 1


def test_a_child_that_the_script_forks_only_ends(script, tmp_path):
    """With its own exit code: the progress, the summary and its file are the parent's alone."""
    text = "import os\ntrain()\npid = os.fork()\nif pid == 0:\n    sys.exit(5)\nprint(os.waitpid(pid, 0)[1] >> 8)\n"
    path = script(f"{TRAIN}{text}print(os.path.exists({str(tmp_path / 'summary.json')!r}))\nsys.exit(3)\n")
    options = ("--progress", "--json", "--summary-json", tmp_path / "summary.json")
    done = torchdelta("run", *BUDGET, *options, path, code=3)
    assert done.stdout == "5\nFalse\n"
    assert done.stderr.count("step 1, peak") == 1
    assert done.stderr.count('"peak_bytes"') == 2 * done.stderr.count('"budget_bytes"') == 2


def test_the_file_of_the_summary_may_be_a_pipe(script):
    """What cannot be replaced by another file is written in place."""
    reader, writer = os.pipe()
    run_inside(*BUDGET, "--summary-json", f"/dev/fd/{writer}", script("pass"))
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert json.loads(pipe.read())["budget_bytes"] == 2**30


def test_relative_paths_begin_where_the_command_was_started(script, tmp_path, monkeypatch):
    """Whatever directory the script, or a process that it starts, trains in."""
    path = script(
        f"import json, os\nos.chdir('elsewhere')\nprint(json.loads(os.environ['TORCHDELTA_RUN'])['options'])\n"
        f"{TRAIN}train()\ntrain()\ntrain()\n"
    )
    for name in ("elsewhere", "swap"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHDELTA_SWAP_DIR", "swap")
    done = run_inside(*BUDGET, "--summary-json", "summary.json", "--trace-out", "step.trace", path)
    assert done.stdout == f"{{'swap_dir': {str(tmp_path / 'swap')!r}}}\n"
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert (tmp_path / "step.trace").exists()
    assert len(json.loads((tmp_path / "summary.json").read_text())["steps"]) == 3
