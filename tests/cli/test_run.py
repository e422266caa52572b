"""`torchdelta run` leaves a script unchanged: its arguments, exit code, output and traceback are its own.

What is compared with plain Python, or has to do with the start or the end of a process, runs in one; the rest inside
the test's own (`run_inside`), which saves the two seconds of importing torch.
"""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.cli.command import torchdelta
from tests.cli.inside import inside, run_inside
from torchdelta import MemoryBudget
from torchdelta.errors import TierIOError

BUDGET = ("--memory-budget", "1GiB")
SHOW = """\
import json, sys
import helper
print(json.dumps({"argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "helper": helper.VALUE}))
"""
TRAIN = """\
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(16, 32)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
"""


@pytest.fixture
def script(tmp_path):
    """Write a script (and a module beside it that it can import); returns a function that takes its text."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "helper.py").write_text("VALUE = 7\n")
    (tmp_path / "jobs" / "__init__.py").write_text("")

    def write(text):
        path = tmp_path / "jobs" / "train.py"
        path.write_text(text)
        return path

    return write


def python(*arguments, cwd):
    """What plain Python does with the same script."""
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], marks=pytest.mark.rest),
        ["a b", "", "--lr", "3", "-x", "--json", "--help", "--", "--memory-budget", "2GiB", "-m", "--"],
    ],
)
def test_arguments_reach_the_script_untouched(script, tmp_path, arguments):
    """sys.argv, sys.path[0], __name__ and __file__ are what plain Python gives, and so is the exit code."""
    script(SHOW + "sys.exit(3)\n")
    inside = torchdelta("run", *BUDGET, "jobs/train.py", *arguments, cwd=tmp_path, code=3)
    assert inside.stdout == python("jobs/train.py", *arguments, cwd=tmp_path).stdout
    assert json.loads(inside.stdout)["argv"] == ["jobs/train.py", *arguments]


@pytest.mark.rest
def test_a_module_runs_as_with_python_m(script, tmp_path):
    """`-m` takes a module of the current directory, and what follows is the module's."""
    script(SHOW.replace("import helper", "from jobs import helper"))
    arguments = ["--lr", "3", "-m", "--policy"]
    inside = torchdelta("run", *BUDGET, "-m", "jobs.train", *arguments, cwd=tmp_path)
    assert inside.stdout == python("-m", "jobs.train", *arguments, cwd=tmp_path).stdout
    assert json.loads(inside.stdout)["argv"][1:] == arguments


