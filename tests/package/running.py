"""Runs Python with an installed wheel."""

import os
import subprocess
import sys
from pathlib import Path

SMOKE = Path(__file__).parents[2] / "tools" / "matrix" / "smoke.py"


def run(installed, *arguments, **environment):
    """Run Python with the wheel's content on its path instead of this checkout's."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=installed,
        env=os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
