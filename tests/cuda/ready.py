"""Reports whether the tests for CUDA can run here, and which: `python tests/cuda/ready.py` prints paths for pytest.

The machine that has the GPU may have no network, and other packages than the pinned ones. What is missing is said in
one line each, and the exit code is 1 where nothing can run.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

# (package, least version, what needs it); the first part of a version decides.
NEEDED = (
    ("torch", (2, 11), "everything"),
    ("msgspec", (0, 20), "the runtime's traces"),
    ("numpy", (1, 20), "the judge"),
)
NEEDED_BY_TESTS = (("pytest", (7, 4), "every test"),)
ALWAYS = (
    "tests/cuda",
    "tests/accelerator",
    "tests/same_bits/test_training.py",
    "tests/same_bits/test_unseen_writes.py",
)
# These need one package more: they are added where it is, or taken out of the folders above where it is not.
MORE = {"transformers": ("tests/same_bits/test_pressure.py", "tests/same_bits/test_transformers.py")}
LESS = {"hypothesis": ("tests/accelerator/test_tiers.py",)}


def missing(needed: tuple[tuple[str, tuple[int, ...], str], ...]) -> list[str]:
    """Return one line for each package that is not here, or too old."""
    lines: list[str] = []
    for name, least, purpose in needed:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} is not installed ({purpose} needs {'.'.join(map(str, least))} or newer)")
            continue
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
        if numbers < least:
            lines.append(f"{name} {version} is too old ({purpose} needs {'.'.join(map(str, least))} or newer)")
    return lines


def main() -> int:
    """Print the paths; 1 and the reasons on stderr where there is no way."""
    lines = missing((*NEEDED, *NEEDED_BY_TESTS))
    if lines:
        print("\n".join(lines), file=sys.stderr)
        return 1
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 1
    arguments, absent = choose({name for name in (*MORE, *LESS) if importlib.util.find_spec(name) is not None})
    for name, paths in absent.items():
        print(f"{name} is not installed: {' '.join(paths)} left out", file=sys.stderr)
    print(" ".join(arguments))
    return 0


def choose(packages: set[str]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Return pytest's arguments for the packages that are here, and what is left out for want of which other."""
    arguments = list(ALWAYS)
    for name, paths in MORE.items():
        arguments += paths if name in packages else ()
    for name, paths in LESS.items():
        arguments += () if name in packages else (f"--ignore={path}" for path in paths)
    return arguments, {name: paths for name, paths in (MORE | LESS).items() if name not in packages}


if __name__ == "__main__":
    sys.exit(main())
