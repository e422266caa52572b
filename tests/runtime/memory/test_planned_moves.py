"""Moves of persistent tensors that a plan asks for: done when possible, never against a running op or the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch

from tests.runtime.parts import is_emptied, running_session
from torchdelta import Config, MemoryBudget
from torchdelta.runtime.memory.candidates import Candidates
from torchdelta.runtime.memory.emptying import Emptying
from torchdelta.runtime.memory.planned_moves import Move

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdelta.runtime.memory.persistents import Persistents

WIDTH = 64


class Moved:
    """A model in a scope, whose first weight is moved. Its budget is no reason to evict anything."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
        self.weight = self.model[0].weight
        assert isinstance(self.weight, torch.Tensor)
        self.content = self.weight.detach().clone()
        self.model(torch.ones(1, WIDTH)).sum().backward()
        assert self.weight.grad is not None
        self.gradient = self.weight.grad.clone()  # of each backward
        self.model.zero_grad()

    def begin(self) -> None:
        """Let the session know the model."""
        self.model(torch.ones(1, WIDTH)).sum().backward()
        persistents = running_session().room.persistents
        assert persistents is not None
        self.persistents: Persistents = persistents
        persistents.is_active = persistents.planned.is_on = True
        persistents.candidates.search()
        record = running_session().ledger.find(self.weight)
        assert record is not None
        self.key = persistents.candidates.known[record.id].key

    def ask(self, *moves: Move) -> None:
        """Ask for moves of the weight that are due together, and carry them out to their ends."""
        self.persistents.planned.ask((move, self.key) for move in moves)
        self.finish()

    def finish(self) -> None:
        """Carry out what is due, and wait for copies out, as if all memory were needed."""
        self.persistents.move_planned()
        self.persistents.planned.finish_leaving(0, running_session().ledger.usage)

    def holds(self) -> bool:
        """Return whether the weight has its content. This brings it back."""
        return torch.equal(self.weight, self.content)


@pytest.fixture
def moved() -> Iterator[Moved]:
    """Return a model in a scope."""
    made = Moved()
    with MemoryBudget("1TiB", Config(decision_class="all", tier="memory", planner=None)):
        made.begin()
        yield made
    assert torch.equal(made.weight, made.content)


def test_a_tensor_leaves_and_comes_back(moved: Moved) -> None:
    """Its memory is free in between, and is being filled before it is used."""
    moved.ask(Move.LEAVE)
    assert is_emptied(moved.weight)
    assert running_session().room.persistents is moved.persistents
    num_ahead = moved.persistents.emptying.num_read_ahead
    moved.ask(Move.COPY_IN)
    assert moved.persistents.emptying.num_read_ahead == num_ahead + 1
    assert moved.holds()
    assert not is_emptied(moved.weight)


def test_what_was_copied_before_leaves_without_another_copy(moved: Moved) -> None:
    """A copy and a departure that are due together are one copy."""
    counters = running_session().counters
    moved.ask(Move.COPY_OUT)
    swapped_bytes = counters.swapped_out_bytes
    assert swapped_bytes >= moved.weight.nbytes
    moved.ask(Move.LEAVE)
    assert is_emptied(moved.weight)
    assert moved.holds()
    moved.ask(Move.COPY_OUT, Move.LEAVE)  # it was only read since
    assert is_emptied(moved.weight)
    assert counters.swapped_out_bytes == swapped_bytes


def test_what_was_written_since_is_copied_anew(moved: Moved) -> None:
    """A copy from before the write is not used."""
    moved.ask(Move.COPY_OUT)
    with torch.no_grad():
        moved.weight.add_(1.0)
    moved.content += 1.0
    moved.ask(Move.LEAVE)
    assert is_emptied(moved.weight)
    assert moved.holds()


def test_what_is_in_use_leaves_later(moved: Moved) -> None:
    """The arguments of the running op stay; once it has ended, they leave."""
    in_use = moved.persistents.in_use
    in_use.begin([moved.weight])
    moved.ask(Move.LEAVE)
    assert not is_emptied(moved.weight)
    assert moved.persistents.planned.has_due
    in_use.end()
    moved.finish()
    assert is_emptied(moved.weight)
    assert not moved.persistents.planned.has_due


def test_nothing_waits_for_a_departure_until_its_memory_is_needed(moved: Moved) -> None:
    """Its copy out goes on; a tensor that is due back before its end stays, and is not copied in."""
    planned = moved.persistents.planned
    with mock.patch.object(Emptying, "is_clean", return_value=False):  # as if the copy never ended
        planned.ask([(Move.LEAVE, moved.key)])
        moved.persistents.move_planned()
        assert not is_emptied(moved.weight)
        assert planned.has_due
        planned.ask([(Move.COPY_IN, moved.key)])
        moved.persistents.move_planned()
        assert not planned.has_due
    moved.finish()
    assert not is_emptied(moved.weight)
    assert moved.holds()


