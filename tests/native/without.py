"""Programs that run where native pieces cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys

WITHOUT_NATIVE = [
    ({"TORCHDELTA_NATIVE": "0"}, "TORCHDELTA_NATIVE disables it"),
    ({"CXX": "no-such-compiler"}, "no-such-compiler"),
]
"""What takes them away, and words of the reason that is given."""


def run_without(environment: dict[str, str], program: str, cache: os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    """Run a program with an empty cache of built modules."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TORCH_EXTENSIONS_DIR": str(cache)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
