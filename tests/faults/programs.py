"""A small training loop that suffers one fault and goes on, run plainly and inside budgets.

The loop is the user's: it catches what is raised, drops the step and takes the next batch. What it leaves behind (every
loss, parameter, statistic, optimizer state and the generator's state) must be the plain loop's that suffered the same
fault, bit for bit, and what the runtime counts must be back where it was. The collector is off the whole time: nothing
may depend on it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.same_bits.judge import Bits, bits_of, rng_states, seed_everything
from torchdelta import Config, MemoryBudget
from torchdelta._torch.modes import num_modes
from torchdelta.runtime.current import current_session

if TYPE_CHECKING:
    from pathlib import Path

    from torchdelta.runtime.session import Session

WIDTH, BATCH, DEPTH = 64, 96, 3
NUM_STEPS, FAULTY_STEP = 6, 3
UNLIMITED = "1TiB"
# Above the least that the loop needs, and below what it takes unpressed.
PRESSED_SHARE = 0.72


class InjectedError(Exception):
    """The fault that a test puts somewhere."""


class Gate(torch.autograd.Function):
    """Passes its input on; runs a test's code in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: Block) -> torch.Tensor:
        """Pass on."""
        ctx.block = block
        ctx.save_for_backward(x)
        if block.in_forward is not None:
            block.in_forward()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Pass on."""
        _ = ctx.saved_tensors
        if ctx.block.in_backward is not None:
            ctx.block.in_backward()
        return gradients[0], None


class Block(nn.Module):
    """A layer with random numbers, statistics and an in-place op, and places where a test can do harm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.in_forward: Callable[[], None] | None = None
        self.in_backward: Callable[[], None] | None = None
        self.with_hidden: Callable[[torch.Tensor], Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer."""
        hidden = torch.nn.functional.gelu(self.linear(x))
        if self.with_hidden is not None:
            self.with_hidden(hidden)
        hidden = Gate.apply(hidden, self)
        return torch.relu_(self.norm(self.dropout(hidden) * 1.5)) + x


class Fragile(torch.optim.SGD):
    """An optimizer that can fail when half of the parameters are updated."""

    in_step: Callable[[], None] | None = None

    def step(self, closure: Any = None) -> Any:
        """Update."""
        if self.in_step is not None:
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(0.5)
            self.in_step()
        return super().step(closure)


@dataclass(kw_only=True)
class Loop:
    """What a fault can get at."""

    model: nn.Sequential
    optimizer: Fragile
    blocks: list[Block]
    session: Session | None


Fault = Callable[[Loop], contextlib.AbstractContextManager[Any]]
Scope = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(kw_only=True)
class Level:
    """What a session counts after a step."""

    live_bytes: int
    num_handles: int
    num_held: int
    tier_bytes: int
    num_modes: int
    num_threads: int


@dataclass(kw_only=True)
class Report:
    """What a loop left behind."""

    observed: dict[str, Any]
    raised: list[type[BaseException]]
    levels: list[Level] = field(default_factory=list)
    peak_bytes: int = 0
    budget: MemoryBudget | None = None
    tier: Any = None


def build() -> tuple[nn.Sequential, Fragile, list[Block]]:
    """Build the model and its optimizer."""
    blocks = [Block() for _ in range(DEPTH)]
    model = nn.Sequential(*blocks)
    return model, Fragile(model.parameters(), lr=0.05, momentum=0.9), blocks


def run(fault: Fault, scope: Scope = contextlib.nullcontext, *, num_steps: int = NUM_STEPS) -> Report:
    """Train from fixed seeds; the fault is there in one step, and whatever it raises is caught as a user would."""
    torch.set_num_threads(1)
    seed_everything()
    model, optimizer, blocks = build()
    losses: list[float] = []
    raised: list[type[BaseException]] = []
    levels: list[Level] = []
    gc.collect()
    gc.disable()
    try:
        with scope() as budget:
            session = current_session()
            loop = Loop(model=model, optimizer=optimizer, blocks=blocks, session=session)
            for index in range(num_steps):
                x = torch.randn(BATCH, WIDTH)
                with fault(loop) if index == FAULTY_STEP else contextlib.nullcontext():
                    try:
                        loss = model(x).square().mean()
                        loss.backward()
                        optimizer.step()
                        losses.append(loss.item())
                    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - judged by the test
                        raised.append(type(error))
                loss = x = None
                optimizer.zero_grad()
                if session is not None:
                    levels.append(level(session))
            peak_bytes = budget.summary().peak_bytes if session is not None else 0
            tier = session.room.transfers.opened_tier if session is not None else None
    finally:
        gc.enable()
    observed = dict(model.state_dict())
    observed |= {f"momentum {index}": state for index, state in enumerate(optimizer.state.values())}
    observed |= {"losses": losses, **rng_states()}
    return Report(
        observed=bits_of(observed), raised=raised, levels=levels, peak_bytes=peak_bytes, budget=budget, tier=tier
    )


def level(session: Session) -> Level:
    """Count."""
    torch.zeros(1)  # an op: whatever was put off to a safe moment happens now
    tier = session.room.transfers.opened_tier
    if tier is not None:
        tier.drain()
    return Level(
        live_bytes=session.ledger.usage.live_bytes,
        num_handles=session.ledger.num_handles,
        num_held=len(session.ledger.held),
        tier_bytes=tier.used_bytes if tier is not None else 0,
        num_modes=num_modes() + session.partial.is_on,  # then the gate gives the recorder its ops
        num_threads=threading.active_count(),
    )


@contextlib.contextmanager
def no_fault(_loop: Loop) -> Iterator[None]:
    """Nothing happens."""
    yield


def forced(decisions: str, swap_dir: Path | None = None, **options: Any) -> Scope:
    """Return a scope that forces one decision on every saved buffer; swapped bytes go to disk."""
    return lambda: MemoryBudget(UNLIMITED, Config(decisions=decisions, swap_dir=swap_dir, **options))


def pressed(swap_dir: Path | None = None, share: float = PRESSED_SHARE, **options: Any) -> Scope:
    """Return a scope whose budget is a share of what the loop itself takes, on top of what lives already."""
    budget_bytes = base_bytes() + int(share * needed_bytes())
    return lambda: MemoryBudget(budget_bytes, Config(swap_dir=swap_dir, **options))


def base_bytes() -> int:
    """Count what lives already, tensors of other tests included."""
    gc.collect()
    with MemoryBudget(UNLIMITED):
        session = current_session()
        assert session is not None
        return session.ledger.usage.total_bytes


@functools.cache
def needed_bytes() -> int:
    """Return what the loop takes at its highest, unpressed, on top of what lives already."""
    before_bytes = base_bytes()
    return run(no_fault, lambda: MemoryBudget(UNLIMITED)).peak_bytes - before_bytes


def unequal(plain: Report, ours: Report) -> list[str]:
    """Name everything that the plain run left otherwise."""
    found = [f"raised {ours.raised} where plain raised {plain.raised}"] if plain.raised != ours.raised else []
    for name in plain.observed.keys() | ours.observed.keys():
        expected, actual = plain.observed.get(name), ours.observed.get(name)
        if expected != actual:
            both = isinstance(expected, Bits) and isinstance(actual, Bits)
            found.append(f"{name}: {expected.differing_bytes(actual)}" if both else f"{name} differs")
    return sorted(found)


def not_back(ours: Report) -> list[str]:
    """Name every count that is not back where it was before the faulty step."""
    before = ours.levels[FAULTY_STEP - 1]
    found: list[str] = []
    for index, after in enumerate(ours.levels[FAULTY_STEP:], FAULTY_STEP):
        found += [
            f"after step {index}, {name} is {getattr(after, name)} and was {getattr(before, name)}"
            for name in Level.__dataclass_fields__
            if getattr(after, name) != getattr(before, name)
        ]
    if before.num_handles or before.tier_bytes:
        found.append(f"before the fault already: {before}")
    return found


def complaints(plain: Report, ours: Report) -> list[str]:
    """Name everything that is not as it should be after a fault."""
    found = unequal(plain, ours) + not_back(ours)
    budget = ours.budget
    if budget is not None and budget.summary().budget_bytes is not None:
        summary = budget.summary()
        if summary.peak_bytes > summary.budget_bytes:
            found.append(f"the peak of {summary.peak_bytes} bytes passed the budget of {summary.budget_bytes}")
    return found
