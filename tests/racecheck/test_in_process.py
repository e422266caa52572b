"""The tests of this folder and of accelerator/ on the accelerator that computes late, in processes of their own.

Processes of their own, because the autograd engine starts its threads for devices at the first backward of a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator import standin

REPOSITORY = Path(__file__).parents[2]
LONGEST_TEST_S = 300
# Without the interpreter's end: there, torch's engine now and then aborts ("terminate called without an active
# exception") on the threads that it has started for the device.
PYTEST = (
    "import os, sys, pytest; code = pytest.main(sys.argv[1:]); sys.stdout.flush(); sys.stderr.flush(); os._exit(code)"
)
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(standin.compiler() is None, reason="no C++ compiler to build the accelerator with"),
    pytest.mark.skipif("TORCHDELTA_TEST_DEVICE" in os.environ, reason="these tests run on a device already"),
]


def failures_of(*words: str) -> str:
    """Run tests on the accelerator that computes late. Return what went wrong."""
    done = subprocess.run(
        [
            *(sys.executable, "-c", PYTEST, "-q", "-p", "no:cacheprovider"),
            # Threads that wait for each other end the process, and say where they are.
            *("-o", f"faulthandler_timeout={LONGEST_TEST_S}", "-o", "faulthandler_exit_on_timeout=true"),
            *words,
        ],
        cwd=REPOSITORY,
        # A kernel runs on the thread that waits for it; each thread has its own number of threads for kernels.
        env=os.environ | {"TORCHDELTA_TEST_DEVICE": "racecheck", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    have_passed = done.returncode == 0 and " passed" in done.stdout
    return "" if have_passed else done.stdout[-8000:] + done.stderr[-2000:] + f"exit code {done.returncode}"


def test_a_sample_of_the_race_check() -> None:
    """Controls, some hundred schedules, every schedule of the smallest steps, and the mutants of pinned memory."""
    assert failures_of("-m", "not rest and not whole", "tests/racecheck") == ""


@pytest.mark.rest
def test_more_of_the_race_check() -> None:
    """More schedules, larger steps, and the other mutants."""
    assert failures_of("-m", "rest", "tests/racecheck") == ""


@pytest.mark.whole
def test_every_schedule_of_longer_steps() -> None:
    """Every mix of three decisions with two or three swaps."""
    assert failures_of("-m", "whole", "tests/racecheck") == ""


@pytest.mark.rest
def test_the_accelerators_tests_late() -> None:
    """What is tested on the stand-in that computes at once holds where kernels and copies are late, without a race."""
    assert failures_of("tests/accelerator") == ""


@pytest.mark.whole
def test_following_late() -> None:
    """Training loops under every decision and under drawn plans give the plain bits where everything is late."""
    assert failures_of("tests/same_bits/test_training.py", "tests/same_bits/test_unseen_writes.py") == ""
