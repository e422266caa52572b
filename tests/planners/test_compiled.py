"""The first plan on a machine waits for the compiler, so nothing is compiled twice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planners.chains import SEARCHES

ROOT = Path(__file__).parents[2]

COUNT = """
import importlib, pkgutil
from numba.core.dispatcher import Dispatcher
import torchdelta.planners.default, torchdelta.simulate

for package in (torchdelta.planners.default, torchdelta.simulate):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, Dispatcher) and value.__module__ == module.name:
                print(name, len(value.signatures))
"""


@pytest.mark.whole
def test_each_function_is_compiled_for_one_signature(tmp_path):
    """A constant that is handed over as a literal would make another one."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}  # what is read from a cache hides what it calls
    ended = subprocess.run(
        [sys.executable, "-c", SEARCHES + COUNT], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    signatures = dict(line.split() for line in ended.stdout.splitlines())
    assert {"measure", "evaluate", "clock", "fill_need", "improve", "release", "shake", "anneal"} <= set(signatures)
    assert [name for name, number in signatures.items() if number == "0"] == [], "the program does not reach them"
    assert {name: number for name, number in signatures.items() if number != "1"} == {}
