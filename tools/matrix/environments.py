"""Makes the environment of one combination, and runs the smoke test in it."""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdelta.trace.file import read_trace
from torchdelta.trace.model import peak

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Attempt", "Combination", "attempt", "attempt_planning", "choose_torch", "find_python"]

SMOKE = Path(__file__).with_name("smoke.py")
# What the wheel may bring beside torch and what torch brings.
OWN_PACKAGES = {"torchdelta", "msgspec"}
# Commands of the extras `cli` and `plan` that have to end well.
COMMANDS = (("env", "--json"), ("plan", "--planner", "list"))
# What they need instead of torch, where the wheel is tried without it.
PLANNING_PACKAGES = ("msgspec", "numba", "numpy", "rich", "tqdm", "typer")
PLANNING_SHARE = 0.8  # of the plain peak
TIME_LIMIT_S = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """A minor version of Python and one of torch, "3.11" and "2.13" for example."""

    python: str
    torch: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """What came of a combination.

    Attributes:
        combination: Which one.
        is_tried: Whether the smoke test ran.
        is_passed: Whether it passed; False if it was not tried.
        reason: Why it was not tried, or why it failed; empty otherwise.
        result: What the smoke test printed; empty if it printed nothing.
    """

    combination: Combination
    is_tried: bool
    is_passed: bool
    reason: str
    result: dict[str, Any]


class _NotAvailableError(Exception):
    """The combination cannot be had here."""


def attempt(combination: Combination, wheel: Path, *, is_cuda_allowed: bool) -> Attempt:
    """Install a combination into a directory of its own and run the smoke test; the directory is removed again."""
    python = find_python(combination.python)
    if python is None:
        return _not_tried(combination, f"no Python {combination.python} on this machine")
    with tempfile.TemporaryDirectory(prefix="torchdelta-matrix-") as name:
        directory = Path(name)
        try:
            offered = _offered_torch(python)
            version, refusal = choose_torch(
                offered, combination.torch, platform.machine(), is_cuda_allowed=is_cuda_allowed
            )
            if version is None:
                return _not_tried(combination, refusal)
            inner = _make_environment(python, directory)
            _install(inner, version, wheel)
        except _NotAvailableError as error:
            return _not_tried(combination, str(error))
        return _run_smoke(combination, inner, directory)


def attempt_planning(python_version: str, wheel: Path, trace: Path) -> Attempt:
    """Install the wheel without torch, and have its commands plan and simulate a traced step."""
    combination = Combination(python=python_version, torch="none")
    python = find_python(python_version)
    if python is None:
        return _not_tried(combination, f"no Python {python_version} on this machine")
    with tempfile.TemporaryDirectory(prefix="torchdelta-matrix-") as name:
        directory = Path(name)
        try:
            inner = _make_environment(python, directory)
            _run([inner, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)])
            _run([inner, "-m", "pip", "install", "--quiet", "--only-binary=:all:", *PLANNING_PACKAGES])
        except _NotAvailableError as error:
            return _not_tried(combination, str(error))
        shutil.copy(trace, directory / "step.trace")
        budget_bytes = int(PLANNING_SHARE * peak(read_trace(trace)).size_bytes)
        words = ("--machine", "a100-80g", "--memory-budget", str(budget_bytes), "-o", "step.plan")
        reason = _run_commands(
            (("plan", "step.trace", *words), ("simulate", "step.trace", "step.plan")), inner, directory
        )
        return Attempt(combination=combination, is_tried=True, is_passed=not reason, reason=reason, result={})


