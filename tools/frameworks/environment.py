"""Makes the virtual environment of a framework, once."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from tools.frameworks.framework import Framework

__all__ = ["ready"]

TORCH: Final = "torch==2.13.0"


def ready(framework: Framework, directory: Path, root: Path) -> Path:
    """Return the interpreter of the framework's environment, which is made where it is missing or was not finished.

    Args:
        framework: What to install.
        directory: Of the environment.
        root: Of this checkout: torchdelta is taken from there.

    Raises:
        subprocess.CalledProcessError: pip failed; it has said why.
    """
    python = directory / "bin" / "python"
    done = directory / "installed.txt"
    steps = (
        # torch comes first and alone, so that no later requirement brings another build. Of the framework's own
        # dependencies only those in `packages` and `packages_alone` are installed.
        (TORCH,),
        ("--no-deps", framework.distribution, *framework.packages_alone),
        (TORCH, *framework.packages),
        ("--no-deps", "--editable", str(root)),
    )
    wanted = "\n".join((sys.version, *framework.stubs, *(" ".join(step) for step in steps)))
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        return python
    print(f"installing {framework.distribution} into {directory}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
    for step in steps:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *step], check=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    for name in framework.stubs:
        (packages / name).mkdir(exist_ok=True)
        (packages / name / "__init__.py").touch()
    done.write_text(wanted, encoding="utf-8")
    return python