def test_a_copy_in_waits_for_room(moved: Moved) -> None:
    """Nothing is evicted for it; its use brings the tensor back in any case."""
    planned = moved.persistents.planned
    moved.ask(Move.LEAVE)
    lacks, planned.lacks = planned.lacks, lambda size_bytes: size_bytes
    num_ahead = moved.persistents.emptying.num_read_ahead
    moved.ask(Move.COPY_IN)
    assert planned.has_due
    planned.lacks = lacks
    assert moved.persistents.emptying.num_read_ahead == num_ahead
    moved.persistents.move_planned()
    assert moved.persistents.emptying.num_read_ahead == num_ahead + 1
    assert not planned.has_due
    assert moved.holds()


def test_of_several_moves_the_last_counts(moved: Moved) -> None:
    """What leaves and returns between two moments stays where it is."""
    moved.ask(Move.LEAVE, Move.COPY_IN)
    assert not is_emptied(moved.weight)
    moved.ask(Move.COPY_IN, Move.COPY_OUT, Move.LEAVE)
    assert is_emptied(moved.weight)


def test_tensors_that_died_are_passed_over(moved: Moved) -> None:
    """A plan may name a gradient that the program has freed."""
    gradient = moved.weight.grad
    assert gradient is not None
    record = running_session().ledger.find(gradient)
    assert record is not None
    key = moved.persistents.candidates.known[record.id].key
    moved.weight.grad = gradient = record = None
    moved.persistents.planned.ask([(Move.COPY_OUT, key), (Move.COPY_IN, key)])
    moved.persistents.move_planned()
    moved.persistents.planned.ask([(Move.LEAVE, key)])
    moved.persistents.move_planned()
    moved.persistents.planned.forget()
    assert not moved.persistents.planned.has_due
    assert moved.holds()


def _gradient_key(moved: Moved) -> int:
    """Return the key of the gradient of the weight, which is none of a recorded op."""
    assert moved.weight.grad is not None
    record = running_session().ledger.find(moved.weight.grad)
    assert record is not None
    return moved.persistents.candidates.known[record.id].key


def test_a_gradient_of_the_engine_is_copied_before_it_leaves(moved: Moved) -> None:
    """No recorded op has made it. It leaves without another copy."""
    key, gradient = _gradient_key(moved), moved.weight.grad
    assert gradient is not None
    planned, counters = moved.persistents.planned, running_session().counters
    planned.ask([(Move.COPY_OUT, key)])
    moved.finish()
    swapped_bytes = counters.swapped_out_bytes
    planned.ask([(Move.LEAVE, key)])
    moved.finish()
    assert is_emptied(gradient)
    assert counters.swapped_out_bytes == swapped_bytes
    assert torch.equal(gradient, moved.gradient)


def test_on_several_streams_a_gradient_of_the_engine_is_not_copied_early(moved: Moved) -> None:
    """It may not be complete. The CPU stands in for a device with streams."""
    key, gradient, planned = _gradient_key(moved), moved.weight.grad, moved.persistents.planned
    assert gradient is not None
    swapped_bytes = running_session().counters.swapped_out_bytes
    with mock.patch.object(Candidates, "is_on_cpu", new=False):
        planned.ask([(Move.COPY_OUT, key)])
        moved.finish()
    assert running_session().counters.swapped_out_bytes == swapped_bytes
    planned.ask([(Move.LEAVE, key)])
    moved.finish()
    assert is_emptied(gradient)
    assert torch.equal(gradient, moved.gradient)


def test_what_the_engine_adds_to_a_copied_gradient_is_kept(moved: Moved) -> None:
    """Its copy from before is not used, although no op wrote the gradient."""
    key, gradient, planned = _gradient_key(moved), moved.weight.grad, moved.persistents.planned
    assert gradient is not None
    planned.ask([(Move.COPY_OUT, key)])
    moved.finish()
    moved.model(torch.ones(1, WIDTH)).sum().backward()
    planned.ask([(Move.LEAVE, key)])
    moved.finish()
    assert is_emptied(gradient)
    assert torch.equal(gradient, 2 * moved.gradient)


def test_a_copy_of_a_gradient_that_is_not_there_yet_begins_later(moved: Moved) -> None:
    """Once the engine has accumulated it and it was found; not in the next step."""
    key, planned = _gradient_key(moved), moved.persistents.planned
    moved.weight.grad = None
    planned.ask([(Move.COPY_OUT, key)])
    moved.finish()
    assert planned.has_due
    moved.model(torch.ones(1, WIDTH)).sum().backward()
    moved.persistents.candidates.search()
    moved.finish()
    assert not planned.has_due
    gradient = moved.weight.grad
    assert gradient is not None
    record = running_session().ledger.find(gradient)
    assert record is not None
    assert moved.persistents.emptying.has_spare(record)
    moved.weight.grad = gradient = record = None
    planned.ask([(Move.COPY_OUT, key)])
    moved.finish()
    planned.end_step()
    assert not planned.has_due
