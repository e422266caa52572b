"""The survey: if a step does not fit, it runs the rest of the step on fake tensors to find the least budget.

[Note: an impossible budget]
If the error were raised at the first op that does not fit, it could name only the need of that op. The next attempt
with that budget would fail a little later, and so on until the backward of the loss. Continuing with real tensors would
exceed the budget. So from that op on nothing is computed: every op returns `FakeTensor`s (shapes without memory), while
the ledger, the policy and the saved-tensor hooks work as before, with the budget raised to the need at each moment. The
user's own code runs the rest of the forward and the backward in a fraction of a step's time. Parameters, statistics and
optimizer states are not changed, and what the program reassigns is restored (program_state.py). When the backward
ends, `BudgetError` names the largest need. If the code reads the value of a fake tensor (`loss.item()` before the
backward), the backward of that value is surveyed immediately. If that is not possible, the error says "at least". Small
whole numbers that depend on no fake tensor have values ([Note: small values in a survey] in small_values.py). If the
code raises an error of its own, such as torch's for `.numpy()` of a fake tensor, the survey ends where that error
leaves the scope (or a framework's loop, see integrations/callback.py), and BudgetError takes its place.

Evictions in a survey change byte counts only: the ledger's journal keeps the real storages alive and restores them at
the end, so that graphs of earlier losses work as before.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.fake import FakeModeForOnce, FakeTensor, fake_view
from torchdelta._torch.modes import pop_mode, push_mode, top_mode
from torchdelta._torch.ops import execute
from torchdelta._torch.tensors import grad_fn_of
from torchdelta.aten.facts import Kind, written_tensors
from torchdelta.runtime.errors import BudgetError
from torchdelta.runtime.memory.costs import resident
from torchdelta.runtime.memory.persistents import BRINGING
from torchdelta.runtime.record.needs import omitted_bytes
from torchdelta.runtime.state.observer import Observer
from torchdelta.runtime.state.storages import memory_address
from torchdelta.runtime.survey.absent import Absent, may_any_leave
from torchdelta.runtime.survey.deep_copies import allow_deep_copies
from torchdelta.runtime.survey.everything import EverythingNeed
from torchdelta.runtime.survey.first_step import FORESEEN
from torchdelta.runtime.survey.inventory import GRADIENTS, NO_SWAP_SPACE, PARAMETERS, PASSED, Inventory, add_up
from torchdelta.runtime.survey.program_state import ProgramState, drop_fake_gradients
from torchdelta.runtime.survey.small_values import SmallValues
from torchdelta.runtime.survey.whole_run import RunNeed
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.aten.facts import OpFacts
    from torchdelta.runtime.memory.room import Room
    from torchdelta.runtime.record.recorder import Recorder
    from torchdelta.runtime.state.buffer import StorageRecord
    from torchdelta.runtime.state.ledger import Ledger

_WORKSPACE_OUTPUT = 3  # index among the outputs of oneDNN's LSTM


class Survey:
    """Runs the rest of a step without its memory."""

    def __init__(
        self,
        recorder: Recorder,
        budget_bytes: int,
        *,
        running_leaves: Callable[[], list[Any]],
        on_end: Callable[[], None],
    ) -> None:
        self._running_leaves = running_leaves
        self._on_end = on_end
        self._recorder = recorder
        self._room = recorder.room
        self._saved = recorder.saved
        self._ledger = recorder.ledger
        self._budget_bytes = budget_bytes
        self.mode = FakeModeForOnce()
        self.had_backward = False  # one that kept its graph was surveyed to its end
        self.needed_bytes = 0
        self.op = ""
        self.module = ""
        self.groups: dict[str, int] = {}
        self.largest: list[tuple[str, int]] = []
        self.away_bytes = (0, 0)  # swapped out, and dropped, at the moment of the largest need
        self.leaves: list[Any] = []  # leaves whose .grad may have become fake
        self._peak_bytes = self._ledger.usage.peak_bytes  # of the real tensors, before persistent ones are brought back
        self._room.transfers.finish_leaving()
        self._plain_types = self._saved.plain_types
        self._inventory = Inventory(self._ledger, self._saved.modules, recorder.observing.observer)
        steps = self._saved.steps
        is_first_pass = steps.num_steps == 0 and not steps.is_after_backward
        # What the pass needed before is a need of the run too, beside states and gradients that come later.
        passed_bytes = self._ledger.usage.peak_bytes if steps.is_in_optimizer else 0
        self._absent: Absent | None = None  # in the class *all*
        self._brought: list[StorageRecord] = []
        if self._room.persistents is not None:
            self._brought = self._room.persistents.bring_all()
            if may_any_leave():
                self._absent = Absent(self._ledger, self._room.persistents, self._room.transfers)
        if self._absent is not None:
            self._run_need: RunNeed = EverythingNeed(
                self._ledger,
                recorder,
                is_first_pass=is_first_pass,
                is_in_step=steps.is_in_optimizer,
                absent=self._absent,
            )
        else:
            self._run_need = RunNeed(
                self._ledger,
                recorder,
                is_first_pass=is_first_pass,
                is_in_step=steps.is_in_optimizer,
                passed_bytes=passed_bytes,
            )
        self._real_memory = _RealMemory(self._ledger)
        self._values = SmallValues()
        self._program = ProgramState(self._ledger, self.mode, self._values)
        self._forbid_deep_copies: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Switch to fake tensors. A survey begins in an op, and `end` is called after backward."""
        self._room.transfers.begin_survey()
        if self._room.persistents is not None:
            self._room.persistents.is_describing = lambda: self.mode.num_running > 0
        self._ledger.begin_survey()
        self._saved.plain_types = self._plain_types | {FakeTensor}
        self._saved.fake_view = self._fake_view
        self._recorder.execute = self.run  # pyright: ignore[reportAttributeAccessIssue]
        self._forbid_deep_copies = allow_deep_copies()
        if graph_task_id() == -1:
            self._ledger.observing.observer = _BackwardStart(self._program, self._run_need)

    def end(self) -> None:
        """Switch back to the real tensors, as they were when the survey began."""
        self._program.restore()
        self._values.restore()
        drop_fake_gradients(self.leaves)  # on leaves that the garbage collector does not list
        self.mode.end(
            "this tensor was made in a step that did not fit the memory budget "
            f"(of {format_bytes(self._budget_bytes)}, see its BudgetError): it has no content"
        )
        self._ledger.observing.observer = Observer()
        self._room.transfers.end_survey()
        self._recorder.execute = execute
        self._forbid_deep_copies()
        self._saved.plain_types = self._plain_types
        self._saved.fake_view = None
        self._room.budget_bytes = self._budget_bytes
        self._ledger.end_survey()
        if self._room.persistents is not None:
            self._room.persistents.is_describing = bool
            if not self._ledger.is_closing:
                self._room.persistents.empty_again(self._brought)
        self._ledger.usage.peak_bytes = self._peak_bytes
        self._on_end()

    def need(self, size_bytes: int, why: str) -> None:
        """Record that `size_bytes` more are needed at this moment, and raise the budget accordingly."""
        self._program.discount()
        self._run_need.add_backward_leaves(self._running_leaves())
        if why == BRINGING:
            size_bytes = 0  # the survey has brought them back
        needed_bytes = self._here_bytes() + size_bytes
        if self._absent is not None and needed_bytes > self.needed_bytes:
            self._absent.search()  # perhaps it is more because a parameter is not known yet
            needed_bytes = self._here_bytes() + size_bytes
        # `RunNeed` adds what first steps of optimizers make to the need of every moment: here it would count it twice.
        op_bytes = 0 if why.startswith(FORESEEN) else size_bytes
        if self._run_need.note(needed_bytes - size_bytes + op_bytes):
            self.op = why
            self.module = self._inventory.module()
            self.groups, self.largest = self._take_inventory(op_bytes)
            self.away_bytes = _away_bytes(self._room)
        self.needed_bytes = max(self.needed_bytes, needed_bytes)
        self._room.budget_bytes = max(self._room.budget_bytes or 0, needed_bytes)

    def _here_bytes(self) -> int:
        """Return the bytes in use, less what could be swapped out ([Note: a survey of the class all] in absent.py)."""
        self._real_memory.ask()
        absent_bytes = self._absent.size_bytes(self._run_need.leaves.values()) if self._absent is not None else 0
        return self._ledger.usage.total_bytes - absent_bytes

    def _take_inventory(self, op_bytes: int) -> tuple[dict[str, int], list[tuple[str, int]]]:
        """Return what is on the device, by group and by tensor, except for what could be swapped out."""
        leaves = self._run_need.leaves
        absent = {record.id for record in self._absent.records(leaves.values())} if self._absent is not None else ()
        return self._inventory.take(leaves, op_bytes, absent)

    def run(self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run an op on fake tensors. An in-place op returns the argument that it would have written.

        Raises:
            BudgetError: The op reads a value of a fake tensor, or cannot run in a survey.
        """
        # The other processes of a collective do not survey; torch aborts the process on fake nested tensors.
        if facts.is_collective or facts.base_name.startswith("_nested_tensor_from"):
            raise self.error(is_lower_bound=True)
        if facts.kind is Kind.VIEW and not any(isinstance(a, FakeTensor) for a in args):
            return execute(func, facts, args, kwargs)  # a view of a real tensor allocates nothing
        writes = facts.kind in (Kind.WRITE, Kind.REPLACE) and not facts.keeps_statistics
        targets = written_tensors(facts, args, kwargs) if writes else []
        is_true = self._values.reads_true_values(args, kwargs)
        if is_true and facts.kind is Kind.NO_OUTPUT:
            return execute(func, facts, args, kwargs)
        if facts.kind is Kind.NO_OUTPUT and torch.Tag.data_dependent_output in func.tags:
            # Torch 2.14 would read real tensors here, even those whose writes the survey skipped (small_values.py).
            self._survey_backward_of(args)
            raise self.error(is_lower_bound=True)
        if targets and not any(isinstance(target, FakeTensor) for target in targets):
            if torch.Tag.inplace_view in func.tags:
                return execute(func, facts, args, kwargs)
            if is_true and self._values.may_write(targets):
                return self._values.execute(func, facts, args, kwargs)
            self._values.note_unwritten(targets)
            return targets[0]  # real tensors are not changed: parameters, statistics, optimizer states
        try:
            with self._quietly(), self.mode:
                out = func(*args, **(kwargs or {}))
        except Exception as error:
            if facts.kind is Kind.NO_OUTPUT:
                self._survey_backward_of(args)
            raise self.error(is_lower_bound=True) from error
        out = _with_omitted_workspace(self.mode, facts, args, out)
        if is_true:
            out = self._values.run(func, facts, args, kwargs, out)
        self._inventory.note_outputs(out, are_new=facts.kind is Kind.COMPUTE)
        return targets[0] if targets and isinstance(out, torch.Tensor) else out

    def _quietly(self) -> contextlib.AbstractContextManager[None]:
        """Suppress torch's warnings about fake tensors if a warning filter would turn them into errors."""
        if not any(action == "error" for action, *_ in warnings.filters):
            return contextlib.nullcontext()
        return warnings.catch_warnings(action="ignore")

    def _survey_backward_of(self, args: tuple[Any, ...]) -> None:
        """Survey the backward of a value now, because the program reads it before its backward."""
        for argument in args:
            if isinstance(argument, torch.Tensor) and grad_fn_of(argument) is not None and argument.numel() == 1:
                push_mode(self._recorder)  # off inside its own ops, and then the backward would not be watched
                try:
                    torch.autograd.backward(argument)  # ends in BudgetError
                finally:
                    if top_mode() is self._recorder:
                        pop_mode()

    def _fake_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor on the device in place of a meta tensor."""
        return fake_view(self.mode, tensor, self._ledger.device)

    def error(self, *, is_lower_bound: bool, in_optimizer: bool = False) -> BudgetError:
        """End the survey and return its result. `in_optimizer`: an optimizer is about to step."""
        try:
            return self._result(is_lower_bound=is_lower_bound, in_optimizer=in_optimizer)
        finally:
            self.end()

    def _result(self, *, is_lower_bound: bool, in_optimizer: bool) -> BudgetError:
        self._run_need.add_backward_leaves([*self.leaves, *(self._running_leaves() if in_optimizer else ())])
        needed = self._run_need.finish(is_lower_bound=is_lower_bound, in_optimizer=in_optimizer)
        groups, largest = self.groups, self.largest
        if needed.optimizer:
            groups, largest = self._at_optimizer(is_lower_bound=is_lower_bound)
        if needed.passed_bytes:
            groups = {PASSED: needed.passed_bytes}
        if self._absent is None:  # else they are counted where they cannot leave
            groups = {**groups, GRADIENTS: needed.gradient_bytes}
        groups = add_up(groups, needed.more.items())
        op = f"the step of {needed.optimizer}" if needed.optimizer else PASSED if needed.passed_bytes else self.op
        return BudgetError(
            budget_bytes=self._budget_bytes,
            least_budget_bytes=needed.size_bytes,
            op=op,
            module="" if op is not self.op else self.module,
            groups=groups,
            largest=largest,
            swapped_out_bytes=self.away_bytes[0],
            dropped_bytes=self.away_bytes[1],
            least_freeing_gradients_bytes=needed.freeing_bytes,
            is_lower_bound=is_lower_bound or NO_SWAP_SPACE in groups,  # copies of what is here take space, too
            lacked_capacity=self._room.transfers.lacked_capacity or NO_SWAP_SPACE in groups,
            tier_error=self._room.transfers.surveyed_outage,
            device_type=self._ledger.device.type,
        )

    def _at_optimizer(self, *, is_lower_bound: bool) -> tuple[dict[str, int], list[tuple[str, int]]]:
        """Return the inventory at the optimizer's step: what is left after the backward."""
        groups, largest = self._take_inventory(0)
        if is_lower_bound:  # the pass is not over: only the parameters are certain to exist at the step
            return ({PARAMETERS: self._run_need.parameter_bytes()} if self._absent is None else {}), largest
        return groups, largest


def lacks_content(value: Any) -> bool:
    """Return whether a value is a tensor that a survey has made."""
    return isinstance(value, FakeTensor)


class _BackwardStart(Observer):
    """Tells the state of the program, and the need of the run, when the backward of a survey begins."""

    def __init__(self, program: ProgramState, run_need: RunNeed) -> None:
        self._program = program
        self._run_need = run_need

    def on_backward_start(self, gradients: Any) -> None:
        """Accept what the forward has exchanged, and find whose gradients come, as the outermost backward starts."""
        del gradients
        if graph_task_id() == -1:
            self._program.note_backward_start()
            self._run_need.find_optimizers()


def _away_bytes(room: Room) -> tuple[int, int]:
    """Return the bytes of the saved buffers that are swapped out, and of those that are dropped."""
    swapped = {id(buffer): buffer for buffer in room.transfers.away if buffer.copy is not None and buffer.num_saved}
    dropped = [buffer for buffer in room.costs.dropped() if id(buffer) not in swapped and buffer.num_saved]
    return (
        sum(buffer.size_bytes for buffer in swapped.values() if resident(buffer) is None),
        sum(buffer.size_bytes for buffer in dropped),
    )


class _RealMemory:
    """Counts what is really allocated during a survey outside the known storages; fake tensors take no memory.

    An example is the state of a random generator: 5 KB for each dropout that may be replayed.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        usage = ledger.usage
        self._counter = usage.counter if usage.is_counting and ledger.device.type == "cpu" else None
        self._real = {record.id for record in list(ledger.records.values())}

    def ask(self) -> None:
        """Update the bytes that live in no known storage. Storages that the survey counts as evicted still live."""
        ledger = self._ledger
        if self._counter is None:
            return
        real_bytes = sum(record.size_bytes for record in list(ledger.records.values()) if self._is_real(record))
        ledger.usage.unseen_bytes = self._counter.live_bytes() - real_bytes - ledger.suspended_bytes

    def _is_real(self, record: StorageRecord) -> bool:
        if record.id in self._real:
            return True
        storage = record.storage()
        if storage is None or storage.device.type == "meta":
            return False
        # Memory of another library (a batch from numpy) is not in the counter.
        return self._counter is not None and self._counter.owns(memory_address(storage))


def _with_omitted_workspace(mode: Any, facts: OpFacts, args: tuple[Any, ...], out: Any) -> Any:
    """Return an op's outputs, with the workspace output that its meta kernel leaves empty."""
    if not facts.name.startswith("aten.mkldnn_rnn_layer.") or not isinstance(out, tuple | list):
        return out
    size_bytes = omitted_bytes(facts, args)
    with mode:
        workspace = torch.empty(size_bytes, dtype=torch.uint8, device=out[0].device)
    return type(out)((*out[:_WORKSPACE_OUTPUT], workspace, *out[_WORKSPACE_OUTPUT + 1 :]))
