"""Collectives: facts that their schemas leave out.

The ops of `c10d` write tensors in place without a write annotation, and continue to write after they have returned,
until the caller waits for their `Work`. They are not aten ops, so they are never replayed. A tensor that they write has
a new content, which is not copied to a tier while the collective may still be running.
"""

from __future__ import annotations

from typing import Any, Final

from torchdelta._torch.ops import schema_of

# By namespace and op: the arguments that an op writes without a write annotation in its schema. In `c10d`, arguments
# whose names start with "output" are always written.
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
    """Return whether the ops of a namespace communicate with other processes, or prepare for it."""
    return namespace in _WRITTEN


def passes_on(namespace: str, base: str) -> bool:
    """Return whether an op returns its argument itself."""
    return namespace == "_c10d_functional" and base in _PASS_ON


def is_written(namespace: str, base: str, argument: Any) -> bool:
    """Return whether a collective writes an argument of its schema."""
    if namespace not in _WRITTEN or "Tensor" not in str(argument.type):
        return False
    name: str = argument.name
    return (namespace == "c10d" and name.startswith("output")) or name in _WRITTEN[namespace].get(base, ())


def may_be_under_way(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Return whether a collective that has returned may still be writing when the next op runs.

    Without `async_op`, its caller waits immediately.
    """
    if func.namespace != "c10d":
        return func.namespace == "_c10d_functional"  # until `wait_tensor`
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name == "async_op":
            if kwargs and "async_op" in kwargs:
                return bool(kwargs["async_op"])
            return bool(args[position]) if position < len(args) else bool(argument.default_value)
    return True
