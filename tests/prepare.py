"""Builds what tests need and what is built once for a version: `python -m tests.prepare`, before the first tests.

That is the library's native modules, the two accelerators made of C++, and the planners' compiled code. Workers that
run tests side by side would each build them, because they come to need them at about the same time. Here everything is
built once, by two processes. Where it has been built, this takes the time to look. What cannot be built is left to the
tests, which say why.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ACCELERATORS = (ROOT / "tests/racecheck/device/racecheck.cpp", ROOT / "tests/accelerator/standin.cpp")


def programs() -> list[str]:
    """Return a program for each thing that is still to be built, the longest first."""
    from tests.accelerator import standin
    from tests.planners.chains import SEARCHES
    from torchdelta.native.build import find
    from torchdelta.native.modules import NATIVE_MODULES

    found: list[str] = []
    if importlib.util.find_spec("numba") is not None:
        from torchdelta.simulate import kernel
        from torchdelta.simulate.compiled import is_kept

        if not is_kept(kernel.evaluate):
            found.append(SEARCHES)
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return found
    found += [
        f"from pathlib import Path; from tests.accelerator import standin; standin.built(Path({str(source)!r}))"
        for source in ACCELERATORS
        if not standin.built_path(source).exists()
    ]
    imports = "from torchdelta.native.build import load; from torchdelta.native.modules import NATIVE_MODULES"
    found += [
        f"{imports}; load(NATIVE_MODULES[{index}])"
        for index, module in enumerate(NATIVE_MODULES)
        if find(module.source) is None
    ]
    return found


def main() -> None:
    """Build, two at a time."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(program: str) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, "-c", program],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": path},
                timeout=300,
                check=False,
            )

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(run, programs()))


if __name__ == "__main__":
    main()
