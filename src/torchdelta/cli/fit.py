"""`torchdelta fit`: whether a model fits a machine, its least budget, and its largest batch."""

import json
import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchdelta.cli.errors import EXIT_INFEASIBLE, fail, note, print_result
from torchdelta.cli.options import (
    ClassOption,
    JsonOption,
    LinkOption,
    OptimizerOption,
    PlannerOption,
    a_count,
    budget_on,
    class_named,
    function_named,
    machine_named,
    measured_facts,
    own_stdout,
    progress,
    say_if_compiling,
)
from torchdelta.cli.prediction import (
    extrapolation_lines,
    interval_facts,
    launches_left_out_s,
    launches_note,
    tensor_line,
    tensors_at_peak,
    time_text,
)
from torchdelta.errors import InfeasibleError
from torchdelta.units import format_bytes, parse_size

if TYPE_CHECKING:
    from torchdelta.machine.model import Machine
    from torchdelta.plan.model import DecisionClass

__all__ = ["fit"]

_SLOWDOWNS = (1.05, 1.10, 1.25)
_TRACED = (2, 4)
_COMPARED = 8  # a third batch, which must lie on the line through the others


def fit(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Takes a batch size; returns (model, inputs) or (model, inputs, step).",
            show_default=False,
        ),
    ],
    *,
    machine: Annotated[str, typer.Option(help="Name in the catalog, such as rtx4090.", show_default=False)],
    link: LinkOption = None,
    batch_size: Annotated[int, typer.Option(callback=a_count, help="The batch that you want to train with.")] = 8,
    memory_budget: Annotated[
        str | None,
        typer.Option(help="Bytes for tensors; by default the machine's memory less the reserve.", show_default=False),
    ] = None,
    reserve: Annotated[
        str | None,
        typer.Option(
            help="Memory for context and allocator: '2GiB', '10%' or 0; by default 0.6 GiB and a sixteenth.",
            show_default=False,
        ),
    ] = None,
    optimizer: OptimizerOption = "adamw",
    planner: PlannerOption = "torchdelta",
    decision_class: ClassOption = None,
    as_json: JsonOption = False,
) -> None:
    """Report whether a model fits a machine, the least budget, the largest batch, and what to do.

    Nothing runs on a GPU: the step is traced on fake tensors at batch sizes 2 and 4, and scaled to all others. Exits
    with 78 if no plan was found with which the batch fits.
    """
    with progress() as say:
        from torchdelta.planners import get

        wanted_class = class_named(decision_class)
        get(planner, wanted_class)  # before the step is traced
        budget = _Budget(machine_named(machine, link), memory_budget, reserve)
        question = _FitQuestion(
            function,
            budget,
            optimizer=optimizer,
            planner=planner,
            decision_class=wanted_class,
            say=say,
        )
        facts = question.facts(batch_size) | measured_facts(machine)
    print_result(json.dumps(facts) if as_json else "\n".join(_lines(facts)))
    if not facts["fits"]:
        raise typer.Exit(EXIT_INFEASIBLE)


class _Budget:
    """What tensors may take of a machine's memory."""

    def __init__(self, machine: "Machine", memory_budget: str | None, reserve: str | None) -> None:
        from torchdelta.machine.model import reserve_bytes

        total_bytes = machine.memory_bytes
        self.machine = machine
        self.reserve_bytes = 0
        if memory_budget is not None:
            if reserve is not None:
                fail("--memory-budget limits tensors alone, so --reserve has no effect: leave one of them out")
            self.budget_bytes = budget_on(machine, memory_budget)
            return
        if reserve is None:
            self.reserve_bytes = reserve_bytes(machine)
        elif reserve.strip("0"):
            self.reserve_bytes = parse_size(reserve, total_bytes=total_bytes, name="reserve")
        self.budget_bytes = total_bytes - self.reserve_bytes
        if self.budget_bytes <= 0:
            whole, kept = format_bytes(total_bytes), format_bytes(self.reserve_bytes)
            fail(f"a reserve of {kept} leaves nothing of the {whole} of {machine.name}")


