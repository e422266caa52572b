"""How a buffer is evicted."""

from __future__ import annotations

import enum


class Action(enum.Enum):
    """The two ways to evict a buffer. The values are the words of `Config(decisions=...)`."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
