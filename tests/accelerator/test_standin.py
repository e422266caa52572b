"""The tests of this folder, and training loops of same_bits/, on the stand-in accelerator in a process of its own.

A process of its own, because the autograd engine starts its threads for devices at the first backward of a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator import standin

REPOSITORY = Path(__file__).parents[2]
# Two processes, so that two workers can share them.
PATHS = {
    "accelerator": ("tests/accelerator",),
    "same-bits": ("tests/same_bits/test_training.py", "tests/same_bits/test_unseen_writes.py"),
}


@pytest.mark.skipif(standin.compiler() is None, reason="no C++ compiler to build the stand-in with")
@pytest.mark.skipif("TORCHDELTA_TEST_DEVICE" in os.environ, reason="these tests run on a device already")
@pytest.mark.rest
@pytest.mark.long
@pytest.mark.parametrize("name", PATHS)
def test_on_the_stand_in(name: str) -> None:
    """Everything that makes an accelerator other than the CPU, but for its speed, is right on the stand-in."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            "faulthandler_timeout=120",
            *PATHS[name],
        ],
        cwd=REPOSITORY,
        env=os.environ | {"TORCHDELTA_TEST_DEVICE": "standin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