class _FitQuestion:
    """A model and a machine, and what `fit` finds out about them."""

    def __init__(
        self,
        function: str,
        budget: "_Budget",
        *,
        optimizer: str,
        planner: str,
        decision_class: "DecisionClass | None",
        say: Callable[[str], None],
    ) -> None:
        self.machine, self.budget_bytes, self.reserve_bytes = budget.machine, budget.budget_bytes, budget.reserve_bytes
        self.planner, self.say = planner, say
        self.decision_class: DecisionClass | None = decision_class
        say("tracing")
        build = function_named(function)
        from torchdelta.machine.model import device_of
        from torchdelta.trace.scale import difference_from_line
        from torchdelta.trace.symbolic import trace_step

        options: dict[str, Any] = {"optimizer": optimizer, "device": device_of(self.machine)}
        with own_stdout():
            self._first, self._second, third = (
                trace_step(build, batch_size=size, comment=function, **options) for size in (*_TRACED, _COMPARED)
            )
        if self._first.buffers == self._second.buffers:
            sizes = " and ".join(map(str, _TRACED))
            fail(f"{function} gives the same step at batch sizes {sizes}: it must use the batch size it is given")
        self.difference = difference = difference_from_line(self._first, self._second, third)
        if difference:
            note(
                f"{function} does not grow linearly with its batch, so other batches are predicted wrong: {difference}"
            )
        self.step = cache(self._step)

    def _step(self, batch_size: int) -> Any:
        from torchdelta.machine.roofline import price
        from torchdelta.trace.scale import scale

        return price(scale(self._first, self._second, batch_size), self.machine)

    def facts(self, batch_size: int) -> dict[str, Any]:
        """Return all answers of `fit` by name."""
        from torchdelta.planners import get, predict
        from torchdelta.planners.fitting import BatchSearch, least_budget
        from torchdelta.trace.model import peak

        step = self.step(batch_size)
        plain_peak_bytes = peak(step, with_workspace=True).size_bytes
        say_if_compiling()
        self.say("looking for the least budget")
        least = least_budget(step, self.machine, get(self.planner, self.decision_class))
        at_least = predict(step, self.machine, least.plan)
        highest = at_least.simulation.peak
        facts: dict[str, Any] = {
            "machine": self.machine.name,
            "planner": self.planner,
            "decision_class": least.plan.header.decision_class,
            "batch_size": batch_size,
            "not_linear": self.difference,
            "device_memory_bytes": self.machine.memory_bytes,
            "reserve_bytes": self.reserve_bytes,
            "budget_bytes": self.budget_bytes,
            "plain_peak_bytes": plain_peak_bytes,
            "plain_time_s": at_least.plain_time_s,
            **interval_facts(at_least.interval, plain_time=at_least.plain_time_s),
            "num_ops": len(step.ops),
            "launches_left_out_s": launches_left_out_s(step, self.machine),
            "fits_plain": plain_peak_bytes <= self.budget_bytes,
            "fits": least.budget_bytes <= self.budget_bytes,
            "least_budget_bytes": least.budget_bytes,
            "lower_bound_bytes": least.lower_bound_bytes,
            "least_budget_op": highest.op,
            "least_budget_op_name": step.ops[highest.op].name if highest.op < len(step.ops) else "",
            "least_budget_tensors": tensors_at_peak(at_least),
            "overhead": None,
        }
        if facts["fits"]:
            sample_s = self._sample_time_s(batch_size)
            facts["overhead"] = None if math.isinf(sample_s) else sample_s * batch_size / at_least.plain_time_s - 1
        self.say("looking for the largest batch")
        search = BatchSearch(self._sample_time_s)
        plain_batch = self._largest_plain()
        facts["largest_plain_batch"] = plain_batch
        plain_sample_s = sum(op.time_s for op in self.step(max(plain_batch, 1)).ops) / max(plain_batch, 1)
        facts["largest_batch"] = {}
        for slowdown in (*_SLOWDOWNS, math.inf):
            found = search.largest(slowdown * plain_sample_s, first=max(plain_batch, 1))
            name = "any" if math.isinf(slowdown) else f"{slowdown:.2f}"
            facts["largest_batch"][name] = None if found is None else found.size
            if found is not None:
                facts["largest_batch"][f"{name}_slowdown"] = found.sample_time_s / plain_sample_s
        facts["recommendation"] = _recommendation(facts)
        return facts

    def _sample_time_s(self, batch_size: int) -> float:
        from torchdelta.planners import plan_step

        self.say(f"planning batch {batch_size}")
        step = self.step(batch_size)
        try:
            found = plan_step(
                step, self.machine, self.budget_bytes, planner=self.planner, decision_class=self.decision_class
            )
        except InfeasibleError:
            return math.inf
        return found.time_s / batch_size

    def _largest_plain(self) -> int:
        from torchdelta.planners.fitting import BatchSearch
        from torchdelta.trace.model import peak

        def sample_time_s(batch_size: int) -> float:
            fits = peak(self.step(batch_size), with_workspace=True).size_bytes <= self.budget_bytes
            return 1.0 if fits else math.inf

        found = BatchSearch(sample_time_s).largest(math.inf)
        return 0 if found is None else found.size


