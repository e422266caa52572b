"""The budget holds at the allocator from the second step on, also for what runs where no op is predicted or seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.runtime.programs import UNLIMITED, running
from torchdelta._torch.modes import Quietly
from torchdelta.runtime.errors import BudgetError
from torchdelta.runtime.policies.base import Action

pytestmark = pytest.mark.usefixtures("needs_counter")

WIDTH, NUM_ROWS, DEPTH = 64, 2048, 10


def cloned_gradient(layers: list[nn.Linear], x: torch.Tensor, offset: nn.Parameter) -> torch.Tensor:
    """Give a large parameter an expanded gradient: its leaf clones it, right where backward starts."""
    for layer in layers:
        x = layer(x).tanh()
    return x.mean() + offset.sum()


def hooked(layers: list[nn.Linear], x: torch.Tensor, _: nn.Parameter) -> torch.Tensor:
    """Let a hook on every activation take temporaries of its own."""
    for layer in layers:
        x = layer(x).tanh()
        x.register_hook(lambda g: (g * 1.5).sin().cos() * (g + 1))
    return x.mean()


def writing(layers: list[nn.Linear], x: torch.Tensor, _: nn.Parameter) -> torch.Tensor:
    """Run ops that write an argument and make a new tensor as well (`rrelu` writes its noise)."""
    for layer in layers:
        x = nn.functional.rrelu(layer(x), training=True)
    return x.mean()


def grown(layers: list[nn.Linear], x: torch.Tensor, _: nn.Parameter) -> torch.Tensor:
    """Let a storage grow in place."""
    for layer in layers:
        x = layer(x).tanh()
        out = torch.empty(0).resize_(4 * NUM_ROWS, WIDTH)
        x = x + out.fill_(0.01)[0]
    return x.mean()


def unseen(layers: list[nn.Linear], x: torch.Tensor, _: nn.Parameter) -> torch.Tensor:
    """Run a node without the mode, whose temporaries are many times what it hands on."""
    for layer in layers:
        x = layer(x).tanh()
    values, vectors = torch.linalg.eigh(x.view(-1, WIDTH, WIDTH) + 10 * torch.diag(torch.arange(float(WIDTH))))
    return x.mean() + (vectors * values[:, None]).square().mean()


PROGRAMS = {program.__name__: program for program in (cloned_gradient, hooked, writing, grown, unseen)}


def run(
    name: str, share: float | None, plain_bytes: int = 0, policy: str = "torchdelta"
) -> tuple[list[torch.Tensor], int, list[int]]:
    """Train for three steps inside a share of what the plain run takes beyond what lives before.

    Returns the parameters, and the peaks that a step has beyond that and beyond the budget.
    """
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    offset = nn.Parameter(torch.zeros(4 * NUM_ROWS, WIDTH))
    x = torch.randn(NUM_ROWS, WIDTH)
    parameters = [offset, *(p for layer in layers for p in layer.parameters())]
    with running(UNLIMITED) as (_, session):
        base_bytes = session.ledger.usage.total_bytes
    budget = UNLIMITED if share is None else base_bytes + int(share * plain_bytes)
    with running(budget, policy=policy) as (memory_budget, _):
        for _ in range(3):
            PROGRAMS[name](layers, x, offset).backward()
            with torch.no_grad():
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.1)
                        parameter.grad = None
    peaks_bytes = [step.peak_bytes for step in memory_budget.summary().steps]
    excess_bytes = [peak_bytes - memory_budget.summary().budget_bytes for peak_bytes in peaks_bytes]
    return [p.detach().clone() for p in parameters], max(peaks_bytes) - base_bytes, excess_bytes


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_budget_holds_from_the_second_step_on(name: str) -> None:
    """At every share of the plain peak the later steps stay inside, and the bits are the plain run's."""
    expected, plain_bytes, _ = run(name, None)
    for share in (0.8, 0.75, 0.6):
        found, _, excess_bytes = run(name, share, plain_bytes)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert max(excess_bytes[1:]) <= 0, f"share {share}"


def test_a_chain_of_replays_makes_large_constants_right_before_their_use() -> None:
    """A replay runs its ops in the order of their first run, so that the constants of a chain do not live together."""
    expected, plain_bytes, _ = run("grown", None)
    found, _, excess_bytes = run("grown", 0.6, plain_bytes, "recompute-only")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert max(excess_bytes[1:]) <= 0


def test_room_is_made_for_what_a_replayed_write_takes_inside() -> None:
    """An in-place op that is run again takes no more than the budget, its own temporaries included."""
    x = torch.randn(NUM_ROWS, WIDTH, requires_grad=True)
    offset = torch.randn(NUM_ROWS, WIDTH).bfloat16()
    with running(UNLIMITED) as (_, session):
        ledger, room = session.ledger, session.room
        written = x * 1.5
        written.sub_(offset)  # of another dtype: it is converted inside
        out = written.sin()
        other = (x * 2).cos()  # saves what can leave
        record = ledger.find(written)
        assert record is not None
        buffer = record.current
        assert buffer is not None
        assert buffer.op is not None
        assert buffer.op.workspace_bytes >= x.nbytes
        del written, record
        room.evict(buffer, Action.RECOMPUTE)
        ledger.usage.restart_peak()
        # The product, the copy that is written, and what the op takes inside: one of the three has to be made room for.
        room.budget_bytes = ledger.usage.total_bytes + 2 * x.nbytes
        with Quietly():
            session.restorer.bring(buffer)
        assert ledger.usage.peak_bytes <= room.budget_bytes
        room.budget_bytes = None
        (out.sum() + other.sum()).backward()


def test_a_refused_backward_teaches_no_headroom() -> None:
    """What runs in a tensor hook is refused in every step after the first, and not only in every other one."""
    x = torch.randn(64, 64, requires_grad=True)
    large_bytes = 64 << 20
    with running("8MiB") as (budget, _):
        _step_with_a_large_hook(x, large_bytes)  # this one learns what the hook takes
        for _ in range(3):
            with pytest.raises(BudgetError):
                _step_with_a_large_hook(x, large_bytes)
    assert [step.peak_bytes >= large_bytes for step in budget.summary().steps] == [True]
    assert budget.summary().num_refused_steps == 3


def _step_with_a_large_hook(x: torch.Tensor, size_bytes: int) -> None:
    z = (x * 2).sin()
    z.register_hook(lambda g: g.repeat(size_bytes // g.nbytes, 1).sum() * 0 + g)
    z.sum().backward()
