"""The survey: when a budget cannot hold, how much would? The rest of the step is run on fake tensors to find out.

[Note: an impossible budget]
At the op for which no room can be made, raising at once would tell the user only that this op did not fit; the next try
with "the least budget" would fail a little later, and so on up to the backward of the loss. Going on for real would
pass the budget. So from that op on nothing is computed: every op yields `FakeTensor`s (shapes without memory), while
the ledger, the policy and the saved-tensor hooks go on as before, with the budget raised to whatever is needed at each
moment. The user's own code runs the rest of the forward and the backward in a fraction of a step's time; parameters,
statistics and optimizer states are not touched; and when the backward ends, `BudgetError` names the largest need. Where
the code asks for a value of a fake tensor (`loss.item()` before the backward), the backward of that value is surveyed
on the spot; where that is not possible the error says "at least".
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta import _torch
from torchdelta._torch import fake_mode_for_once, fake_view, without_mode
from torchdelta.aten.facts import Kind, written_tensors
from torchdelta.runtime.errors import BudgetError
from torchdelta.runtime.optimizers import first_step_bytes, stateless_optimizers
from torchdelta.runtime.recorder import execute

if TYPE_CHECKING:
    from torchdelta.aten.facts import OpFacts
    from torchdelta.runtime.buffer import StorageRecord
    from torchdelta.runtime.session import Session

NUM_LARGEST_SHOWN: Final = 5


class Survey:
    """The rest of a step without its memory."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.mode = fake_mode_for_once()
        self.needed_bytes = 0
        self.op = ""
        self.largest: list[tuple[str, int]] = []
        self.leaves: list[Any] = []  # whose .grad may have become fake
        ledger = session.ledger
        self.peak_bytes = ledger.peak_bytes  # of what was real
        ledger.is_counting = False  # what it had beyond the known storages stays as it is
        ledger.new_device = torch.device("meta")
        ledger.counted_devices = frozenset({ledger.device, ledger.new_device})
        session.saved.plain_types = session.saved.plain_types | {_torch.FakeTensor}
        session.residency.prefetches = False
        session.residency.surveys = True
        session.recorder.execute = self.run  # pyright: ignore[reportAttributeAccessIssue]

    def need(self, size_bytes: int, why: str) -> None:
        """Note that `size_bytes` more were needed than the budget so far; the budget grows to that."""
        residency = self.session.residency
        needed_bytes = self.session.ledger.total_bytes + size_bytes
        if needed_bytes > self.needed_bytes:
            self.needed_bytes = needed_bytes
            self.op = why
            self.largest = _largest(list(self.session.ledger.records.values()))
        residency.budget_bytes = max(residency.budget_bytes or 0, needed_bytes)

    def run(self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run an op on fake tensors. An in-place op returns the very argument that it would have written.

        Raises:
            BudgetError: The op asks for a value that no fake tensor has.
        """
        if facts.is_collective:  # the other processes do not survey
            raise self.error(is_lower_bound=True)
        if facts.kind is Kind.VIEW and not any(isinstance(a, _torch.FakeTensor) for a in args):
            return execute(func, facts, args, kwargs)  # views of what is there cost nothing
        writes = facts.kind in (Kind.WRITE, Kind.REPLACE) and not facts.keeps_statistics
        targets = written_tensors(facts, args, kwargs) if writes else []
        if targets and not any(isinstance(target, _torch.FakeTensor) for target in targets):
            if torch.Tag.inplace_view in func.tags:
                return execute(func, facts, args, kwargs)
            return targets[0]  # what is real stays as it is: parameters, statistics, optimizer states
        try:
            with self._quietly(), self.mode:
                out = func(*args, **(kwargs or {}))
        except Exception as error:
            if facts.kind is Kind.NO_OUTPUT:
                self._survey_backward_of(args)
            raise self.error(is_lower_bound=True) from error
        return targets[0] if targets and isinstance(out, torch.Tensor) else out

    def _quietly(self) -> contextlib.AbstractContextManager[None]:
        """Under filters that raise, what torch warns of in its own handling of fake tensors would end the survey."""
        if not any(action == "error" for action, *_ in warnings.filters):
            return contextlib.nullcontext()
        return warnings.catch_warnings(action="ignore")

    def _survey_backward_of(self, args: tuple[Any, ...]) -> None:
        """Somebody reads the loss before its backward: survey that backward now."""
        for argument in args:
            if isinstance(argument, torch.Tensor) and argument.grad_fn is not None and argument.numel() == 1:
                torch.autograd.backward(argument)  # ends in BudgetError

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Turn a memory-less tensor into one that says it is on the device."""
        return fake_view(self.mode, tensor, self.session.ledger.device)

    def _need_of_optimizers(self) -> None:
        """After the backward comes an optimizer's step, the first of which makes its states."""
        passes_bytes = self.needed_bytes
        session = self.session
        stepping = {id(leaf) for leaf in self.leaves}
        all_states_bytes = 0
        for optimizer in stateless_optimizers():
            if any(id(parameter) in stepping for group in optimizer.param_groups for parameter in group["params"]):
                with without_mode(session.recorder):
                    state_bytes, temporary_bytes = first_step_bytes(optimizer)
                if state_bytes:
                    all_states_bytes += state_bytes
                    self.need(all_states_bytes + temporary_bytes, f"the first step of {type(optimizer).__name__}")
        # From the second step on the states are there while the forward and the backward run.
        self.needed_bytes = max(self.needed_bytes, passes_bytes + all_states_bytes)

    def error(self, *, is_lower_bound: bool) -> BudgetError:
        """Return what the survey found, and put everything back as it was."""
        session = self.session
        if not is_lower_bound and self.leaves:
            self._need_of_optimizers()
        for leaf in self.leaves:
            if leaf.is_leaf and isinstance(leaf.grad, _torch.FakeTensor):  # written in place, it is none any more
                leaf.grad = None
        error = BudgetError(
            budget_bytes=session.budget_bytes,
            least_budget_bytes=self.needed_bytes,
            op=self.op,
            largest=self.largest,
            is_lower_bound=is_lower_bound,
        )
        session.ledger.peak_bytes = self.peak_bytes
        session.end_survey()
        return error


def _largest(records: Any) -> list[tuple[str, int]]:
    """Name the largest living storages."""
    ordered: list[StorageRecord] = sorted(records, key=lambda record: -record.size_bytes)[:NUM_LARGEST_SHOWN]
    names: list[tuple[str, int]] = []
    for record in ordered:
        origin = record.current.origin if record.current is not None else ""
        if not origin:
            origin = (
                "parameter" if record.current is not None and record.current.is_pinned else "gradient or other tensor"
            )
        names.append((origin, record.size_bytes))
    return names
