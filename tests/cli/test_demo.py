"""`torchdelta demo` compares two runs, and says so when a promise breaks."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import msgspec
import pytest

from tests.cli.command import torchdelta
from tests.cli.inside import inside
from torchdelta.cli.demo import _train
from torchdelta.cli.demo_model import DemoResult, DemoRun, DemoStep, broken_promises
from torchdelta.cli.demo_train import read_stdlib_source
from torchdelta.cli.script import EXIT_INTERRUPTED

STEPS = tuple(DemoStep(index=i, loss=5.0 - i, loss_hex=(5.0 - i).hex(), time_s=1.0) for i in range(3))
PLAIN = DemoResult(
    budget_bytes=None,
    peak_bytes=2000,
    rss_peak_bytes=3000,
    num_parameters=10,
    parameters_sha256="aa",
    rng_sha256="bb",
    steps=STEPS,
    summary=None,
)
BUDGETED = replace(PLAIN, budget_bytes=1000, peak_bytes=1010, summary={})


@pytest.mark.rest
def test_a_small_model_trains_to_the_same_bits_inside_a_budget():
    """The whole command on a small model: both runs, the comparison, one JSON object."""
    options = ("--layers", 3, "--width", 128, "--batch", 8, "--steps", 2, "--memory-budget", "60%")
    report = json.loads(torchdelta("demo", "--json", *options).stdout)
    assert report["identical"] is True
    assert report["broken_promises"] == []
    assert report["budget_bytes"] == report["plain_peak_bytes"] * 60 // 100
    assert report["peak_bytes"] <= report["budget_bytes"] * 1.01
    assert len(report["plain"]["steps"]) == len(report["torchdelta"]["steps"]) == 2
    assert report["torchdelta"]["summary"]["budget_bytes"] == report["budget_bytes"]


@pytest.mark.parametrize(
    ("budgeted", "code", "verdict"),
    [(BUDGETED, 0, "identical: yes"), (replace(BUDGETED, rng_sha256="ab"), 1, "identical: NO")],
)
def test_the_table_says_whether_they_are_identical(monkeypatch, budgeted, code, verdict):
    """For people: a table with peaks, times and losses, the verdict below it; the two runs are made up here."""
    results = {None: PLAIN, 1000: budgeted}
    monkeypatch.setattr("torchdelta.cli.demo._train", lambda run, _bar: results[run.budget_bytes])
    done = inside("demo", "--memory-budget", "50%", code=code)
    for part in ("counted at the allocator", "high-water", "step time", "loss, step 1", verdict):
        assert part in done.stdout


@pytest.mark.rest
def test_an_impossible_budget_fails_with_the_line_of_the_error(monkeypatch):
    """The demo does not pass when a run did not finish; the plain run is made up here. The bar has its own line."""
    monkeypatch.setattr("torchdelta.cli.demo._train", lambda run, bar: _train(run, bar) if run.budget_bytes else PLAIN)
    options = ("--layers", 1, "--width", 64, "--batch", 1, "--steps", 1, "--memory-budget", "5%")
    said = inside("demo", *options, code=78).stderr  # of the run's own process
    assert " out of memory." in said
    assert re.search(r"(^|[\r\n])torchdelta demo: the memory budget of", said)


def test_a_training_whose_command_has_ended_says_nothing():
    """Ctrl-C may end the command after it has started the training's process, and before it can end that."""
    run = DemoRun(policy="torchdelta", layers=1, width=64, heads=1, batch=1, steps=1000)
    command = [sys.executable, "-m", "torchdelta.cli.demo_train", json.dumps(msgspec.to_builtins(run))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        assert training.stderr is not None
        training.stdout.close()
        said = training.stderr.read()
    assert "Traceback" not in said
    assert "Broken pipe" not in said
    assert training.returncode == EXIT_INTERRUPTED


@pytest.mark.parametrize("wait_s", [0, 2])
def test_ctrl_c_is_one_line_with_the_code_of_an_interrupted_script(wait_s):
    """No traceback, neither of the command nor of the training's own process."""
    command = [sys.executable, "-c", "from torchdelta.cli.main import main; main()", "demo", "--steps", "1000"]
    command += ["--layers", "1", "--width", "64", "--batch", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as demo:
        assert demo.stderr is not None
        said = ""
        while "plain" not in said:  # the bar has begun: the training's process starts, imports torch, or trains
            letter = demo.stderr.read(1)
            assert letter, f"the demo has ended: {said}"
            said += letter
        time.sleep(wait_s)
        os.killpg(demo.pid, signal.SIGINT)
        said += demo.stderr.read()
    assert demo.returncode == 130
    assert "Traceback" not in said
    assert said.endswith("torchdelta demo: interrupted\n")


def test_what_the_demo_promises_holds():
    """Equal bits and a peak within one percent of the budget break nothing."""
    assert broken_promises(PLAIN, BUDGETED) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": (*STEPS[:2], replace(STEPS[2], loss_hex="0x1.8p+1"))}, "the loss differs in step 3"),
        ({"parameters_sha256": "ab"}, "the final parameters differ"),
        ({"rng_sha256": "ab"}, "random number generator differs"),
        ({"peak_bytes": 1011}, "the peak exceeds the budget of 1000 B by 1.1%"),
        ({"budget_bytes": None}, "no budget"),
    ],
)
def test_each_broken_promise_is_named(change, message):
    """The comparison can fail, in each of its parts."""
    broken = broken_promises(PLAIN, replace(BUDGETED, **change))
    assert len(broken) == 1
    assert message in broken[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory-budget", "0.5"], "is ambiguous"),
        (["--policy", "belady"], "policy='belady'"),
        (["--width", "100"], "multiple of 64"),
    ],
)
def test_wrong_usage_is_found_before_the_plain_run(options, message):
    """What cannot work costs no minute."""
    done = inside("demo", *options, code=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_text_is_the_standard_library():
    """The training data are on every machine that has Python, and large enough."""
    text = read_stdlib_source()
    assert len(text) > 2**20
    assert b"import " in text
