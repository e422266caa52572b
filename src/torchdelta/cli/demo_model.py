"""Messages between the demo's processes, and the promises that the comparison checks."""

from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from torchdelta.units import format_bytes

__all__ = ["DemoResult", "DemoRun", "DemoStep", "broken_promises", "differing_steps"]

# The peak counted at the allocator may exceed the budget by this share: the workspace of ops.
PEAK_TOLERANCE: Final = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoRun:
    """One run, the plain one without a budget; the defaults are the demo of the README, a model of GPT-2's size."""

    budget_bytes: int | None = None
    policy: str = "torchdelta"
    layers: int = 12
    width: int = 768
    heads: int = 12
    sequence: int = 256
    batch: int = 8
    steps: int = 4
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoStep:
    """One finished step; `loss_hex` is the exact loss."""

    index: int
    loss: float
    loss_hex: str
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """The result of one run.

    Attributes:
        peak_bytes: Highest live bytes, counted at the allocator.
        rss_peak_bytes: High-water mark of the process's resident memory, including the interpreter and torch.
    """

    budget_bytes: int | None
    peak_bytes: int
    rss_peak_bytes: int
    num_parameters: int
    parameters_sha256: str
    rng_sha256: str
    steps: tuple[DemoStep, ...]
    summary: dict[str, Any] | None

    @property
    def step_time_s(self) -> float:
        """Median over the steps."""
        return median(step.time_s for step in self.steps)


def differing_steps(plain: DemoResult, budgeted: DemoResult) -> list[int]:
    """Return the indices of steps whose losses are not bit-equal."""
    pairs = zip(plain.steps, budgeted.steps, strict=True)
    return [first.index for first, second in pairs if first.loss_hex != second.loss_hex]


def broken_promises(plain: DemoResult, budgeted: DemoResult) -> list[str]:
    """Compare the two runs. Return one line for each broken promise."""
    broken: list[str] = []
    if differing := differing_steps(plain, budgeted):
        broken.append(f"the loss differs in step {', '.join(str(index + 1) for index in differing)}")
    if plain.parameters_sha256 != budgeted.parameters_sha256:
        broken.append("the final parameters differ")
    if plain.rng_sha256 != budgeted.rng_sha256:
        broken.append("the state of the random number generator differs")
    budget_bytes = budgeted.budget_bytes
    if budget_bytes is None:
        broken.append("the second run had no budget")
    elif budgeted.peak_bytes > budget_bytes * (1 + PEAK_TOLERANCE):
        share = budgeted.peak_bytes / budget_bytes - 1
        broken.append(f"the peak exceeds the budget of {format_bytes(budget_bytes)} by {share:.1%}")
    return broken
