"""Reactive policies: who leaves, and how, when room is needed. One file a policy, registered by name here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torchdelta.runtime.react.default import TorchdeltaPolicy
from torchdelta.runtime.react.delta_2022 import Delta2022
from torchdelta.runtime.react.dtr import Dtr
from torchdelta.runtime.react.largest_first import LargestFirst
from torchdelta.runtime.react.lru import LeastRecentlyUsed
from torchdelta.runtime.react.single_action import RecomputeOnly, SwapOnly

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.react.base import Policy

REGISTRY: Final[dict[str, Callable[[], Policy]]] = {
    "torchdelta": TorchdeltaPolicy,
    "delta-2022": Delta2022,
    "dtr": Dtr,
    "largest-first": LargestFirst,
    "lru": LeastRecentlyUsed,
    "recompute-only": RecomputeOnly,
    "swap-only": SwapOnly,
}
