"""Fits the shares of the kernel model to published times, and predicts each from a fit that has not seen it.

The least sum of squared errors of the logarithms, each weighted as known to 12 % (large ones count linearly), drawn to
a first guess of each share: the physics of the kernel, with how far it may be off. Everything here is deterministic.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from scipy.optimize import least_squares

from torchdelta.machine.kernels import KernelShares, terms_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from torchdelta.machine.model import Machine
    from torchdelta.trace.model import Op

__all__ = ["PRIORS", "Dataset", "Timed"]

_ERROR: Final = 0.12
_NAMES: Final = tuple(field.name for field in msgspec.structs.fields(KernelShares))

PRIORS: Final[dict[str, tuple[float, float]]] = {
    "stream": (1.0, 0.2),  # the machine's rate is that of such kernels
    "norm": (1.0, 0.2),
    "norm_channels_last": (1.0, 0.2),
    "softmax": (1.0, 0.2),
    "matrix": (0.95, 0.1),  # the machine's rate is that of large square products
    "stem": (0.4, 0.5),  # 3 channels of 8
    "depthwise": (0.1, 0.8),
    "fallback": (0.1, 0.8),  # on the same units
    "winograd": (1.2, 0.3),  # at most 2.25
    "backward": (0.95, 0.15),
    "fill_inner": (64.0, 0.5),  # two or three steps of a tile's loop
    "fill_narrow": (24.0, 0.5),  # half of a tile of 64, less what smaller tiles save
    "fill_grouped": (32.0, 0.7),
    "copies": (1.0, 0.4),  # read once, written once
    "copies_pointwise": (0.7, 0.4),
    "launch_s": (5e-6, 0.3),  # eager torch: 5 to 10 us an op
}
"""The first guess of each share, and how far it may be off: the standard deviation of its logarithm."""


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """A published time, and the ops that it is the time of.

    Attributes:
        id: Of the figure.
        published_s: Seconds.
        machine: Where it was measured.
        ops: Each op, the bytes that it moves, and how many of it there are.
        groups: What it is left out with: its model, its GPU, its source.
        is_step: Whether it is a step; otherwise it is a part of one, fitted and never left out alone.
    """

    id: str
    published_s: float
    machine: Machine
    ops: tuple[tuple[Op, int, int], ...]
    groups: dict[str, Hashable]
    is_step: bool


class Dataset:
    """All published times as arrays: one row for each op."""

    def __init__(self, timed: Sequence[Timed]) -> None:
        self.timed = tuple(timed)
        self.of_old_kernels: set[str] = set()  # ids of what no machine of the catalog would take so long for
        rows: list[tuple[float, ...]] = []
        starts: list[int] = []
        for one in timed:
            starts.append(len(rows))
            for op, moved_bytes, count in one.ops:
                terms = terms_of(op, moved_bytes, one.machine)
                if terms.matrix_share == "fallback":
                    self.of_old_kernels.add(one.id)
                rows.append(
                    (
                        count,
                        terms.moved_bytes / one.machine.memory_bytes_per_s,
                        _NAMES.index(terms.memory_share),
                        terms.flops / terms.flops_per_s,
                        _NAMES.index(terms.matrix_share),
                        terms.inner or math.inf,
                        terms.narrow if terms.inner else math.inf,
                        _NAMES.index(terms.narrow_share),
                        terms.is_winograd,
                        terms.is_backward,
                        terms.copied_bytes / one.machine.memory_bytes_per_s,
                        _NAMES.index(terms.copies_share),
                    )
                )
        table = np.array(rows, float).T
        self._counts, self._memory_s, memory, self._matrix_s, matrix, self._inner, self._narrow, narrow = table[:8]
        self._winograd, self._backward, self._copied_s, copies = table[8:]
        self._memory, self._matrix = memory.astype(int), matrix.astype(int)
        self._of_narrow, self._of_copies = narrow.astype(int), copies.astype(int)
        self._starts = np.array(starts)
        self._published = np.log([one.published_s for one in timed])

    def predict(self, shares: KernelShares) -> Any:
        """Return the seconds of each published time, as `kernel_time_s` would add them up."""
        p = np.array(msgspec.structs.astuple(shares))
        named = dict(zip(_NAMES, p, strict=True))
        memory_s = self._memory_s / p[self._memory]
        fill = 1.0 + named["fill_inner"] / self._inner + p[self._of_narrow] / self._narrow
        share = p[self._matrix] / fill
        share = share * np.where(self._winograd > 0, named["winograd"], 1.0)
        share = share * np.where(self._backward > 0, named["backward"], 1.0)
        time_s = np.maximum(memory_s, self._matrix_s / share) + p[self._of_copies] * self._copied_s
        return np.add.reduceat((time_s + named["launch_s"]) * self._counts, self._starts)

    def errors(self, shares: KernelShares) -> Any:
        """Return the logarithm of predicted over published, of each."""
        return np.log(self.predict(shares)) - self._published

    def fit(self, is_used: Iterable[bool], start: KernelShares | None = None) -> KernelShares:
        """Return the shares that fit some of the published times best."""
        weights = np.array(list(is_used), float) / _ERROR
        guess = np.log([PRIORS[name][0] for name in _NAMES])
        spread = np.array([PRIORS[name][1] for name in _NAMES])

        def residuals(x: Any) -> Any:
            shares = _shares(x)
            return np.concatenate([self.errors(shares) * weights, (x - guess) / spread])

        first = guess if start is None else np.log(msgspec.structs.astuple(start))
        return _shares(least_squares(residuals, first, loss="soft_l1", max_nfev=40).x)

    def left_out(self, group: str, start: KernelShares) -> dict[str, float]:
        """Return the error of each step under a fit that saw nothing of its group, by the figure's id."""
        found: dict[str, float] = {}
        steps = [one for one in self.timed if one.is_step]
        for name in dict.fromkeys(one.groups[group] for one in steps):
            shares = self.fit((one.groups.get(group) != name for one in self.timed), start)
            errors = self.errors(shares)
            for one, error in zip(self.timed, errors, strict=True):
                if one.is_step and one.groups[group] == name:
                    found[one.id] = float(error)
        return found


def _shares(x: Any) -> KernelShares:
    return KernelShares(**dict(zip(_NAMES, (float(value) for value in np.exp(x)), strict=True)))
