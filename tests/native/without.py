"""Programs that run where native pieces cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from torchdelta.native.build import is_switched_off

if TYPE_CHECKING:
    from collections.abc import Iterable

WITHOUT_NATIVE = [
    ({"TORCHDELTA_NATIVE": "0"}, "TORCHDELTA_NATIVE disables it"),
    ({"CXX": "no-such-compiler"}, "no-such-compiler"),
]
"""What takes them away, and words of the reason that is given."""


def but_of_absence(messages: Iterable[str]) -> list[str]:
    """Return messages without those that say that a native part is switched off: with native parts, all of them."""
    return [message for message in messages if not (is_switched_off() and WITHOUT_NATIVE[0][1] in message)]


def run_without(environment: dict[str, str], program: str, cache: os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    """Run a program with an empty cache of built modules. What takes native pieces away here does not do so there."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TORCH_EXTENSIONS_DIR": str(cache), "TORCHDELTA_NATIVE": "1"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