def test_a_directory_with_a_main_runs(tmp_path):
    """As with Python, a directory (or zip file) is run by its `__main__.py`, which imports from it."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "beside_main.py").write_text("VALUE = 8\n")
    text = "import beside_main, sys\nprint(__name__, beside_main.VALUE, sys.argv[1:])\n"
    (tmp_path / "job" / "__main__.py").write_text(text)
    assert run_inside(*BUDGET, tmp_path / "job", "-x").stdout == "__main__ 8 ['-x']\n"


def test_a_script_on_a_pipe_runs():
    """As of `run <(command)` or /dev/stdin: a pipe can be read only once."""
    reader, writer = os.pipe()
    os.write(writer, b"import sys\nprint('ran', sys.argv[1:])\nsys.exit(3)\n")
    os.close(writer)
    try:
        assert run_inside(*BUDGET, f"/dev/fd/{reader}", "-x", code=3).stdout == "ran ['-x']\n"
    finally:
        os.close(reader)


MAIN = """\
import atexit, pickle, sys
import torch
print("torch._dynamo" in sys.modules)
class A: pass
print(pickle.loads(pickle.dumps(A())).__class__.__module__)
import __main__
value = 3
atexit.register(lambda: print(value, __main__.value))
"""


@pytest.mark.rest
def test_the_script_is_the_main_module_until_the_process_ends(script):
    """Its classes pickle, and functions registered with atexit find its globals and its `__main__`.

    And `import torch._dynamo`, which takes a second and 80 MiB, is left to torch, which does it when it is needed.
    """
    assert torchdelta("run", *BUDGET, script(MAIN)).stdout.split() == ["False", "__main__", "3", "3"]


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("raise SystemExit(255)", 255, ""),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_the_exit_code_is_the_scripts(script, text, code, message):
    """However the script ends, the command ends with its code."""
    done = run_inside(*BUDGET, script(text), code=code)
    assert message in done.stderr
    assert ("Traceback" in done.stderr) == (message == "KeyboardInterrupt")


STOPS = """\
import sys
from torchdelta import Config, MemoryBudget
MemoryBudget.current().stop()
"""


@pytest.mark.parametrize(
    ("then", "code"),
    [("sys.exit(3)", 3), ("raise ValueError('mine')", 1), ("MemoryBudget('1GiB').start(); sys.exit(4)", 4)],
)
def test_a_script_may_stop_the_budget(script, tmp_path, then, code):
    """Its exit code, its error and the summary are the same as of a script that leaves the budget on."""
    summary = tmp_path / "summary.json"
    done = run_inside(*BUDGET, "--summary-json", summary, script(STOPS + then), code=code)
    assert ("ValueError: mine" in done.stderr) == (code == 1)
    assert "not running" not in done.stderr
    assert json.loads(summary.read_text())["budget_bytes"] == 1 << 30
    assert MemoryBudget.current() is None


def test_what_cannot_be_brought_back_at_the_end_does_not_hide_the_scripts_error(script, tmp_path, monkeypatch):
    """One line about it is added, and the summary is written."""

    def stop(_budget):
        raise TierIOError("a parameter cannot be brought back: the disk is gone")

    summary = tmp_path / "summary.json"
    real = MemoryBudget.stop
    monkeypatch.setattr(MemoryBudget, "stop", lambda budget: (real(budget), stop(budget)))
    done = run_inside(*BUDGET, "--summary-json", summary, script("raise ValueError('mine')"), code=1)
    assert "ValueError: mine" in done.stderr
    assert "torchdelta run: a parameter cannot be brought back" in done.stderr
    assert summary.exists()
    done = run_inside(*BUDGET, script("pass"), code=1)
    assert "torchdelta run: a parameter cannot be brought back" in done.stderr


@pytest.mark.rest
def test_a_traceback_is_the_scripts_own(script, tmp_path):
    """An uncaught exception shows what plain Python shows, without a frame of torchdelta, and exits with 1."""
    script("def fail():\n    return {}['key']\n\nfail()\n")
    inside = torchdelta("run", *BUDGET, "jobs/train.py", cwd=tmp_path, code=1)
    plain = python("jobs/train.py", cwd=tmp_path)
    frames = [line for line in inside.stderr.splitlines() if line.lstrip().startswith("File ")]
    assert "KeyError: 'key'" in inside.stderr
    assert [frame.split(", line")[1] for frame in frames] == [
        line.split(", line")[1] for line in plain.stderr.splitlines() if line.lstrip().startswith("File ")
    ]
    assert "torchdelta/cli" not in inside.stderr


def test_a_syntax_error_is_shown(script):
    """A script that cannot be compiled exits with 1 and names its line."""
    done = run_inside(*BUDGET, script("x = = 1\n"), code=1)
    assert "SyntaxError" in done.stderr
    assert "x = = 1" in done.stderr


@pytest.mark.parametrize("cause", ["error", "other"])
def test_an_error_may_be_its_own_cause(script, cause):
    """As after `raise error from error`; a circle may also be longer."""
    text = f"""
