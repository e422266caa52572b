"""How a buffer leaves the device."""

from __future__ import annotations

import enum


class Action(enum.Enum):
    """The two ways out; KEEP is not leaving. The values are the words of `Config(decisions=...)`."""

    DROP = "recompute"
    SWAP = "swap"
