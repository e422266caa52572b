"""Finds, in the trace of a step, the moment that needs the most memory without a budget, and what is alive then."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from torchdelta.summary import PlainPeak
from torchdelta.trace.model import BEFORE_STEP, live_buffers, peak, storage_versions

if TYPE_CHECKING:
    from torchdelta.trace.model import Buffer, Op, Trace

__all__ = ["find_plain_peak"]

_GROUPS: Final = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer_state": "optimizer states",
    "input": "inputs",
    "constant": "others",
    "activation": "activations",
    "temporary": "temporaries",
}
_SAVED: Final = "saved tensors"
_WORKSPACE: Final = "inside the op"
_NUM_MODULES: Final = 3


def find_plain_peak(trace: Trace) -> PlainPeak:
    """Return the peak of a step. Takes time in proportion to its ops and buffers.

    Args:
        trace: A trace with at least one op. Its optimizer states count from the beginning: a first step makes them at
            its end, and the later ones, whose peak is asked for, begin with them.
    """
    firsts = {versions[0].id for versions in storage_versions(trace).values()}
    buffers = tuple(_from_beginning(buffer) if buffer.id in firsts else buffer for buffer in trace.buffers)
    trace = msgspec.structs.replace(trace, buffers=buffers)
    highest = peak(trace, with_workspace=True)
    op = trace.ops[highest.op]
    live = live_buffers(trace, op.index)
    writers = {buffer_id: one for one in trace.ops for buffer_id in one.writes}
    groups: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for buffer in live:
        is_saved = buffer.saved and buffer.kind in {"activation", "temporary"}
        groups[_SAVED if is_saved else _GROUPS[buffer.kind]] += buffer.size_bytes
        writer = writers.get(buffer.id)
        if is_saved and writer is not None and writer.module:
            modules[writer.module] += buffer.size_bytes
    if op.workspace_bytes:
        groups[_WORKSPACE] += op.workspace_bytes
    return PlainPeak(
        size_bytes=highest.size_bytes,
        op=op.name,
        module=op.module or _forward_module(op, writers),
        phase=op.phase,
        node=op.node,
        groups={name: size_bytes for name, size_bytes in groups.most_common() if size_bytes},
        largest_modules=dict(_by_layers(modules).most_common(_NUM_MODULES)),
    )


def _from_beginning(buffer: Buffer) -> Buffer:
    """Return the first version of a storage, alive before the step if it is an optimizer state."""
    if buffer.kind == "optimizer_state" and buffer.birth_op != BEFORE_STEP:
        return msgspec.structs.replace(buffer, birth_op=BEFORE_STEP)
    return buffer


def _by_layers(modules: Counter[str]) -> Counter[str]:
    """Return the bytes with those of the same module of all layers added up: "h.*.mlp" for "h.0.mlp" and "h.1.mlp"."""
    members: dict[str, list[str]] = {}
    for path in modules:
        members.setdefault(_in_any_layer(path), []).append(path)
    return Counter(
        {paths[0] if len(paths) == 1 else name: sum(modules[path] for path in paths) for name, paths in members.items()}
    )


def _in_any_layer(path: str) -> str:
    """Return a module's path with "*" for the number of its layer, if it lies in one."""
    parts = path.split(".")
    layer = next((position for position, part in enumerate(parts[:-1]) if part.isdecimal()), None)
    return path if layer is None else ".".join([*parts[:layer], "*", *parts[layer + 1 :]])


def _forward_module(op: Op, writers: dict[int, Op]) -> str:
    """Return the module whose forward made something that an op of backward reads; empty if there is none."""
    made = (writers.get(buffer_id) for buffer_id in op.reads)
    return next((writer.module for writer in made if writer is not None and writer.module), "")
