"""Trains with a framework plain, measured and inside a budget, and compares what was saved."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from tools.frameworks.framework import Framework

__all__ = ["CASES", "FrameworkError", "Trained", "compare", "make_material"]

CASES: Final = ("all weights", "LoRA")
BUDGET_SHARE: Final = 0.7  # of the plain peak
UNBOUNDED: Final = "1TiB"
TIME_LIMIT_S: Final = 900.0
_PLUGIN: Final = "torchdelta.integrations.axolotl.MemoryBudgetPlugin"
_NUM_LAST_LINES: Final = 15
_ENVIRONMENT: Final = {
    "AXOLOTL_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # sums of several threads may differ from run to run
    "PYTHONHASHSEED": "0",  # peft may draw adapters in the order of a set of names
    "WANDB_MODE": "disabled",
}


class FrameworkError(Exception):
    """A training failed, or its outcome is not as required."""


def make_material(python: Path, directory: Path) -> None:
    """Make the model and the data in a directory."""
    _run([python, Path(__file__).with_name("material.py"), directory], directory)


def compare(framework: Framework, python: Path, case: str, directory: Path) -> str:
    """Train three times and return what the budget did, in words.

    Args:
        framework: Which one trains.
        python: The interpreter of its environment.
        case: One of `CASES`.
        directory: Holds the model and the data.

    Raises:
        FrameworkError: A training failed, a weight differs, the peak passed the budget, or nothing was evicted.
    """
    options = framework.options | (framework.lora if case == "LoRA" else {})
    start = [str(python), "-m"]
    within = [*start, "torchdelta", "run", "--summary-json", "summary.json", "--memory-budget"]
    plain = _train([*start, *framework.command], options, directory)
    summary_path = directory / "summary.json"
    measured = _train([*within, UNBOUNDED, "-m", *framework.command], options, directory)
    _require(measured.weights == plain.weights, "weights differ from plain's in an unbounded budget")
    peak_bytes = json.loads(summary_path.read_text(encoding="utf-8"))["peak_bytes"]
    budget_bytes = int(BUDGET_SHARE * peak_bytes)
    if framework.is_plugin:
        options = options | {"plugins": [*options["plugins"], _PLUGIN], "memory_budget": budget_bytes}
        planned = _train([*start, *framework.command], options, directory)
        peak_gib, evicted = planned.logged("peak_gib"), planned.logged("recompute_ms") + planned.logged("swapped_gib")
        held_bytes = int(max(peak_gib, default=0.0) * (1 << 30) * (1 - 5e-4))  # logged in four digits
    else:
        planned = _train([*within, str(budget_bytes), "-m", *framework.command], options, directory)
        summary = json.loads(summary_path.read_text(encoding="utf-8"))
        held_bytes, evicted = summary["peak_bytes"], [summary["recomputed_bytes"] + summary["swapped_out_bytes"]]
    _require(planned.weights == plain.weights, f"weights differ from plain's in {format_bytes(budget_bytes)}")
    _require(0 < held_bytes <= budget_bytes, f"a peak of {held_bytes} bytes in a budget of {budget_bytes}")
    _require(sum(evicted) > 0, "nothing was evicted")
    return f"same weights in {format_bytes(budget_bytes)}, plain takes {format_bytes(peak_bytes)}"


class Trained:
    """What a training has left.

    Args:
        weights: The file of the saved weights.
        output: What was printed.
    """

    def __init__(self, weights: bytes, output: str) -> None:
        self.weights = weights
        self.output = output

    def logged(self, name: str) -> list[float]:
        """Return the values that the callback logged under a name."""
        return [float(value) for value in re.findall(rf"'torchdelta/{name}': '?([0-9.e+-]+)", self.output)]


def _train(command: list[str], options: dict[str, Any], directory: Path) -> Trained:
    # YAML is a superset of JSON.
    (directory / "training.yaml").write_text(json.dumps(options), encoding="utf-8")
    output = _run([*command, "training.yaml"], directory)
    saved = sorted((directory / "out").glob("*model*.safetensors"))
    _require(len(saved) == 1, f"{len(saved)} files of weights were saved")
    weights = saved[0].read_bytes()
    saved[0].unlink()
    return Trained(weights, output)


def _run(command: list[str | Path], directory: Path) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=os.environ | _ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FrameworkError(f"{' '.join(map(str, command))} took more than {TIME_LIMIT_S:g} s") from error
    if done.returncode != 0:
        last = "\n".join(done.stdout.splitlines()[-_NUM_LAST_LINES:])
        raise FrameworkError(f"{' '.join(map(str, command))} exited with {done.returncode}:\n{last}")
    return done.stdout


def _require(is_met: bool, message: str) -> None:
    if not is_met:
        raise FrameworkError(message)