def find_python(version: str) -> str | None:
    """Return an interpreter of a minor version: `pythonX.Y` of PATH, of pyenv or of uv; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))]
    uv = shutil.which("uv")
    if uv is not None:
        found = _run([uv, "python", "find", "--no-python-downloads", version], check=False)
        candidates.append(found.stdout.strip() if found.returncode == 0 else None)
    code = "import sys, venv; print('{}.{}'.format(*sys.version_info[:2]))"
    for candidate in candidates:
        # A shim of pyenv is there for versions too that are not selected, and fails.
        if candidate is not None and _run([candidate, "-c", code], check=False).stdout.strip() == version:
            return candidate
    return None


def choose_torch(offered: Sequence[str], minor: str, machine: str, *, is_cuda_allowed: bool) -> tuple[str | None, str]:
    """Choose among the versions that the package index offers, without downloading one.

    Args:
        offered: Versions, the newest first: "2.13.0+cpu", "2.13.0".
        minor: The minor version that is wanted.
        machine: "x86_64" for example. There, a version without a label is a build for CUDA of several GB.
        is_cuda_allowed: Whether that may be installed.

    Returns:
        The version, or None and the reason.
    """
    fitting = [version for version in offered if version.startswith(f"{minor}.")]
    if not fitting:
        return None, f"no wheel of torch {minor} is offered here"
    labels = ("+cpu",) if machine == "x86_64" else ("+cpu", "")
    for version in fitting:
        if is_cuda_allowed or any(version.endswith(label) and ("+" in version) == bool(label) for label in labels):
            return version, ""
    return None, f"no CPU build is offered here, only {', '.join(fitting)} with several GB of CUDA"


def _make_environment(python: str, directory: Path) -> str:
    _run([python, "-m", "venv", str(directory / "venv")])
    inner = str(directory / "venv" / "bin" / "python")
    # The pip that comes with Python may be too old to list versions as JSON.
    _run([inner, "-m", "pip", "install", "--quiet", "--upgrade", "pip"])
    return inner


@functools.cache
def _offered_torch(python: str) -> tuple[str, ...]:
    """Return the versions of torch that the package index offers an interpreter, the newest first."""
    with tempfile.TemporaryDirectory(prefix="torchdelta-matrix-") as directory:
        inner = _make_environment(python, Path(directory))
        listed = _run([inner, "-m", "pip", "index", "versions", "torch", "--json"], check=False)
    return tuple(json.loads(listed.stdout)["versions"]) if listed.returncode == 0 else ()


def _install(inner: str, version: str, wheel: Path) -> None:
    _run([inner, "-m", "pip", "install", "--quiet", "--only-binary=:all:", f"torch=={version}"])
    before = _installed(inner)
    _run([inner, "-m", "pip", "install", "--quiet", str(wheel)])
    brought = _installed(inner) - before
    assert brought == OWN_PACKAGES, f"the wheel brought {sorted(brought)}"
    _run([inner, "-m", "pip", "install", "--quiet", "--only-binary=:all:", f"{wheel}[cli,plan]"])


def _installed(inner: str) -> set[str]:
    listed = json.loads(_run([inner, "-m", "pip", "list", "--format=json"]).stdout)
    return {item["name"].lower() for item in listed}


def _run_smoke(combination: Combination, inner: str, directory: Path) -> Attempt:
    done = _run([inner, str(SMOKE)], check=False, cwd=directory, environment=_environment(directory))
    result = json.loads(done.stdout) if done.stdout.strip() else {}
    reason = "" if done.returncode == 0 else _last_line(done.stderr) or json.dumps(result)
    return Attempt(combination=combination, is_tried=True, is_passed=done.returncode == 0, reason=reason, result=result)


def _run_commands(commands: Sequence[Sequence[str]], inner: str, directory: Path) -> str:
    """Run commands of torchdelta; return what failed, or an empty text."""
    for arguments in commands:
        command = [str(Path(inner).with_name("torchdelta")), *arguments]
        done = _run(command, check=False, cwd=directory, environment=_environment(directory))
        if done.returncode != 0:
            return f"{' '.join(arguments)}: {_last_line(done.stderr)}"
    return ""


def _environment(directory: Path) -> dict[str, str]:
    """Return variables with which compiled code is made anew, and nothing of this checkout is found."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    caches = {"TORCH_EXTENSIONS_DIR": str(directory / "native"), "TORCHDELTA_CACHE_DIR": str(directory / "cache")}
    return kept | caches | {"OMP_NUM_THREADS": "1"}


def _not_tried(combination: Combination, reason: str) -> Attempt:
    return Attempt(combination=combination, is_tried=False, is_passed=False, reason=reason, result={})


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def _run(
    command: list[str],
    *,
    check: bool = True,
    cwd: Path | None = None,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
    )
    if check and done.returncode != 0:
        raise _NotAvailableError(f"{' '.join(command[:5])}: {_last_line(done.stderr)}")
    return done
