"""Small steps of a whole session, for the explorer: a chain of saved tensors that all leave and come back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch

from tests.racecheck.explore import SIZE, measure_nothing
from tests.racecheck.paths import DEVICE
from torchdelta import Config, MemoryBudget
from torchdelta.runtime.device.op_timer import HostTimer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta import SavedBuffer

ACTIONS: Final = {"s": "swap", "r": "recompute", "k": "keep"}


def chain(decisions: str) -> Callable[[], list[torch.Tensor]]:
    """Return a step that saves as many tensors as there are decisions.

    Args:
        decisions: For each tensor "s" (swap), "r" (recompute) or "k" (keep).
    """
    device = torch.device(DEVICE, 0)

    def decide(buffer: SavedBuffer) -> str:
        return ACTIONS[decisions[buffer.index]] if buffer.index < len(decisions) else "keep"

    def run() -> list[torch.Tensor]:
        x = torch.arange(SIZE, device=device, dtype=torch.float32).requires_grad_()
        with (
            mock.patch("torchdelta.runtime.device.accelerator.EventTimer", return_value=HostTimer(lambda: 0.0)),
            mock.patch("torchdelta.runtime.tiers.pinned.PinnedTier", _silent_tier()),
            MemoryBudget("1TiB", Config(decisions=decide, tier="memory", host_budget=1 << 20)),
        ):
            hidden = x * 1
            for _ in decisions:
                hidden = hidden.sin()  # saves its input
            hidden.sum().backward()
        assert x.grad is not None
        return [x.grad]

    return run


def _silent_tier() -> Any:
    from torchdelta.runtime.tiers.pinned import PinnedTier

    def opened(*args: Any, **kwargs: Any) -> Any:
        tier = PinnedTier(*args, **kwargs)
        measure_nothing(tier)
        return tier

    return opened
