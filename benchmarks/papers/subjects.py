"""The models of the papers on their machines: traced without memory, priced at any batch."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from benchmarks import models
from torchdelta.machine.catalog import find
from torchdelta.machine.roofline import price
from torchdelta.trace.model import peak
from torchdelta.trace.symbolic import scale, trace_step

if TYPE_CHECKING:
    from torchdelta.machine.model import Machine
    from torchdelta.trace.model import Trace
    from torchdelta.trace.symbolic import OptimizerName

_TRACED = (2, 4)
"""The two batch sizes that are traced; never 1, at which op lists differ."""


def profile(name: str, *, by_kind: bool = False) -> Machine:
    """Return the machine of the tables by its name; another one of the catalog with all kernels priced alike.

    With `by_kind` it is the catalog's, which prices each kind of kernel as `torchdelta fit` does.
    """
    if by_kind:
        return find(name)
    return PROFILES.get(name) or replace(find(name), kernels="")


def _profile(name: str, *, float32_tflops: float, memory_gb_per_s: float, link_gb_per_s: float) -> Machine:
    """Return a machine of the catalog with the rates that these tables were made with: all kernels alike."""
    return replace(
        find(name),
        kernels="",
        flops_per_s={"float32": float32_tflops * 1e12},
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        host_out_bytes_per_s=link_gb_per_s * 1e9,
        host_in_bytes_per_s=link_gb_per_s * 1e9,
        both_ways_factor=1.0,
    )


PROFILES = {
    machine.name: machine
    for machine in (
        # 0.7 of 8.1 and 15.7 TFLOP/s, and half of 156 (TF32); 0.75 of 320 and 900 GB/s, and 0.8 of 2,000.
        _profile("t4", float32_tflops=8.1 * 0.7, memory_gb_per_s=320 * 0.75, link_gb_per_s=12),
        _profile("v100-32g", float32_tflops=15.7 * 0.7, memory_gb_per_s=900 * 0.75, link_gb_per_s=12),
        _profile("a100-80g", float32_tflops=156 * 0.5, memory_gb_per_s=2000 * 0.8, link_gb_per_s=25),
    )
}
"""The machines of the tables: the planner findings' profiles, on which all planners were compared from the first.

The tables compare planners with each other. The catalog's machines price kernels by their kind since: with `--by-kind`
the tables are made on those.
"""

_VISION = ("resnet50", "resnet101", "vgg16", "alexnet")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a machine."""

    model: str
    machine_name: str
    by_kind: bool = False

    @property
    def name(self) -> str:
        """As it stands in tables and on the command line."""
        return f"{self.model}@{self.machine_name}"

    @property
    def machine(self) -> Machine:
        """Its profile."""
        return profile(self.machine_name, by_kind=self.by_kind)


CASES = {
    case.name: case
    for case in (
        Case(model="resnet50", machine_name="v100-32g"),
        Case(model="resnet50", machine_name="a100-80g"),
        Case(model="resnet101", machine_name="v100-32g"),
        Case(model="resnet101", machine_name="a100-80g"),
        Case(model="bert_large", machine_name="v100-32g"),
        Case(model="bert_large", machine_name="a100-80g"),
        Case(model="gpt2_large", machine_name="a100-80g"),
        Case(model="gpt2_xl", machine_name="a100-80g"),
    )
}


@cache
def traced(model: str, batch_size: int, *, with_optimizer: bool) -> Trace:
    """Return the trace of a model's step at one of the two batch sizes.

    Without the optimizer means plain SGD, which has no states; with it SGD with momentum for vision models, AdamW else.
    """
    optimizer: OptimizerName = "sgd"
    if with_optimizer:
        optimizer = "sgd-momentum" if model in _VISION else "adamw"
    return trace_step(getattr(models, model), batch_size=batch_size, optimizer=optimizer, comment=model)


def step(model: str, machine: Machine, batch_size: int, *, with_optimizer: bool) -> Trace:
    """Return a model's step at any batch size, priced for a machine."""
    first, second = (traced(model, size, with_optimizer=with_optimizer) for size in _TRACED)
    return price(scale(first, second, batch_size), machine)


def largest_plain_batch(model: str, machine: Machine, *, with_optimizer: bool) -> int:
    """Return the largest batch that fits the machine's memory when nothing leaves; 0 if none does."""

    def fits(batch_size: int) -> bool:
        trace = step(model, machine, batch_size, with_optimizer=with_optimizer)
        return peak(trace, with_workspace=True).size_bytes <= machine.memory_bytes

    if not fits(1):
        return 0
    good, bad = 1, 2
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
