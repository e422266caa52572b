"""Each script of examples/ prints the same losses plain and inside its default budget."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sampling import sample

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
TRAININGS = [example for example in EXAMPLES if example.stem != "plan_only"]
MAX_LINES = 70
# How a process with gloo may end after its last step: one of 40 runs of examples/ddp.py without torchdelta did, too.
GLOO_FAILURE = "terminate called without an active exception"
NUM_ATTEMPTS = 3
BOTH = """
import gc, runpy, sys
example = sys.argv[1]
for words in ([], ["--memory-budget", "none"]):
    sys.argv[:] = [example, *words]
    try:
        runpy.run_path(example, run_name="__main__")
    except SystemExit as end:
        assert not end.code, end.code
    gc.collect()
    print("the end", flush=True)
"""


def outputs_of(example: Path, home: Path) -> tuple[str, str]:
    """Run an example without network; return what it prints inside its budget, and what plain.

    Both in one process, which imports its libraries once: they take longer than the trainings.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(home),
    }
    for _ in range(NUM_ATTEMPTS):
        result = subprocess.run(
            [sys.executable, "-c", BOTH, str(example)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env=environment,
            cwd=home,
        )
        if result.returncode == 0 or GLOO_FAILURE not in result.stderr:
            break
    assert result.returncode == 0, result.stderr
    inside, plain, _ = result.stdout.split("the end\n")
    return inside, plain


def losses_in(output: str) -> list[str]:
    """Return the lines `loss STEP VALUE`."""
    return re.findall(r"^loss .+$", output, re.MULTILINE)


def skip_without_timm() -> None:
    """Skip a test where timm cannot be imported: torchvision from PyPI fails beside a torch that is for CPUs only."""
    try:
        importlib.import_module("timm")
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"timm cannot be imported: {error}")


@pytest.mark.parametrize("example", sample(TRAININGS, 0), ids=lambda path: path.stem)
def test_same_losses(example, tmp_path):
    """The losses of an example are plain's to the last digit."""
    if example.stem == "timm_vision":
        skip_without_timm()
    inside, plain = map(losses_in, outputs_of(example, home=tmp_path))
    assert len(plain) >= 3
    assert all(re.fullmatch(r"loss \d+ -?\d+\.\d+(e-?\d+)?", line) for line in plain)
    assert inside == plain


@pytest.mark.rest
def test_a_plan_needs_less_memory(tmp_path):
    """The example without a training predicts a step plainly, and one that is slower inside the budget."""
    example = next(example for example in EXAMPLES if example.stem == "plan_only")
    both, alone = outputs_of(example, home=tmp_path)
    plain, inside = both.splitlines()
    assert plain.startswith("plain: ")
    assert re.fullmatch(r"inside 10GiB on rtx4090: .* ms a step \(\+.*%\), peak \d+\.\d+ GiB, .*", inside)
    assert alone.splitlines() == [plain]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_short(example):
    """An example is read in a minute, and says in its first lines how to run it."""
    source = example.read_text(encoding="ascii")
    assert len(source.splitlines()) <= MAX_LINES
    assert f"python examples/{example.name}" in source.split('"""')[1]
