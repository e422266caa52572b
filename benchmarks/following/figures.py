"""What the raw data of a model says: ratios with their intervals, predictions, peaks, and what recording takes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.following.contenders import FOLLOWED, NO_PREFETCH, REACTIVE, RECORD_ONLY, in_budget
from benchmarks.turns import BESIDE, PLAIN, Block, Interval, fair_rounds, median_interval, ratios

Data = dict[str, Any]


def ratio(data: Data, contender: str, baseline: str = PLAIN) -> Interval | None:
    """Return a contender's step time over another's; None if they never met."""
    samples = ratios(fair_rounds(data["rounds"]), contender, baseline)
    return median_interval(samples) if samples else None


def blocks_of(data: Data, contender: str) -> list[Block]:
    """Return its blocks, one a round."""
    return [blocks[contender] for blocks in data["rounds"] if contender in blocks]


def step_s(block: Block) -> float:
    """Return the median step of a block, the first one left out."""
    return statistics.median(block["times_s"][1:])


def _plain_step_s(data: Data, label: str) -> float | None:
    """Return the median plain step: of those beside the followed blocks of a budget, or of the plain blocks."""
    name, rounds = in_budget(FOLLOWED, label), fair_rounds(data["rounds"])
    beside = [blocks[name][BESIDE] for blocks in rounds if BESIDE in blocks.get(name, {})]
    plain = beside or blocks_of(data, PLAIN)
    return statistics.median(map(step_s, plain)) if plain else None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """All about one budget of one model. Times are shares of plain's.

    Attributes:
        label: Of the budget.
        budget_bytes: The budget.
        reactive: Step time of the reactive policy.
        followed: Step time of the followed plan.
        no_prefetch: The same plan with each swap-in begun at its use.
        followed_of_reactive: One over the other, round by round.
        no_prefetch_of_followed: One over the other, round by round.
        peak_share: The highest peak of followed steps, of the budget.
        predicted_time: The predicted step time over the measured one.
        predicted_slowdown: The predicted step time over the predicted plain one, over the same of measured times. The
            speed of the machine, which may change after the planned step, cancels out.
        predicted_peak: The predicted peak over the measured one, that of the rounds which is farthest from 1.
        bound: The least time of any plan of the class *saved* on the measured trace, over plain's, without what
            recording takes. None if the followed planner's class is another one.
        num_unplanned: Times that room was made beyond the plan, all rounds added.
        num_followed: Steps that carried a plan out to its end, all rounds added.
        num_diverged: Steps that left their plan, all rounds added.
        swapped_out_bytes: Of a followed step.
        recomputed_bytes: Of a followed step.
        has_plan: Whether buffers had to leave, so that there is a plan.
    """

    label: str
    budget_bytes: int
    reactive: Interval | None
    followed: Interval | None
    no_prefetch: Interval | None
    followed_of_reactive: Interval | None
    no_prefetch_of_followed: Interval | None
    peak_share: float | None
    predicted_time: Interval | None
    predicted_slowdown: Interval | None
    predicted_peak: float | None
    bound: float | None
    num_unplanned: int
    num_followed: int
    num_diverged: int
    swapped_out_bytes: float
    recomputed_bytes: float
    has_plan: bool


def cell(data: Data, label: str) -> Cell:
    """Return what is known about one budget."""
    budget_bytes = data["budgets"][label]
    reactive, followed, without = (in_budget(name, label) for name in (REACTIVE, FOLLOWED, NO_PREFETCH))
    blocks = blocks_of(data, followed)
    predicted = [block for block in blocks if "predicted" in block]
    least, plain_s = data["bounds"].get(label, {}), _plain_step_s(data, label)
    return Cell(
        label=label,
        budget_bytes=budget_bytes,
        reactive=ratio(data, reactive),
        followed=ratio(data, followed),
        no_prefetch=ratio(data, without),
        followed_of_reactive=ratio(data, followed, reactive),
        no_prefetch_of_followed=ratio(data, without, followed),
        peak_share=max((block["peak_bytes"] / budget_bytes for block in blocks), default=None),
        predicted_time=(
            median_interval([block["predicted"]["time_s"] / step_s(block) for block in predicted])
            if predicted
            else None
        ),
        predicted_slowdown=_predicted_slowdown(data, followed),
        predicted_peak=max(
            (block["predicted"]["peak_bytes"] / block["peak_bytes"] for block in predicted),
            key=lambda share: abs(share - 1),
            default=None,
        ),
        bound=1 + (least["time_s"] - least["plain_time_s"]) / plain_s if plain_s and least.get("feasible") else None,
        num_unplanned=sum(block["num_unplanned"] for block in blocks),
        num_followed=sum(block["num_followed_steps"] for block in blocks),
        num_diverged=sum(block["num_diverged_steps"] for block in blocks),
        swapped_out_bytes=max((block["swapped_out_bytes"] for block in blocks), default=0),
        recomputed_bytes=max((block["recomputed_bytes"] for block in blocks), default=0),
        has_plan=bool(predicted),
    )


def _predicted_slowdown(data: Data, followed: str) -> Interval | None:
    """Return a plan's predicted slowdown over the measured one, where plain steps ran in the measured rounds."""
    found = []
    for blocks in fair_rounds(data["rounds"]):
        predicted = blocks.get(followed, {}).get("predicted")
        if predicted is not None:
            found += [predicted["time_s"] / predicted["plain_time_s"] / over for over in ratios([blocks], followed)]
    return median_interval(found) if found else None


def recording(data: Data) -> Interval | None:
    """Return the step time when all is recorded and nothing leaves, over plain's."""
    return ratio(data, RECORD_ONLY)
