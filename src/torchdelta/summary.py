"""What a budget did, as immutable data for users, logs and files. Needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from torchdelta.html_table import html_table
from torchdelta.units import format_bytes

__all__ = ["FollowSummary", "PlainPeak", "StepSummary", "Summary", "Totals", "least_slowdown", "most_slowdown"]

_SMALL_SHARE: Final = 0.01  # a slowdown by less is said as "under 1 %"
_LEAST_MICRO_BATCHES: Final = 1.5  # for each optimizer step: with fewer, steps without one are exceptions
_MOST_PLANS_SHOWN: Final = 4
_NOTABLE_SHARE: Final = 0.01  # of a peak: smaller groups are left out of the text


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSummary:
    """One forward and backward, with the optimizer's step if one followed: what left the device, and what it cost.

    Under gradient accumulation each micro-batch is one of these: `optimizer_step` has the same value in all that belong
    together, and `had_optimizer` is true in the last of them.

    Attributes:
        index: Position of the step in its scope, from 0.
        time_s: Wall time from the end of the previous step to the end of this one, loading data included. The first
            step is timed from its first saved tensor on: the time before that is `Summary.startup_s`.
        peak_bytes: Most bytes of storages known to the runtime at once.
        kept_bytes: Saved bytes that were never evicted.
        swapped_out_bytes: Bytes written to the tier.
        recomputed_bytes: Bytes brought back by replay.
        stall_s: Time that the training thread waited for the tier.
        recompute_s: Time spent on replays.
        optimizer_step: How many optimizer steps came before.
        had_optimizer: Whether it ended with an optimizer's step.
        evict_s: Time spent on choosing what leaves and on starting its copies, where no plan decided that.
        op_time_s: Time of the program's own recorded ops. Steps that follow a plan record only some of their ops.
        plan: The number of the plan that it followed to its end, in the order in which plans were made, from 1. 0 if it
            followed none, or left it.
    """

    index: int
    time_s: float
    peak_bytes: int
    kept_bytes: int
    swapped_out_bytes: int
    recomputed_bytes: int
    stall_s: float
    recompute_s: float
    optimizer_step: int = 0
    had_optimizer: bool = True
    evict_s: float = 0.0
    op_time_s: float = 0.0
    plan: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainPeak:
    """The highest moment of the first step as it would be without a budget: why tensors had to leave.

    It is computed from the trace of the first step. Optimizer states that this step creates count from its beginning,
    because all later steps have them from the beginning.

    Attributes:
        size_bytes: Bytes on the device at that moment, the workspace of the running op included. With a budget of this
            size such a step evicts little or nothing; memory outside of tensors is not included.
        op: The op that runs then, such as "aten._softmax.default".
        module: The path of the module that the op belongs to; in backward, that of the forward op whose saved tensor it
            reads. Empty if it is not known.
        phase: "forward", "backward" or "optimizer".
        node: In backward the autograd node that calls the op, such as "SoftmaxBackward0"; else empty.
        groups: Bytes by group (parameters, gradients, ...), largest first; their sum is `size_bytes`.
        largest_modules: Bytes by the module whose forward made them, largest first: of the tensors that live then and
            are saved for backward. At most three. "h.*.mlp" is that module of several layers together.
    """

    size_bytes: int
    op: str
    module: str
    phase: str
    node: str
    groups: dict[str, int]
    largest_modules: dict[str, int]

    def lines(self, what: str) -> list[str]:
        """Return it in two or three lines.

        Args:
            what: Whose peak it is, such as "the first step".
        """
        where = f" of {self.module}" if self.module else ""
        phase = f"{self.phase}, {self.node}" if self.node else self.phase
        notable = {name: size for name, size in self.groups.items() if size >= _NOTABLE_SHARE * self.size_bytes}
        lines = [
            f"without a budget {what} peaks at {format_bytes(self.size_bytes)}: {phase}, {self.op}{where}",
            f"on the device then: {_listed(notable)}",
        ]
        if self.largest_modules:
            modules = (f"{name} ({format_bytes(size)})" for name, size in self.largest_modules.items())
            lines.append(f"saved the most: {', '.join(modules)}")
        return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """What a budget has done since it was last started, for a program that reads it in every step.

    Attributes:
        num_steps: Complete steps.
        swapped_out_bytes: Bytes written to the tier.
        stall_s: Time that the training thread waited for the tier.
        recompute_s: Time spent on replays.
        op_time_s: Time of the program's own ops, from which the time of a plain run is estimated. In steps that follow
            a plan, only recorded ops count.
        num_followed_steps: Steps that followed a plan to their end.
        present_peak_bytes: Most bytes on the device since the latest complete step.
    """

    num_steps: int
    swapped_out_bytes: int
    stall_s: float
    recompute_s: float
    op_time_s: float
    num_followed_steps: int = 0
    present_peak_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowSummary:
    """How plans were followed, and whether the steps cost what was predicted.

    Attributes:
        planner: Name of the planner, or of the plan's file.
        num_programs: Plans that were made.
        num_followed_steps: Steps that followed a plan to their end.
        num_diverged_steps: Steps that began as planned, and in which the policy took over when they differed from the
            plan.
        num_reactive_steps: All other steps.
        num_not_carried_out: Absences of the latest plan that the runtime cannot carry out.
        num_unplanned: Times that room had to be made beyond the plan.
        divergences: How many steps diverged, by the most frequent reasons.
        latest_divergence: The latest reason in full; empty if no step diverged.
        why_no_plan: Why there is no plan, or no further one; empty if nothing went wrong.
        predicted_time_s: Predicted seconds of a step under its plan, `outside_s` included; median of the followed
            steps. None without a prediction, as for a plan from a file.
        time_s: Median wall time of the followed steps, from step end to step end, so that it includes loading data.
        predicted_peak_bytes: Predicted peak of a step under its plan, with bytes outside of known tensors; also a
            median.
        peak_bytes: Median peak of the followed steps.
        plain_time_s: Estimated seconds of a plain step: the sum of the traced step's op times, without the time between
            ops.
        outside_s: Seconds of a step that are outside of its ops, in the traced step: loading data, ops before the trace
            begins (it may begin at the first saved tensor), gradients that autograd adds up, and about 20 us for each
            op. None without a prediction.
        slowdown: `time_s` divided by `plain_time_s`.
        overheads_by_budget: The predicted overhead of the first planned step in this budget and in larger ones, by
            their bytes: 0.1 is 10 % more time than plain. Empty if nobody predicted it, as for a file.
        num_steps_by_plan: For the plans that were followed most often, by their numbers (`StepSummary.plan`): how many
            steps followed each to their end.
    """

    planner: str
    num_programs: int
    num_followed_steps: int
    num_diverged_steps: int
    num_reactive_steps: int
    num_not_carried_out: int
    num_unplanned: int
    divergences: dict[str, int]
    latest_divergence: str
    why_no_plan: str
    predicted_time_s: float | None
    time_s: float | None
    predicted_peak_bytes: int | None
    peak_bytes: int | None
    plain_time_s: float | None
    slowdown: float | None
    overheads_by_budget: dict[int, float] = field(default_factory=dict)
    num_steps_by_plan: dict[int, int] = field(default_factory=dict)
    outside_s: float | None = None

    def __str__(self) -> str:
        """Return it in one to four lines."""
        programs = f"{self.num_programs} plan{'' if self.num_programs == 1 else 's'}"
        lines = [
            (
                f"following {self.planner}: {programs}; {self.num_followed_steps} steps followed, "
                f"{self.num_diverged_steps} diverged, {self.num_reactive_steps} reactive; "
                f"room made beyond the plan {self.num_unplanned} times"
            )
        ]
        if self.time_s is not None and self.peak_bytes is not None:
            time_s, peak_bytes = self.predicted_time_s, self.predicted_peak_bytes
            predicted_time = "" if time_s is None else f" (predicted {time_s * 1e3:.1f} ms)"
            predicted_peak = "" if peak_bytes is None else f" (predicted {format_bytes(peak_bytes)})"
            slowdown = "" if self.slowdown is None else f"; x{self.slowdown:.2f} of the plain step's ops"
            lines.append(
                f"a followed step: {self.time_s * 1e3:.1f} ms{predicted_time}, "
                f"peak {format_bytes(self.peak_bytes)}{predicted_peak}{slowdown}"
            )
        if len(self.num_steps_by_plan) > 1:
            counts = sorted(self.num_steps_by_plan.items(), key=lambda item: (-item[1], item[0]))
            listed = ", ".join(f"no. {plan} {num_steps}" for plan, num_steps in counts[:_MOST_PLANS_SHOWN])
            lines.append(f"steps by plan: {listed}{', ...' if len(counts) > _MOST_PLANS_SHOWN else ''}")
        if len(self.divergences) > 1:
            counted = ", ".join(f"{why} ({num_steps})" for why, num_steps in self.divergences.items())
            more = ", ..." if sum(self.divergences.values()) < self.num_diverged_steps else ""
            lines.append(f"steps diverged by reason: {counted}{more}; the latest: {self.latest_divergence}")
        elif self.latest_divergence:
            lines.append(f"latest divergence: {self.latest_divergence}")
        elif self.why_no_plan:
            lines.append(f"no {'further ' if self.num_programs else ''}plan: {self.why_no_plan}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Totals since the budget was last started, and its steps.

    [Note: slowdown]
    The plain step is not run, so its time is not known, and the slowdown is given as a lower and an upper bound.
    `slowdown_at_least` is the time of the steps (without the first one, which warms up, if there are more) divided by
    the same time less the waits for swapped data, the replays, and choosing and sending what leaves. All of these are
    measured in every mode. The cost of recording ops, and the time that copies take from the cores of a CPU, are not
    included, so the true slowdown is higher. `slowdown_at_most` is the time of the steps divided by the sum of the
    times of the program's own ops. If most steps followed a plan, it is the time of these, divided by the sum of the op
    times of the traced step. What the program does between ops (Python, loading data, evaluation) counts as slowdown
    there, so the true slowdown is lower. On a GPU, replays and choosing are host time that may be hidden, so both
    figures are estimates there.

    Attributes:
        budget_bytes: None if decisions are forced: they ignore the budget.
        peak_bytes: Most bytes on the device.
        kept_bytes: Saved bytes that were never evicted, in all steps together. The following figures are also for all
            steps together.
        swapped_out_bytes: Bytes written to the tier.
        swapped_in_bytes: Bytes read from it.
        recomputed_bytes: Bytes brought back by replay.
        num_recomputed_ops: Ops that were run again.
        stall_s: Time that the training thread (on a GPU the compute stream) waited for swapped data.
        recompute_s: Time spent on replays.
        num_refused_steps: Steps that ended in a BudgetError; they are not among `steps`.
        steps: The latest 10,000 steps.
        follow: How plans were followed; None if no plan was asked for or given.
        evict_s: Time spent on choosing what leaves and on starting its copies, without waits. In steps that follow a
            plan, only decisions that were not planned count.
        num_steps: All steps, including those that are no longer in `steps`. Under gradient accumulation each
            micro-batch is one.
        num_optimizer_steps: How many of them ended with an optimizer's step. 0 in a loop without `torch.optim`.
        num_unrecorded_steps: How many of them were not recorded, because they were known to fit.
        startup_s: Time from the start to the first saved tensor of the first step: imports, data, the model.
        slowdown_at_least: See [Note: slowdown]. None without a complete step.
        slowdown_at_most: See [Note: slowdown]. None without a complete step whose ops were timed.
        plain_peak: What the first step would need without a budget, and where; None before it is complete, or if its
            trace was dropped.
        had_other_optimizers: Whether an optimizer stepped after another one had ended its step. `plain_peak` lacks its
            states.
        first_had_optimizer: Whether the first step ended with an optimizer's step, or there is no step yet.
    """

    budget_bytes: int | None
    peak_bytes: int
    kept_bytes: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    recomputed_bytes: int
    num_recomputed_ops: int
    stall_s: float
    recompute_s: float
    num_refused_steps: int = 0
    steps: tuple[StepSummary, ...] = field(default=())
    follow: FollowSummary | None = None
    evict_s: float = 0.0
    num_steps: int = 0
    num_optimizer_steps: int = 0
    num_unrecorded_steps: int = 0
    startup_s: float = 0.0
    slowdown_at_least: float | None = None
    slowdown_at_most: float | None = None
    plain_peak: PlainPeak | None = None
    had_other_optimizers: bool = False
    first_had_optimizer: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return asdict(self)

    @property
    def evicted(self) -> bool:
        """Whether anything left the device and came back."""
        return self.swapped_out_bytes > 0 or self.num_recomputed_ops > 0

    @property
    def over_bytes(self) -> int:
        """Bytes by which the peak passed the budget, 0 if it did not."""
        return 0 if self.budget_bytes is None else max(0, self.peak_bytes - self.budget_bytes)

    def headline(self) -> str:
        """Return the peak against the budget and the number of steps, in one line."""
        budget = "none (decisions are forced)" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        over = self.over_bytes
        of_budget = f"PASSED the budget of {budget} by {format_bytes(over)}" if over else f"of budget {budget}"
        refused = f", {self.num_refused_steps} refused" if self.num_refused_steps else ""
        return f"peak {format_bytes(self.peak_bytes)} {of_budget}; {self._counted()}{refused}"

    def facts(self) -> list[tuple[str, str]]:
        """Return the lines below the headline, each as (label, text), for any kind of output."""
        if not self.steps and not self.num_refused_steps:
            return [("steps", "no training step was seen on this thread")]
        facts: list[tuple[str, str]] = []
        if not self.num_refused_steps and not self.evicted and not self.over_bytes:
            facts.append(("cost", "the steps fit: nothing was evicted, recording is the only cost"))
        else:
            facts += [("moved", self._moved()), ("cost", self._cost())]
            if self.plain_peak is not None and self.budget_bytes is not None:
                accumulates = self._accumulates()
                what = "the first micro-batch" if accumulates else "the first step"
                facts += [("why", line) for line in self.plain_peak.lines(what)]
                # The first micro-batch has no gradients of others. Without an optimizer's step it has no states yet.
                if accumulates:
                    facts.append(("why", "later micro-batches need more: gradients and optimizer states are there too"))
                elif self._begins_without_optimizer() or self.had_other_optimizers:
                    facts.append(("why", "later steps need more: optimizer states are there too"))
                elif self.plain_peak.size_bytes > self.budget_bytes:
                    facts += [("would help", line) for line in self._larger_budgets(self.plain_peak.size_bytes)]
        if self.num_unrecorded_steps:
            was = "step was" if self.num_unrecorded_steps == 1 else "steps were"
            facts.append(("unrecorded", f"{self.num_unrecorded_steps} {was} not recorded: known to fit"))
        if self.follow is not None:
            facts += [("plan", line) for line in str(self.follow).splitlines()]
        if self.startup_s >= 1:
            facts.append(("before", f"{self.startup_s:.1f} s passed before the first step: imports, data, the model"))
        return facts

    def step_table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return the heads of the columns, and the cells of the first three steps and the last one."""
        shown = self.steps if len(self.steps) <= 4 else (*self.steps[:3], self.steps[-1])
        heads = ("step", "time s", "peak", "kept", "swapped", "recomputed", "stall s")
        rows = [
            (
                str(step.index),
                f"{step.time_s:.3f}",
                format_bytes(step.peak_bytes),
                format_bytes(step.kept_bytes),
                format_bytes(step.swapped_out_bytes),
                format_bytes(step.recomputed_bytes),
                f"{step.stall_s:.3f}",
            )
            for step in shown
        ]
        if not self._accumulates():
            return heads, rows
        heads = ("micro", "step", *heads[1:])
        return heads, [
            (cells[0], str(step.optimizer_step), *cells[1:]) for step, cells in zip(shown, rows, strict=True)
        ]

    def __str__(self) -> str:
        """Return the headline, the facts, and the table of steps."""
        facts = self.facts()
        width = max(len(label) for label, _ in facts) if facts else 0
        before = ""
        lines = [self.headline()]
        for label, text in facts:
            lines.append(f"  {'' if label == before else label:<{width}}  {text}")
            before = label
        heads, rows = self.step_table()
        if rows:
            widths = [9 if head.endswith(" s") else 7 if head in {"micro", "step"} else 12 for head in heads]
            lines.extend(
                "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
                for cells in (heads, *rows)
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return it for a notebook."""
        return html_table(self.headline(), self.facts(), *self.step_table())

    def _larger_budgets(self, plain_bytes: int) -> list[str]:
        """Return what larger budgets would cost, and which one costs nothing.

        If no planner has predicted it, the cost of the budget halfway is estimated as half of the cost of this one.
        """
        assert self.budget_bytes is not None
        lines: list[str] = []
        follow, least = self.follow, self.slowdown_at_least
        predicted = follow.overheads_by_budget if follow is not None else {}
        if len(predicted) > 1:
            costs = (f"{_percent(cost)} in {format_bytes(size)}" for size, cost in predicted.items())
            lines.append(f"a larger budget: a planned step costs {', '.join(costs)} (predicted)")
        elif least is not None and least - 1 >= _SMALL_SHARE:
            size = format_bytes((self.budget_bytes + plain_bytes) // 2)
            cost, here = _percent((least - 1) / 2), _percent(least - 1)
            lines.append(f"a budget of {size} would cost about {cost}, where this one costs {here} or more (estimated)")
        size = format_bytes(plain_bytes)
        return [*lines, f"with a budget of {size} such a step evicts little or nothing"]

    def _accumulates(self) -> bool:
        """Return whether most optimizer steps have several micro-batches; a GradScaler skips some steps, too."""
        return 0 < _LEAST_MICRO_BATCHES * self.num_optimizer_steps <= self.num_steps

    def _begins_without_optimizer(self) -> bool:
        return self.num_optimizer_steps > 0 and not self.first_had_optimizer

    def _counted(self) -> str:
        num_steps = self.num_steps or len(self.steps)
        if self._accumulates():
            return f"{_number(self.num_optimizer_steps, 'step')} in {num_steps} micro-batches"
        return _number(num_steps, "step")

    def _moved(self) -> str:
        return (
            f"kept {format_bytes(self.kept_bytes)}, swapped out {format_bytes(self.swapped_out_bytes)}, "
            f"recomputed {format_bytes(self.recomputed_bytes)} in {self.num_recomputed_ops} ops, in all steps together"
        )

    def _cost(self) -> str:
        spent = (
            f"stalled {self.stall_s:.3f} s, recomputing {self.recompute_s:.3f} s, making room {self.evict_s:.3f} s, "
            "in all steps together"
        )
        least, most = self.slowdown_at_least, self.slowdown_at_most
        if least is None:
            return spent
        if most is not None and most > least:
            bounds = f"x{least:.2f} to x{most:.2f} of the plain time"
            return f"{bounds} (estimated; the larger figure counts all time between ops as cost): {spent}"
        if least - 1 < _SMALL_SHARE:
            return f"under 1 % for waiting and recomputing ({spent}); recording the ops comes on top"
        return f"at least x{least:.2f} of the plain time (estimated): {spent}; recording the ops comes on top"


def least_slowdown(steps: tuple[StepSummary, ...]) -> float | None:
    """Return the time of some steps against the same time without waits and replays. See [Note: slowdown]."""
    later = steps[1:] or steps
    time_s = sum(step.time_s for step in later)
    free_s = time_s - sum(step.stall_s + step.recompute_s + step.evict_s for step in later)
    return time_s / free_s if free_s > 0 else None


def most_slowdown(steps: tuple[StepSummary, ...]) -> float | None:
    """Return the time of steps without a plan against that of the program's own ops in them. See [Note: slowdown]."""
    later = [step for step in steps[1:] or steps if not step.plan]
    op_time_s = sum(step.op_time_s for step in later)
    return sum(step.time_s for step in later) / op_time_s if op_time_s > 0 else None


def _percent(share: float) -> str:
    return "under 1 %" if share < _SMALL_SHARE else f"{share * 100:.0f} %"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(size_bytes)}" for name, size_bytes in sizes.items())
