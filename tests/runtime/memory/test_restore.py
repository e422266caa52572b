"""What is brought back ahead of its use, and what is kept of content that is overwritten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.runtime.programs import UNLIMITED, mlp, running, same_bits, train
from torchdelta.errors import TierIOError
from torchdelta.runtime.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.session import Session


def out_of_memory() -> BaseException:
    """Return the error of an allocator."""
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def fail_ahead(session: Session, patch: pytest.MonkeyPatch, error: Callable[[], BaseException]) -> list[str]:
    """Let every allocation, or read of the tier, for what is not needed yet fail. Return the failures."""
    restorer, failures, is_ahead = session.restorer, list[str](), [False]
    prefetch, new_storage, read = restorer.prefetch, restorer.new_storage, MemoryTier.read

    def failing(*args: Any) -> None:
        is_ahead[0] = True
        try:
            prefetch(*args)
        finally:
            is_ahead[0] = False

    def fail_or(run: Callable[..., Any], *args: Any) -> Any:
        if is_ahead[0] and isinstance(error(), TierIOError) == (run is read):
            failures.append(run.__name__)
            raise error()
        return run(*args)

    patch.setattr(restorer, "prefetch", failing)
    patch.setattr(restorer, "new_storage", lambda *args: fail_or(new_storage, *args))
    patch.setattr(MemoryTier, "read", lambda *args: fail_or(read, *args))
    return failures


@pytest.mark.parametrize("error", [out_of_memory, lambda: TierIOError("the disk is gone")], ids=["device", "tier"])
def test_a_prefetch_that_fails_is_skipped(error: Callable[[], BaseException]) -> None:
    """It is optional: the buffer is brought back when it is needed."""
    torch.manual_seed(0)
    model, x = mlp(64, 4), torch.randn(256, 64)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = train(model, x)
    model.load_state_dict(state)
    with running(UNLIMITED) as (budget, session), pytest.MonkeyPatch.context() as patch:
        failures = fail_ahead(session, patch, error)
        loss = model(x).square().mean()
        session.room.evict_all()
        loss.backward()
        del loss
        assert failures
        for parameter in model.parameters():
            parameter.grad = None
        assert same_bits(expected, train(model, x))
    assert budget.summary().swapped_in_bytes > 0