error, other = ValueError("first"), ValueError("second")
other.__cause__ = error
raise error from {cause}
"""
    done = run_inside(*BUDGET, "--json", script(text), code=1)
    assert "ValueError: first" in done.stderr
    assert json.loads(done.stderr.splitlines()[-1])["steps"] == []


def test_the_scripts_own_excepthook_may_exit(script, tmp_path):
    """Its exit code is kept, and the summary is written all the same."""
    path = tmp_path / "summary.json"
    text = "import sys\nsys.excepthook = lambda *error: sys.exit(3)\n1 / 0\n"
    run_inside(*BUDGET, "--summary-json", path, script(text), code=3)
    assert json.loads(path.read_text())["steps"] == []


def test_a_script_that_cannot_be_read_is_one_line_and_code_2(script, monkeypatch):
    """The budget never starts. The check is replaced: this process may be root, which may read anything."""
    monkeypatch.setattr(os, "access", lambda *_arguments: False)
    path = script("print(1)")
    done = run_inside(*BUDGET, path, code=2)
    assert done.stderr == f"torchdelta run: cannot read {str(path)!r}: no permission to read it\n"


def test_the_scripts_own_excepthook_is_called(script):
    """A script that reports its errors in its own way still does."""
    path = script("import sys\nsys.excepthook = lambda kind, error, frames: print('hook', kind.__name__)\n1 / 0\n")
    assert run_inside(*BUDGET, path, code=1).stdout == "hook ZeroDivisionError\n"


def test_an_impossible_budget_is_one_line_and_its_own_code(script):
    """BudgetError that nobody catches: no traceback, exit code 78, and the least budget that would do."""
    path = script("import torch\ntorch.ones(64, 64, requires_grad=True).exp().sum().backward()\n")
    done = torchdelta("run", "--memory-budget", "2kB", path, code=78)
    lines = [line for line in done.stderr.splitlines() if line.startswith("torchdelta run: ")]
    assert len(lines) == 1
    assert " out of memory." in lines[0]
    assert "Traceback" not in done.stderr


def test_an_impossible_budget_that_another_error_wraps_is_still_one(script):
    """Moving a model, as transformers' Trainer does, makes a RuntimeError of it: its cause is shown alone."""
    path = script("import torch\nmodel = torch.nn.Linear(64, 64)\nmodel.to('cpu')\n")
    done = run_inside("--memory-budget", "2kB", path, code=78)
    assert "torchdelta run: the memory budget of 1.95 KiB is out of memory. This run needs at least " in done.stderr
    assert "the rest of the step was not seen" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_budget_may_be_what_is_free(script):
    """`auto` finds it when the script starts, and the processes that the script starts get the same word."""
    path = script(TRAIN + "import os; print(os.environ['TORCHDELTA_RUN'])\n")
    done = run_inside("--memory-budget", "auto", "--json", path)
    assert json.loads(done.stdout.splitlines()[-1])["memory_budget"] == "auto"
    assert 0 < json.loads(done.stderr.splitlines()[-1])["budget_bytes"] < 2**50


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory):
    """What plain Python prints."""
    path = tmp_path_factory.mktemp("plain") / "train.py"
    path.write_text(TRAIN)
    return python(path, cwd=path.parent).stdout


@pytest.mark.parametrize("options", [(), pytest.param(("--arena",), marks=pytest.mark.rest)])
def test_a_training_script_gives_the_same_bits_and_a_summary(script, tmp_path, plain_losses, options):
    """An unchanged training loop prints the same losses; the summary goes to stderr and into a file."""
    path = script(TRAIN)
    inside = torchdelta("run", *BUDGET, *options, "--json", "--summary-json", tmp_path / "summary-{rank}.json", path)
    assert inside.stdout == plain_losses
    assert len(inside.stdout.split()) == 3
    summary = json.loads(inside.stderr.splitlines()[-1])
    assert summary == json.loads((tmp_path / "summary-0.json").read_text())
    assert summary["budget_bytes"] == 2**30
    assert len(summary["steps"]) == 3


def test_the_summary_is_for_people_without_json(script):
    """A table on stderr, and nothing of ours on stdout."""
    done = run_inside(*BUDGET, script("print('only this')"))
    assert done.stdout == "only this\n"
    assert done.stderr.startswith("torchdelta:\n")


