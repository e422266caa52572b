"""Collectives: what their schemas do not say.

The ops of `c10d` write tensors in place without a write annotation, and go on writing after they have returned, until
somebody waits for their `Work`. They are no aten ops, so they are never recomputed; what they have written is no longer
what the op before them made, and is not copied away while it may still be under way.
"""

from __future__ import annotations

from typing import Any, Final

# By namespace and op: the names of the arguments that an op writes although its schema does not say so. Names that
# start with "output" are written wherever they occur.
_WRITTEN: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "c10d": {
        "allreduce_": ("tensors",),
        "allreduce_coalesced_": ("tensors",),
        "broadcast_": ("tensors",),
        "recv_": ("tensors",),
        "recv_any_source_": ("tensors",),
        "reduce_": ("tensors",),
    },
    "_c10d_functional": {"irecv": ("tensor",), "batch_p2p_ops": ("tensors",)},
    "fsdp": {"all_gather_copy_in": ("all_gather_output",)},
}
_PASS_ON: Final = frozenset({"wait_tensor", "_wrap_tensor_autograd"})


def is_collective(namespace: str) -> bool:
    """Say whether the ops of a namespace talk to other processes, or prepare for it."""
    return namespace in _WRITTEN


def passes_on(namespace: str, base: str) -> bool:
    """Say whether an op gives back the very tensor that it took."""
    return namespace == "_c10d_functional" and base in _PASS_ON


def is_written(namespace: str, base: str, argument: Any) -> bool:
    """Say whether a collective writes an argument of its schema."""
    if namespace not in _WRITTEN or "Tensor" not in str(argument.type):
        return False
    name: str = argument.name
    return (namespace == "c10d" and name.startswith("output")) or name in _WRITTEN[namespace].get(base, ())


def may_be_under_way(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Say whether a collective that has returned may still be writing when the next op runs.

    Without `async_op`, its caller waits at once.
    """
    if func.namespace != "c10d":
        return func.namespace == "_c10d_functional"  # until `wait_tensor`
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "async_op":
            if kwargs and "async_op" in kwargs:
                return bool(kwargs["async_op"])
            return bool(args[position]) if position < len(args) else bool(argument.default_value)
    return True
