"""What goes wrong in a step of the soak: faults that a user's code could cause, and those of the machine."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.soak.schedule import Step
    from benchmarks.soak.subjects import Subject

# More than any machine has: what asks for it gets the error of the real allocator.
IMPOSSIBLE_BYTES = 1 << 60
# An op of the step at which memory runs out; and so many copies fail.
MOST_OPS, MOST_COPIES = 150, 4


class InjectedError(Exception):
    """The soak's own error."""


def _fail(*_: Any) -> None:
    message = "injected by the soak"
    raise InjectedError(message)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _on_gradient(act: Callable[..., None]) -> Callable[..., None]:
    """Return a forward hook that acts when the gradient of the module's output comes by."""

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        tensor = output if isinstance(output, torch.Tensor) else output[0]
        if tensor.requires_grad:
            tensor.register_hook(act)

    return hook


@contextlib.contextmanager
def shared(step: Step, subject: Subject) -> Iterator[None]:
    """Put one of the shared faults into a subject for a while."""
    act = _interrupt if step.fault.startswith("interrupt") else _fail
    block = subject.blocks[step.place % len(subject.blocks)]
    handle = None
    if step.fault.endswith("in forward"):
        handle = block.register_forward_pre_hook(act)
    elif step.fault.endswith("in backward"):
        handle = block.register_forward_hook(_on_gradient(act))
    elif step.fault == "error in leaf hook":
        leaves = list(subject.model.parameters())
        handle = leaves[step.place % len(leaves)].register_post_accumulate_grad_hook(act)
    elif step.fault == "error in optimizer":
        handle = subject.optimizer.register_step_pre_hook(act)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


@contextlib.contextmanager
def own(step: Step, session: Any) -> Iterator[None]:
    """Put one of the machine's faults under a budget's session for a while."""
    if step.fault in {"tier write", "tier read"}:
        medium = session.room.transfers.tier.medium
        name = "write_part" if step.fault == "tier write" else "read_part"
        setattr(medium, name, _failing_copy(getattr(medium, name), 1 + step.place % MOST_COPIES))
        try:
            yield
        finally:
            delattr(medium, name)  # the class's own is below it
    elif step.fault == "out of memory":
        recorder = session.recorder
        original = recorder.execute
        recorder.execute = failing = _failing_op(original, step.place % MOST_OPS)
        try:
            yield
        finally:
            if recorder.execute is failing:  # a survey that ended has put the original back
                recorder.execute = original
    else:
        yield


def _failing_copy(original: Callable[..., None], num_failures: int) -> Callable[..., None]:
    left = [num_failures]

    def copy(worker: int, part: Any) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO) + ", injected by the soak")
        original(worker, part)

    return copy


def _failing_op(original: Callable[..., Any], after_ops: int) -> Callable[..., Any]:
    left = [after_ops]

    def execute(func: Any, facts: Any, args: Any, kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            torch.UntypedStorage(IMPOSSIBLE_BYTES)
        return original(func, facts, args, kwargs)

    return execute


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is the allocator's, of whatever class."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )
