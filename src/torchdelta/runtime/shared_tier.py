"""Opens the tier of a session, with this process's share of the host and disk budgets of the machine."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from torchdelta.host import num_processes_here, share_bytes
from torchdelta.runtime.tiers import open_tier
from torchdelta.runtime.tiers.scratch import named_directory
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from torchdelta.config import Config
    from torchdelta.runtime.tiers import Tier

__all__ = ["shared_tier_opener"]

_logger = logging.getLogger("torchdelta")


def shared_tier_opener(config: Config, device: torch.device) -> Callable[[], Tier]:
    """Return what opens the tier that a configuration names. The caller closes it.

    A relative TORCHDELTA_SWAP_DIR begins where the program is now: it may be elsewhere when something is first swapped.
    """
    return partial(_open, config, device, named_directory(config.swap_dir))


def _open(config: Config, device: torch.device, swap_dir: Path | None) -> Tier:
    _log_shares(config)
    return open_tier(
        config.tier,
        device=device,
        swap_dir=swap_dir,
        host_budget_bytes=share_bytes(config.host_budget_bytes),
        disk_budget_bytes=share_bytes(config.disk_budget_bytes),
        checksum=config.checksum,
    )


def _log_shares(config: Config) -> None:
    """Log what this process gets of the host and the disk budget, if it shares them with others of this machine."""
    sizes_bytes = {"host_budget": config.host_budget_bytes, "disk_budget": config.disk_budget_bytes}
    shares = [
        f"{format_bytes(share)} of the {name} of {format_bytes(size_bytes)}"
        for name, size_bytes in sizes_bytes.items()
        if size_bytes is not None and (share := share_bytes(size_bytes)) is not None
    ]
    if num_processes_here() > 1 and shares:
        _logger.info(
            "this process gets %s: an equal share for each of %d training processes of this machine",
            " and ".join(shares),
            num_processes_here(),
        )
