"""The wheel at work: trained with, without a compiler, and imported."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.package.running import SMOKE, run


def test_it_trains_inside_a_budget_without_a_compiler(installed, tmp_path):
    """Native parts are absent, and one log line says so; losses and parameters are equal bit for bit."""
    lacking = {"CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": str(tmp_path), "TORCHDELTA_NATIVE": "1"}
    done = run(installed, SMOKE, **lacking)
    result = json.loads(done.stdout)
    assert result["is_equal"]
    assert result["peak_bytes"] <= result["budget_bytes"] < result["plain_peak_bytes"]
    assert "no-such-compiler" in result["native"]
    # A build of torch for CUDA logs where it looks for the toolkit.
    (line,) = [line for line in done.stderr.splitlines() if "cpp_extension.py" not in line]
    assert line.startswith("torchdelta")
    assert "no-such-compiler" in line


def test_the_command_needs_its_extra_and_says_so(installed):
    """Without typer the command line is one line that names what to install."""
    code = "import sys; sys.modules['typer'] = None; from torchdelta.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "torchdelta[cli]" in done.stderr
    assert "Traceback" not in done.stderr


def test_importing_it_costs_next_to_nothing(installed):
    """`import torchdelta` loads one module: no torch, no msgspec, nothing slow of the standard library."""
    code = (
        "import sys; before = set(sys.modules); import torchdelta; "
        "print(torchdelta.__file__); print(sorted(set(sys.modules) - before))"
    )
    where, brought = run(installed, "-c", code).stdout.splitlines()
    assert Path(where).is_relative_to(installed)
    names = ast.literal_eval(brought)
    assert [name for name in names if name.startswith("torchdelta")] == ["torchdelta"]
    loaded = {name.partition(".")[0] for name in names} - {"torchdelta"}
    assert loaded <= set(sys.stdlib_module_names)
    assert loaded & {"ctypes", "subprocess", "logging", "dataclasses", "inspect", "asyncio", "multiprocessing"} == set()
