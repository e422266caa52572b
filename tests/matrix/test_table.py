"""The table of compatibility says what was tried, and no more."""

import pytest

from tools.matrix.environments import Attempt, Combination, choose_torch, find_python
from tools.matrix.table import page

RESULT = {"python": "3.11.7", "torch": "2.13.0+cpu", "native": "built", "peak_bytes": 2**20, "budget_bytes": 2**21}


def attempt(*, is_tried=True, is_passed=True, reason="", result=None):
    """Make an attempt of one combination."""
    combination = Combination(python="3.11", torch="2.13")
    return Attempt(combination=combination, is_tried=is_tried, is_passed=is_passed, reason=reason, result=result or {})


@pytest.mark.parametrize(
    ("made", "row"),
    [
        (attempt(result=RESULT), "| 3.11.7 | 2.13.0+cpu | passed | built | 1.00 MiB, 2.00 MiB |"),
        (attempt(is_passed=False, reason="a bit differs"), "| 3.11 | 2.13 | FAILED: a bit differs |  |  |"),
        (attempt(is_tried=False, is_passed=False, reason="none"), "| 3.11 | 2.13 | not tried: none |  |  |"),
    ],
)
def test_a_row_says_what_happened(made, row):
    """What passed, what failed and what could not be had are three different things."""
    text = page([made], date="2026-01-01", platform="Linux", command="make matrix")
    assert row in text.splitlines()
    assert f"{int(made.is_tried)} of 1 combinations could be had, {int(made.is_passed)} passed" in text


OFFERED = ["2.14.1", "2.13.0+cpu", "2.13.0", "2.12.1", "2.12.0"]


@pytest.mark.parametrize(
    ("minor", "machine", "version", "words"),
    [
        ("2.13", "x86_64", "2.13.0+cpu", ""),
        ("2.12", "x86_64", None, "only 2.12.1, 2.12.0 with several GB of CUDA"),
        ("2.12", "aarch64", "2.12.1", ""),
        ("2.1", "x86_64", None, "no wheel of torch 2.1 is offered"),
    ],
)
def test_only_a_build_for_the_cpu_is_chosen(minor, machine, version, words):
    """A build for CUDA is seen by its version before anything is downloaded, unless it is allowed."""
    chosen, reason = choose_torch(OFFERED, minor, machine, is_cuda_allowed=False)
    assert chosen == version
    assert words in reason
    assert choose_torch(OFFERED, "2.12", "x86_64", is_cuda_allowed=True) == ("2.12.1", "")


def test_an_interpreter_has_the_version_that_was_asked_for():
    """A shim for a version that is not there is not taken for it."""
    assert find_python("2.0") is None
