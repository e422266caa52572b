"""The tape: how an op's arguments are captured, which buffers it reads, and how it is replayed.

The rest of the runtime uses recorded ops only through `capture`, `sources` and `replay_op`. An entry stores its
arguments by value, with every tensor replaced by a `View` of a buffer, so the tape keeps no storage alive.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.device import default_generator_of, numeric_environment, set_numeric_environment
from torchdelta._torch.engine import set_grad_enabled
from torchdelta._torch.modes import resolving_views
from torchdelta.runtime.state.buffer import OpEntry, View

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from torchdelta.aten.facts import OpFacts
    from torchdelta.runtime.state.buffer import Buffer

__all__ = [
    "RANDOM_STATE_BYTES",
    "Fresh",
    "Scratch",
    "capture",
    "generator_of",
    "replay_op",
    "source_views",
    "sources",
    "with_random_state",
    "written_sources",
]

RANDOM_STATE_BYTES: Final = 5056  # of a CPU generator (torch 2.13); an accelerator's takes 16 bytes, on the host


class Scratch:
    """Replaces batch-norm statistics by a tensor of this shape with any content: in training, no output reads them."""

    __slots__ = ("device", "dtype", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device

    @classmethod
    def of(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Scratch:
        """Return the same for a tensor that does not exist any more."""
        scratch = cls.__new__(cls)
        scratch.shape, scratch.dtype, scratch.device = shape, dtype, device
        return scratch


class Fresh:
    """Replaces an argument that the op overwrites completely by a new storage of this size, seen through this view."""

    __slots__ = ("device", "dtype", "offset", "shape", "size_bytes", "stride")

    def __init__(self, tensor: torch.Tensor, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = tensor.dtype
        self.device = tensor.device

    @classmethod
    def of(
        cls,
        shape: torch.Size,
        stride: tuple[int, ...],
        offset: int,
        dtype: torch.dtype,
        device: torch.device,
        size_bytes: int,
    ) -> Fresh:
        """Return the same for a tensor that does not exist any more."""
        fresh = cls.__new__(cls)
        fresh.shape, fresh.stride, fresh.offset = shape, stride, offset
        fresh.dtype, fresh.device, fresh.size_bytes = dtype, device, size_bytes
        return fresh


def sources(entry: OpEntry) -> Iterator[Buffer]:
    """Yield the buffers that an op reads, with repetitions."""
    return (view.buffer for view in source_views(entry))


def source_views(entry: OpEntry) -> Iterator[View]:
    """Yield how an op sees the buffers that it reads, with repetitions."""
    for argument in entry.args:
        if argument.__class__ is View:
            yield argument
        elif argument.__class__ is list:
            yield from (item for item in argument if item.__class__ is View)
    if entry.kwargs:
        for argument in entry.kwargs.values():
            yield from _views_in(argument)


def written_sources(entry: OpEntry) -> list[Buffer]:
    """Return the buffers whose storages an op overwrites, in the order in which the recorder numbers its outputs."""
    facts, kwargs = entry.facts, entry.kwargs or {}
    arguments = [entry.args[position] for position in facts.written_positions if position < len(entry.args)]
    arguments += [kwargs.get(keyword) for keyword in facts.written_keywords]
    return list({id(view.buffer): view.buffer for argument in arguments for view in _views_in(argument)}.values())


def _views_in(argument: Any) -> list[View]:
    if argument.__class__ is View:
        return [argument]
    return [item for item in argument if item.__class__ is View] if argument.__class__ is list else []


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
    """Return the generator that a random op will draw from, or None if the op is not random."""
    if not facts.is_random:
        return None
    if kwargs and isinstance(kwargs.get("generator"), torch.Generator):
        return kwargs["generator"]
    for argument in args:
        if isinstance(argument, torch.Generator):
            return argument
    # Numbers are drawn on the device of the output: a `device` argument takes precedence over the tensors' devices.
    if kwargs and kwargs.get("device") is not None:
        return default_generator_of(torch.device(kwargs["device"]))
    for argument in args:
        if isinstance(argument, torch.Tensor) and argument.device.type != "cpu":
            return default_generator_of(argument.device)
    return torch.default_generator


@contextlib.contextmanager
def with_random_state(generator: torch.Generator, state: torch.Tensor) -> Generator[None]:
    """Let a generator draw from an earlier state, and put the present one back at the end."""
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)


def replay_op(entry: OpEntry, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Replay an op on rebuilt arguments, with the grad mode, numeric settings and random state of its first run.

    Call this inside `Quietly`.
    """
    current = numeric_environment()
    if current != entry.environment:
        set_numeric_environment(entry.environment)
    set_grad_enabled(entry.grad_enabled)
    try:
        if entry.random_state is not None:
            with with_random_state(*entry.random_state):
                return entry.func(*args, **kwargs)
        if entry.facts.conjugates_inside:  # a replay may run inside another op's mode
            with resolving_views():
                return entry.func(*args, **kwargs)
        return entry.func(*args, **kwargs)
    finally:
        set_grad_enabled(False)
        if current != entry.environment:
            set_numeric_environment(current)