def test_the_budget_can_come_from_the_environment(script, monkeypatch):
    """TORCHDELTA_MEMORY_BUDGET stands in for the option, which wins over it."""
    path = script("pass")
    monkeypatch.setenv("TORCHDELTA_MEMORY_BUDGET", "3GiB")
    assert json.loads(run_inside("--json", path).stderr)["budget_bytes"] == 3 * 2**30
    assert json.loads(run_inside("--json", *BUDGET, path).stderr)["budget_bytes"] == 2**30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory-budget", "0.8"], "torchdelta run: budget 0.8 is ambiguous"),
        (["--memory-budget", "much"], "torchdelta run: budget 'much' is not a size"),
        (["--memory-budget", "4"], "torchdelta run: budget '4' is 4 bytes: name the unit, such as '4GiB'"),
        ([*BUDGET, "--policy", "belady"], "torchdelta run: policy='belady' is not allowed: use 'torchdelta'"),
        (
            [*BUDGET, "--policy", "delta2022"],
            "torchdelta run: policy='delta2022' is not allowed: did you mean 'delta-2022'?",
        ),
        (
            [*BUDGET, "--summary-json", "no/s.json"],
            "torchdelta run: cannot write 'no/s.json': there is no directory 'no'",
        ),
        ([*BUDGET, "--tier", "tape"], "torchdelta run: tier='tape' is not allowed: use 'disk', 'memory'"),
        ([*BUDGET, "--swap-dir", "/nonexistent"], "torchdelta run: swap_dir='/nonexistent' is not a directory"),
        ([*BUDGET, "--disk-budget", "50%"], "torchdelta run: disk_budget '50%'"),
    ],
)
def test_a_wrong_value_is_one_line_and_code_2(script, monkeypatch, options, message):
    """A value that cannot be is named before the script has begun."""
    monkeypatch.delenv("TORCHDELTA_LOG_LEVEL", raising=False)
    done = inside("run", *options, script("print('began')"), code=2)
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("options", "env", "message"),
    [
        pytest.param(
            ["--memory-budget", "much"], {}, "torchdelta run: budget 'much' is not a size", marks=pytest.mark.rest
        ),
        pytest.param(
            BUDGET,
            {"TORCHDELTA_LOG_LEVEL": "LOUD"},
            "torchdelta run: unknown TORCHDELTA_LOG_LEVEL 'LOUD': use DEBUG, INFO",
            marks=pytest.mark.rest,
        ),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(script, options, env, message):
    """A wrong option is named before the script has begun."""
    done = torchdelta("run", *options, script("print('began')"), env=env, code=2)
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_missing_script_or_module_is_named():
    """As with Python itself: 2 for a script, 1 for a module."""
    assert "no script 'nowhere.py'" in run_inside(*BUDGET, "nowhere.py", code=2).stderr
    assert "No module named nowhere" in run_inside(*BUDGET, "-m", "nowhere", code=1).stderr


def test_a_directory_without_a_main_is_one_line(tmp_path):
    """Python's own words, and no traceback of ours."""
    done = run_inside(*BUDGET, tmp_path, code=1)
    assert "can't find '__main__' module" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.rest
def test_composes_with_torchrun(script, tmp_path):
    """Two ranks, each inside its own budget, with its own summary."""
    path = script("import os\nprint('rank', os.environ['RANK'], flush=True)\n")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    summary = str(tmp_path / "summary-{rank}.json")
    command = [sys.executable, "-m", "torchdelta", "run", *BUDGET, "--summary-json", summary, str(path)]
    with subprocess.Popen(
        [*launcher, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as child:
        try:
            output, _ = child.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    assert child.returncode == 0, output
    for rank in ("0", "1"):
        assert f"rank {rank}\n" in output
        assert f"torchdelta[rank {rank}]:" in output
        assert json.loads((tmp_path / f"summary-{rank}.json").read_text())["budget_bytes"] == 2**30


SHOW_RUN = "import os; print(os.environ['TORCHDELTA_RUN'])"


def test_settings_come_from_the_file_that_is_here(script, tmp_path, monkeypatch):
    """Nothing else has to name it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHDELTA_MEMORY_BUDGET", raising=False)
    (tmp_path / "torchdelta.toml").write_text('memory_budget = "3GiB"\nhost_budget = "1GiB"\n')
    done = run_inside("--json", script(SHOW_RUN))
    assert json.loads(done.stderr.splitlines()[-1])["budget_bytes"] == 3 * 2**30
    assert json.loads(done.stdout)["options"] == {"host_budget": "1GiB"}


def test_no_planner_and_no_limit_are_the_word_none(script):
    """As in a settings file: the script and its children get no planner."""
    done = run_inside(*BUDGET, "--planner", "none", "--host-budget", "none", "--json", script(SHOW_RUN))
    assert json.loads(done.stdout)["options"] == {"planner": None}


def test_settings_come_from_a_file_and_the_environment(script, tmp_path):
    """An option wins over the environment, and that over the file of --config, which is read and not the one here."""
    (tmp_path / "torchdelta.toml").write_text('memory_budget = "3GiB"\nhost_budget = "1GiB"\n')
    (tmp_path / "other.toml").write_text('memory_budget = "4GiB"\ntier = "memory"\n')
    path = script(SHOW_RUN)
    env = {"TORCHDELTA_MEMORY_BUDGET": "5GiB", "TORCHDELTA_POLICY": "dtr"}
    options = ["--config", "other.toml", "--policy", "lru"]
    handed_on = json.loads(torchdelta("run", *options, path, cwd=tmp_path, env=env).stdout)
    assert handed_on["memory_budget"] == "5GiB"
    assert handed_on["options"] == {"tier": "memory", "policy": "lru"}


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ('polcy = "lru"', [], "torchdelta.toml: unknown key 'polcy': did you mean policy?"),
        ("arena = 1", [], "torchdelta.toml: arena=1 is not allowed: use True or False"),
        ("memory_budget = ", [], "torchdelta.toml: not TOML: "),
        ("", ["--config", "no.toml"], "cannot read 'no.toml': there is no such file"),
        ("", [], "no memory budget is given: pass one ('8GiB'; --memory-budget 8GiB), or set"),
    ],
)
def test_wrong_settings_are_one_line_and_code_2(script, tmp_path, monkeypatch, text, options, message):
    """File, key, and the nearest thing that works; the script does not begin."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHDELTA_MEMORY_BUDGET", raising=False)
    (tmp_path / "torchdelta.toml").write_text(text)
    done = inside("run", *options, script("print('began')"), code=2)
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("words", [("--memory-budget", "32MiB"), ("--lr", "1", "--memory-budget=32MiB")])
def test_a_budget_after_the_script_is_named(script, tmp_path, monkeypatch, words):
    """It is one of the script's arguments there; the script does not begin."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHDELTA_MEMORY_BUDGET", raising=False)
    path = script("print('began')")
    done = inside("run", path, *words, code=2)
    assert done.stdout == ""
    assert done.stderr == (
        f"torchdelta run: no memory budget is given: --memory-budget stands after {path} and went to the script; put "
        f"it before, as in torchdelta run --memory-budget 32MiB {path}\n"
    )


def test_the_help_names_the_table_and_the_default():
    """Words in brackets would be taken for marks of a style, and left out."""
    said = " ".join(inside("run", "--help").stdout.replace("│", " ").split())
    assert "torchdelta.toml or the table tool.torchdelta of pyproject.toml" in said
    assert "or none. [default: (auto)]" in said


def test_a_terminal_gets_a_table(monkeypatch, capsys):
    """With the same words as the text."""
    from torchdelta.cli.summary_table import show_summary
    from torchdelta.summary import StepSummary, Summary

    zeros = {"kept_bytes": 0, "swapped_out_bytes": 0, "recomputed_bytes": 0, "stall_s": 0.0, "recompute_s": 0.5}
    step = StepSummary(index=0, time_s=2.0, peak_bytes=2**20, **zeros)
    zeros |= {"swapped_in_bytes": 0, "num_recomputed_ops": 7}
    summary = Summary(budget_bytes=2**21, peak_bytes=2**20, steps=(step,), **zeros)
    show_summary(summary)
    plain = capsys.readouterr().err
    assert plain == f"torchdelta:\n{summary}\n"
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show_summary(summary)
    table = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err)  # without colours
    assert set(plain.split()) - {"torchdelta:"} <= set(table.split())
    assert table.startswith("torchdelta: peak 1.00 MiB")
