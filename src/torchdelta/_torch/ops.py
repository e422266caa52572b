"""Ops as the dispatcher knows them. See `__init__.py` for the rules."""

# torch's stubs do not have all that is here.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import torch

from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.modes import autocast_inside, is_autocast_outside, pop_mode, push_mode, resolving_views, top_mode

if TYPE_CHECKING:
    from collections.abc import Callable

OpOverload = torch._ops.OpOverload
HigherOrderOperator = torch._ops.HigherOrderOperator  # calls functions of the program: `torch.cond`
# The schema of an overload: its name, its arguments and what it returns, with what they alias and write.
schema_of: Callable[[Any], Any] = attrgetter("_schema")


def returns_tensors(func: Any) -> bool:
    """Return whether all that an overload returns are tensors, and not lists of them."""
    return all(isinstance(returned.type, torch.TensorType) for returned in schema_of(func).returns)


def overload_of(name: str, overload: str) -> Any:
    """Return the overload with a qualified name ("aten::add") and an overload name ("" for the default one)."""
    namespace, _, base = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def let_higher_order_pass(key_name: str) -> None:
    """Make ops that call functions of the program pass a dispatch key, as if they had no kernel for it.

    Stock torch raises where it finds none. The ops that they run are dispatched to the key. Repeated calls do nothing.
    """
    key: Any = torch._C._parse_dispatch_key(key_name)
    always = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    if key not in always:
        always.append(key)  # for those that are made later
        for op in list(torch._ops._higher_order_ops.values()):
            op.fallthrough(key)


class Guarded(Protocol):
    """What `execute` has to know of an op: whether something that a mode turns off must act inside it."""

    casts_inside: bool
    conjugates_inside: bool


def _is_autocast_inside(device_type: str) -> bool:
    """Return whether autocast would act inside an op if there were no mode.

    On CUDA it does not in forward: autocast itself calls `bilinear`, with autocast off, and so the op that it is made
    of. In backward the engine calls that op.
    """
    return is_autocast_outside(device_type) and (device_type == "cpu" or graph_task_id() != -1)


def execute(func: Any, facts: Guarded, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run an op for real, from inside a dispatch mode: by the C function below `OpOverload.__call__`."""
    if facts.casts_inside and _is_autocast_inside(args[0].device.type):
        with autocast_inside(args[0].device.type):
            return func._op(*args, **(kwargs or {}))
    if facts.conjugates_inside:
        with resolving_views():
            return func._op(*args, **(kwargs or {}))
    return func._op(*args, **kwargs) if kwargs else func._op(*args)


def is_composite(func: Any) -> bool:
    """Return whether an overload has a kernel that only calls other ops, which autograd differentiates in its place."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def decompose(func: Any, mode: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run a composite op from inside a dispatch mode as the ops that it calls, with that mode on for these."""
    push_mode(mode)
    try:
        return func.decompose(*args, **(kwargs or {}))
    finally:
        if top_mode() is mode:
            pop_mode()
