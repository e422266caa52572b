"""The tape: which op made which buffer, from what, and how to run it again.

This is the narrow place where a native recorder can take over: the rest of the runtime knows ops only through
`capture`, `sources` and `run_again`. An entry holds its arguments by value, with every tensor replaced by a
`View` of a buffer, so the tape keeps no storage alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch import set_grad_enabled
from torchdelta._torch_device import default_generator_of, numeric_environment, set_numeric_environment
from torchdelta.runtime import faults
from torchdelta.runtime.buffer import Buffer, View

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterator

    from torchdelta.aten.facts import OpFacts


class Scratch:
    """In place of batch-norm statistics.

    A tensor of this shape with any content (in training the outputs do not depend on it).
    """

    __slots__ = ("device", "dtype", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device


class Fresh:
    """In place of an argument that the op overwrites whole: a new storage of this size, seen through this view."""

    __slots__ = ("device", "dtype", "offset", "shape", "size_bytes", "stride")

    def __init__(self, tensor: torch.Tensor, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = tensor.dtype
        self.device = tensor.device


class OpEntry:
    """One recorded op."""

    __slots__ = (
        "__weakref__",
        "args",
        "environment",
        "facts",
        "func",
        "grad_enabled",
        "kwargs",
        "output_bytes",
        "outputs",
        "random_state",
        "time_s",
        "workspace_bytes",
    )

    def __init__(self, func: Any, facts: OpFacts, args: list[Any], kwargs: dict[str, Any] | None) -> None:
        self.func = func
        self.facts = facts
        self.args = args
        self.kwargs = kwargs
        self.grad_enabled = torch.is_grad_enabled()
        self.environment = numeric_environment()
        self.time_s = 0.0
        self.output_bytes = 0  # of all outputs, of those too that are dead when a replay makes them again
        self.workspace_bytes = 0  # what it allocates inside itself
        self.random_state: tuple[torch.Generator, torch.Tensor] | None = None
        self.outputs: list[weakref.ref[Buffer]] = []


def sources(entry: OpEntry) -> Iterator[Buffer]:
    """Yield the buffers that an op reads, with repetitions."""
    for argument in entry.args:
        if argument.__class__ is View:
            yield argument.buffer
        elif argument.__class__ is list:
            yield from (item.buffer for item in argument if item.__class__ is View)
    if entry.kwargs:
        yield from (argument.buffer for argument in entry.kwargs.values() if argument.__class__ is View)


def written_sources(entry: OpEntry) -> set[int]:
    """Return the ids of the buffers whose storages an op overwrites."""
    written: set[int] = set()
    for position in entry.facts.written_positions:
        argument = entry.args[position] if position < len(entry.args) else None
        if argument.__class__ is View:
            written.add(id(argument.buffer))  # pyright: ignore[reportOptionalMemberAccess]
        elif argument.__class__ is list:
            written.update(id(item.buffer) for item in argument if item.__class__ is View)  # pyright: ignore[reportOptionalIterable]
    for keyword in entry.facts.written_keywords:
        argument = entry.kwargs.get(keyword) if entry.kwargs else None
        if argument.__class__ is View:
            written.add(id(argument.buffer))  # pyright: ignore[reportOptionalMemberAccess]
    return written


def capture(value: Any, view_of: Callable[[torch.Tensor], View]) -> Any:
    """Return an op argument with every tensor in it replaced by a view of its buffer.

    Raises NotImplementedError for tensors without a storage.
    """
    if isinstance(value, torch.Tensor):
        return view_of(value)
    if value.__class__ is list or value.__class__ is tuple:
        return (
            [capture(item, view_of) for item in value]
            if any(isinstance(item, torch.Tensor) for item in value)
            else value
        )
    return value


def generator_of(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> torch.Generator | None:
    """Return the generator that a random op will draw from, or None for an op that draws nothing."""
    if not facts.is_random:
        return None
    if kwargs and isinstance(kwargs.get("generator"), torch.Generator):
        return kwargs["generator"]
    for argument in args:
        if isinstance(argument, torch.Generator):
            return argument
    # Where the output goes is where the numbers are drawn: a `device` is stronger than what the arguments are on.
    if kwargs and kwargs.get("device") is not None:
        return default_generator_of(torch.device(kwargs["device"]))
    for argument in args:
        if isinstance(argument, torch.Tensor) and argument.device.type != "cpu":
            return default_generator_of(argument.device)
    return torch.default_generator


def run_again(entry: OpEntry, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op again on rebuilt arguments, under the grad mode, numeric settings and random state of the first time.

    Call it inside `Quietly`.
    """
    current = numeric_environment()
    if current != entry.environment:
        set_numeric_environment(entry.environment)
    set_grad_enabled(entry.grad_enabled)
    try:
        if entry.random_state is None or faults.is_disabled("rng-replay"):
            return entry.func(*args, **kwargs)
        generator, state = entry.random_state
        now = generator.get_state()
        generator.set_state(state)
        try:
            return entry.func(*args, **kwargs)
        finally:
            generator.set_state(now)
    finally:
        set_grad_enabled(False)
        if current != entry.environment:
            set_numeric_environment(current)
