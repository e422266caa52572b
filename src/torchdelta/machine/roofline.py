"""The time of each op on a machine: the longer of its arithmetic and its memory traffic (roofline, Williams 2009).

On a machine whose `kernels` are known each kind of kernel reaches another share of the two rates, and each op has a
fixed time: see [Note: the kernel model] in kernels.py. On any other it is the plain roofline:

[Note: what is priced]
`time_s = max(flops / rate of its dtype, moved bytes / rate of the memory)`, at least `op_latency_s`. Only products of
matrices, convolutions and attention have FLOPs: everything else is bound by memory. Rates are the machine's, which are
already what large ops reach. Where a trace does not know what an op moved, it is the sizes of the buffers that it reads
and writes, each in full. Ops that only allocate take no time. Not modelled: caches, small ops below the launch time
(unless `op_latency_s` says so), kernels that read twice, and copies on the link that slow the memory down.
"""

from msgspec.structs import replace

from torchdelta.machine.kernels import kernel_time_s
from torchdelta.machine.model import Machine, matrix_flops_per_s
from torchdelta.trace.model import Op, Trace

__all__ = ["op_bytes", "op_time_s", "price"]


def price(trace: Trace, machine: Machine, *, tf32: bool = True) -> Trace:
    """Return the trace with the time of each op on a machine, in place of whatever times it had.

    Args:
        trace: A valid trace, with FLOPs and moved bytes as the symbolic tracer writes them.
        machine: Where it would run.
        tf32: Whether float32 products run on tensor cores where there are any.
    """
    return replace(
        trace, ops=tuple(replace(op, time_s=op_time_s(op, op_bytes(op, trace), machine, tf32=tf32)) for op in trace.ops)
    )


def op_time_s(op: Op, moved_bytes: int, machine: Machine, *, tf32: bool = True) -> float:
    """Return the seconds that an op takes, given what it moves. See [Note: what is priced]."""
    if not moved_bytes and not op.flops:
        return 0.0
    if machine.kernels:
        return max(kernel_time_s(op, moved_bytes, machine, tf32=tf32), machine.op_latency_s)
    time_s = moved_bytes / machine.memory_bytes_per_s
    if op.flops:
        time_s = max(time_s, op.flops / matrix_flops_per_s(machine, op.dtype or "float32", tf32=tf32))
    return max(time_s, machine.op_latency_s)


def op_bytes(op: Op, trace: Trace) -> int:
    """Return the bytes that an op moves: as recorded, else the sizes of what it reads and writes."""
    if op.moved_bytes or _only_allocates(op):
        return op.moved_bytes
    return sum(trace.buffers[id_].size_bytes for id_ in (*op.reads, *op.writes))


def _only_allocates(op: Op) -> bool:
    return op.name.startswith(("aten.empty", "aten.new_empty"))