def _recommendation(facts: dict[str, Any]) -> str:
    batch_size, budget = facts["batch_size"], format_bytes(facts["budget_bytes"])
    if facts["fits_plain"]:
        return (
            f"batch {batch_size} fits {budget} as it is: no budget is needed up to batch {facts['largest_plain_batch']}"
        )
    if facts["fits"]:
        cost = "" if facts["overhead"] is None else f", for {100 * facts['overhead']:.1f} % more time a step"
        return f"train batch {batch_size} with MemoryBudget({_budget_to_set(facts)}){cost}"
    most = facts["largest_batch"].get("any")
    if most:
        return f"batch {batch_size} does not fit: use at most {most}, and accumulate gradients for the rest"
    return f"no batch fits {budget}: the least budget found is {_least(facts)} for batch {batch_size}"


def _least(facts: dict[str, Any]) -> str:
    """Return the least budget: whoever types it as text or as bytes has enough."""
    least_bytes = facts["least_budget_bytes"]
    return f"{format_bytes(least_bytes, rounds_up=True)} ({least_bytes} bytes)"


def _budget_to_set(facts: dict[str, Any]) -> str:
    """Return the argument for a budget that is neither more than there is nor less than the least one."""
    text = format_bytes(facts["budget_bytes"], rounds_down=True)
    return repr(text) if parse_size(text) >= facts["least_budget_bytes"] else str(facts["budget_bytes"])


def _lines(facts: dict[str, Any]) -> list[str]:
    verdict = "fits as it is" if facts["fits_plain"] else "fits inside a budget" if facts["fits"] else "does not fit"
    kept = ""
    if facts["reserve_bytes"]:
        total, reserve = format_bytes(facts["device_memory_bytes"]), format_bytes(facts["reserve_bytes"])
        kept = f" of {total} ({reserve} are left to context and allocator: --reserve)"
    lines = [
        f"{facts['machine']}, {format_bytes(facts['budget_bytes'])}{kept}: batch {facts['batch_size']} {verdict}",
        f"plain peak     {format_bytes(facts['plain_peak_bytes'])}, a step takes {time_text(facts, 'plain_time')}",
        (
            f"least budget   {_least(facts)}; no plan of class 'saved' is below "
            f"{format_bytes(facts['lower_bound_bytes'], rounds_down=True)}; set by op {facts['least_budget_op']} "
            f"{facts['least_budget_op_name']} with:"
        ),
    ]
    if facts["launches_left_out_s"]:
        lines.insert(2, f"note           {launches_note(facts['launches_left_out_s'], facts['num_ops'])}")
    lines[2:2] = extrapolation_lines(facts, width=15)
    lines += [tensor_line(tensor) for tensor in facts["least_budget_tensors"]]
    lines.append(f"largest batch  {facts['largest_plain_batch']} without a budget")
    for name, size in facts["largest_batch"].items():
        if name.endswith("_slowdown"):
            continue
        limit = "at any speed" if name == "any" else f"for at most x{name} the time a sample"
        reached = "" if size is None else f" (x{facts['largest_batch'][name + '_slowdown']:.3f})"
        lines.append(f"  {'none' if size is None else size:>11}  inside a budget, {limit}{reached}")
    lines.append(facts["recommendation"])
    return lines
