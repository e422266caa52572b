"""Where the content of a buffer is said to be, against what its fields show."""

from __future__ import annotations

import random
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.runtime.programs import running
from torchdelta import BudgetError
from torchdelta.runtime.memory.costs import resident
from torchdelta.runtime.state.buffer import TRANSITIONS, Buffer, Residence
from torchdelta.runtime.state.copies import SurveyedCopy
from torchdelta.runtime.state.ledger import Ledger

if TYPE_CHECKING:
    from torchdelta.runtime.session import Session

WIDTH = 64
POLICIES = ["torchdelta", "swap-only", "recompute-only"]


def residence_by_fields(buffer: Buffer, leaving: set[int]) -> Residence:
    """Return what the residence of a buffer has to be."""
    if resident(buffer) is not None:
        is_leaving = id(buffer) in leaving and buffer.strong is not None and buffer.copy is not None
        return Residence.LEAVING if is_leaving else Residence.RESIDENT
    if buffer.fetching is not None:
        return Residence.RETURNING
    if buffer.copy is not None:
        return Residence.AWAY
    return Residence.DROPPED if buffer.op is not None else Residence.GONE


class Checker:
    """Compares all buffers that a session has ever known, so far as they live."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.known: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self.wrong: list[tuple[Residence, Residence]] = []
        self.seen: set[Residence] = set()

    def check_after_every_op(self) -> None:
        """Check from now on, until a budget turns out to be impossible."""
        original = self.session.recorder.execute

        def execute(*args: Any) -> Any:
            out = original(*args)
            self.check()
            return out

        self.session.recorder.execute = execute

    def check(self) -> None:
        """Note every difference."""
        ledger = self.session.ledger
        self.known.update(ledger.held.values())
        self.known.update(record.current for record in ledger.records.values() if record.current is not None)
        leaving = {id(buffer) for buffer in self.session.room.transfers.leaving}
        for buffer in self.known:
            expected = residence_by_fields(buffer, leaving)
            self.seen.add(expected)
            if buffer.residence is not expected:
                self.wrong.append((buffer.residence, expected))


def random_step(seed: int, parameter: torch.Tensor) -> None:
    """Run a forward of random ops, writes in place among them, and its backward."""
    choose = random.Random(seed)
    values = [torch.randn(WIDTH, WIDTH).sin() @ parameter]
    for _ in range(12):
        value = choose.choice(values)
        kind = choose.randrange(6)
        if kind == 0:
            values.append(value @ parameter)
        elif kind == 1:
            values.append(value.sigmoid() * choose.choice(values))
        elif kind == 2:
            values.append((value * 0.5).add_(1.0).mul_(0.25).cos())
        elif kind == 3:
            values.append(value.reshape(-1).sin().view(WIDTH, WIDTH))
        elif kind == 4 and len(values) > 2:
            del values[choose.randrange(len(values))]
        else:
            values.append(torch.cat([value[:32], choose.choice(values)[32:]]).exp().clamp(max=2.0))
    sum(value.mean() for value in values).backward()  # pyright: ignore[reportAttributeAccessIssue]


def train(seed: int) -> torch.Tensor:
    """Train one parameter for two steps and return it."""
    torch.manual_seed(seed)
    parameter = torch.randn(WIDTH, WIDTH, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)
    for step in range(2):
        random_step(100 * seed + step, parameter)
        optimizer.step()
        optimizer.zero_grad()
    return parameter.detach()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_residence_follows_from_the_fields_after_every_op(seed: int, policy: str) -> None:
    """In tight budgets every buffer's residence is what its storage, its copy and its op say, and bits stay equal."""
    with running() as (_, session):
        base_bytes = session.ledger.usage.total_bytes
        plain = train(seed)
        peak_bytes = session.summary().peak_bytes or 0
    del session
    num_trained, seen = 0, set[Residence]()
    for percent in (75, 90, 97):
        budget_bytes = base_bytes + (peak_bytes - base_bytes) * percent // 100
        with running(budget_bytes, policy=policy) as (_, session):
            checker = Checker(session)
            checker.check_after_every_op()
            try:
                assert torch.equal(train(seed), plain)
                num_trained += 1
            except BudgetError:
                checker.check()
        assert checker.wrong == []
        seen |= checker.seen
    assert num_trained
    assert seen & {Residence.AWAY, Residence.DROPPED, Residence.LEAVING}


def test_an_illegal_transition_is_refused() -> None:
    """Every change of residence that is not in the table raises."""
    refused = [(old, new) for old in Residence for new in Residence if new is not old and new not in TRANSITIONS[old]]
    assert len(refused) > 5
    for old, new in refused:
        buffer = Buffer(8)
        buffer.residence = old
        with pytest.raises(AssertionError):
            buffer.move(new)
        assert buffer.residence is old


@pytest.mark.parametrize("old", list(Residence))
def test_a_legal_transition_is_taken(old: Residence) -> None:
    """Every change that is in the table is made."""
    for new in TRANSITIONS[old]:
        buffer = Buffer(8)
        buffer.residence = old
        buffer.move(new)
        assert buffer.residence is new


def test_content_that_is_copied_after_it_was_overwritten_is_away() -> None:
    """Its copy on the tier is forgotten like any other's."""
    ledger, tensor = Ledger("cpu"), torch.zeros(2048)
    view = ledger.view_of(tensor)
    buffer, record = view.buffer, view.buffer.record
    assert record is not None
    ledger.invalidate(record)
    assert buffer.residence is Residence.GONE
    ledger.copied(buffer, SurveyedCopy(0, lambda _: None))
    assert buffer.residence is Residence.AWAY
    ledger.uncopied(buffer)
    assert buffer.residence is Residence.GONE
