"""Reactive policies: which buffers are evicted, and how, when room is needed. One file per policy, registered here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torchdelta.runtime.policies.default import TorchdeltaPolicy
from torchdelta.runtime.policies.delta_2022 import Delta2022
from torchdelta.runtime.policies.dtr import Dtr
from torchdelta.runtime.policies.largest_first import LargestFirst
from torchdelta.runtime.policies.lru import LeastRecentlyUsed
from torchdelta.runtime.policies.single_action import RecomputeOnly, SwapOnly

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.policies.base import Policy

REGISTRY: Final[dict[str, Callable[[], Policy]]] = {
    "torchdelta": TorchdeltaPolicy,
    "delta-2022": Delta2022,
    "dtr": Dtr,
    "largest-first": LargestFirst,
    "lru": LeastRecentlyUsed,
    "recompute-only": RecomputeOnly,
    "swap-only": SwapOnly,
}
