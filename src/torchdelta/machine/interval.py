"""How far a predicted time may be off: what published steps of its kind were off, and when it is an extrapolation.

[Note: where the intervals are from]
Each of 208 published steps was predicted by shares that were fitted without its model (`docs/fidelity.md`): of these
errors, eight in ten lie inside an interval of `SEEN`, by what most of the step's matrix time is spent on (21 of the
steps are left aside: their library lacked kernels that today's has). Where a step
is unlike all of them (another GPU, kernels that none of them has, launches that take most of it) the prediction is an
extrapolation: it says so, and gets the interval of `UNSEEN`, in which nine in ten of the errors lie when all steps on
the same GPU, or all of the same source, are left out of the fit. What a plan adds, waiting and recomputing, is taken to
be off by the same factor.
Only machines whose kernels are priced by kind have an interval.
"""

import math
from typing import Final

import msgspec

from torchdelta.machine.kernels import CUDA_SHARES, Family, family_of
from torchdelta.machine.model import Machine
from torchdelta.trace.model import Trace

__all__ = ["SEEN", "SEEN_MACHINES", "UNSEEN", "Interval", "interval_of", "kind_of", "range_text"]

SEEN: Final[dict[Family, tuple[float, float]]] = {"convolution": (0.8, 1.19), "product": (0.93, 1.16)}
"""Published over predicted: the first and the last decile, by the kind of the step."""

UNSEEN: Final[dict[Family, tuple[float, float]]] = {"convolution": (0.75, 1.36), "product": (0.81, 1.16)}
"""The same where all steps of a GPU or of a source are left out: the twentieth and the nineteen twentieths."""

SEEN_MACHINES: Final = ("v100-16g", "v100-32g", "a100-40g", "a100-80g", "h100-80g", "rtx3090", "rtx4090", "rtx5090")
"""On which published steps were run."""

_MOST_LAUNCHES: Final = 0.25
"""Of a step's time; one published step has more, 0.42, and the next 0.24."""
_MOST_ATTENTION: Final = 0.05


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """What a predicted time may be.

    Attributes:
        low: Times the prediction: the lower end.
        high: Times the prediction: the upper end.
        extrapolates: Why the prediction is outside of what was compared, one reason an item; empty if it is inside.
    """

    low: float
    high: float
    extrapolates: tuple[str, ...] = ()


def interval_of(step: Trace, machine: Machine) -> Interval | None:
    """Return the interval of a step's predicted time, None for a machine without one."""
    if not machine.kernels:
        return None
    reasons = tuple(_reasons(step, machine))
    low, high = (UNSEEN if reasons else SEEN)[kind_of(step)]
    return Interval(low=low, high=high, extrapolates=reasons)


def range_text(low_s: float, high_s: float) -> str:
    """Return the ends of an interval in milliseconds, to three digits: "350 to 480"."""
    return f"{_three_digits(1e3 * low_s)} to {_three_digits(1e3 * high_s)}"


def _three_digits(value: float) -> str:
    if value <= 0:
        return "0"
    places = 2 - math.floor(math.log10(value))
    return f"{round(value, places):.{max(places, 0)}f}"


def kind_of(step: Trace) -> Family:
    """Return "convolution" or "product": what more of a step's matrix time is spent on."""
    times_s = _family_times_s(step)
    convolutions_s = times_s["convolution"]
    return "convolution" if convolutions_s > times_s["product"] + times_s["attention"] else "product"


def _family_times_s(step: Trace) -> dict[Family, float]:
    times_s: dict[Family, float] = {"convolution": 0.0, "product": 0.0, "attention": 0.0, "other": 0.0}
    for op in step.ops:
        times_s[family_of(op)] += op.time_s
    return times_s


def _reasons(step: Trace, machine: Machine) -> list[str]:
    reasons: list[str] = []
    if machine.name not in SEEN_MACHINES:
        reasons.append(f"no published step ran on {machine.name}")
    total_s = sum(op.time_s for op in step.ops)
    num_timed = sum(op.time_s > 0 for op in step.ops)
    launches = num_timed * CUDA_SHARES.launch_s / total_s if total_s else 1.0
    if launches > _MOST_LAUNCHES:
        reasons.append(
            f"launches take {launches:.0%} of the time, in all published steps but one less than {_MOST_LAUNCHES:.0%}"
        )
    attention_s = sum(op.time_s for op in step.ops if op.phase == "backward" and family_of(op) == "attention")
    if attention_s > _MOST_ATTENTION * total_s:
        reasons.append("no published step trains with fused attention kernels")
    unknown = sorted({op.dtype for op in step.ops if op.flops} - {"float32", "float16", "bfloat16", ""})
    if unknown:
        reasons.append(f"no published step multiplies {' or '.join(unknown)}")
    without_sizes_s = sum(op.time_s for op in step.ops if op.flops and op.product is None)
    if without_sizes_s > _MOST_ATTENTION * total_s:
        reasons.append("the trace has no sizes of products: it is of an older format, or was not made symbolically")
    return reasons
