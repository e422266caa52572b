"""`make test-cuda` says what it lacks. These tests need no device."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cuda import ready

REPOSITORY = Path(__file__).parents[2]


def test_every_path_is_there() -> None:
    """What is handed to pytest exists."""
    for paths in (ready.ALWAYS, *ready.MORE.values(), *ready.LESS.values()):
        assert all((REPOSITORY / path).exists() for path in paths)


def test_packages_that_are_missing_or_too_old_are_named() -> None:
    """One line each, with what needs it and the least version."""
    assert ready.missing((*ready.NEEDED, *ready.NEEDED_BY_TESTS)) == []
    absent, old = ready.missing((("no-such-package", (1, 2), "the sun"), ("torch", (99, 0), "the moon")))
    assert absent == "no-such-package is not installed (the sun needs 1.2 or newer)"
    assert old == f"torch {importlib.metadata.version('torch')} is too old (the moon needs 99.0 or newer)"


def test_tests_follow_the_packages() -> None:
    """A package more brings its tests, one less takes them out, and what is left out is told."""
    arguments, absent = ready.choose({"transformers", "hypothesis"})
    assert absent == {}
    assert set(ready.MORE["transformers"]) <= set(arguments)
    arguments, absent = ready.choose(set())
    assert "--ignore=tests/accelerator/test_tiers.py" in arguments
    assert set(absent) == {"transformers", "hypothesis"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_one_line_says_so() -> None:
    """And the exit code is not 0."""
    command = [sys.executable, "tests/cuda/ready.py"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "no CUDA device\n")
