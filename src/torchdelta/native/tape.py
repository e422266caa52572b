"""The tape of steps whose program is known: their ops are recorded, dropped and replayed in C++; see tape.cpp.

TORCHDELTA_NATIVE=0 disables it: then the Python recorder does this, as in all other steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from torchdelta.errors import NativeError
from torchdelta.native.build import NativeModule, is_switched_off, loaded

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from torchdelta.native.counting import LimitedCounter

__all__ = ["MODULE", "Builder", "Tape", "load_tape", "new_tape"]

# Without the gate and the hooks nothing is recorded, so this only shows that the module works at all.
_SELF_TEST: Final = """
import ctypes
live = ctypes.c_int64(0)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
name = ctypes.c_char_p(b"torchdelta.live_bytes")
tape = module.Tape(torch.device("cpu"), new_capsule(ctypes.byref(live), name, None), print, print, print)
for _ in range(2):
    tape.begin({3: [1, 2]}, {1: [[1], [2]]}, 100)
    tape.act(3, False)
    tape.act(1, True)
    assert tape.capsule() is not None
    assert tape.describe([], None) == []
    tape.end_forward()
    tape.clear()
assert tape.take_counts() == (0, 0, 0, 0, 0, 0.0)
del tape
"""

MODULE: Final = NativeModule(
    source=Path(__file__).with_name("tape.cpp"),
    name="torchdelta_tape",
    self_test=_SELF_TEST,
    without="Python records what followed steps replay, which takes more host time",
)


class Builder(Protocol):
    """Makes in Python what a tape describes. Contents are named by whole numbers, and come before what sees them."""

    def resident(self, name: int, tensor: torch.Tensor, version: int) -> None:
        """Take a content that is in a storage, seen by a tensor; the version is the one that it should have."""

    def made(
        self,
        op: str,
        overload: str,
        args: list[Any],
        kwargs: dict[str, Any],
        grad_enabled: bool,
        need_bytes: int,
        random_state: tuple[torch.Generator, torch.Tensor] | None,
        outputs: list[tuple[int, int, int]],
    ) -> None:
        """Take the op that makes contents which were dropped: for each its name, its place among the outputs, bytes."""

    def view(
        self, name: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype
    ) -> object:
        """Return how a tensor sees a content."""
        ...

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype) -> object:
        """Return what stands for running statistics, whose values do not matter."""
        ...

    def fresh(
        self, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype, size_bytes: int
    ) -> object:
        """Return what stands for a tensor that the op overwrites."""
        ...

    def save(self, view: Any, probe: torch.Tensor, version: int, number: int) -> object:
        """Return what autograd holds of a saved tensor whose content was dropped."""
        ...


class Tape(Protocol):
    """What was recorded of one step. Mutable; one for each session."""

    def begin(self, drops: dict[int, list[int]], replays: dict[int, list[list[int]]], most_bytes: int, /) -> None:
        """Begin to record a step.

        Args:
            drops: By the number of a saved tensor: the first saved tensors of what is dropped there.
            replays: By the number of a saved tensor: groups of the same, replayed before it is returned.
            most_bytes: Python is asked for room before a replay might pass these.
        """

    def end_forward(self) -> None:
        """Record no op from now on."""

    def before_write(self, tensor: torch.Tensor, /) -> None:
        """Keep the content of a tensor that is about to be written, for the replays and saved tensors that need it."""

    def clear(self) -> None:
        """Forget the step. What saved tensors need stays."""

    def act(self, number: int, is_unpack: bool, /) -> None:
        """Do what is due at a saved tensor that Python packs or unpacks."""

    def describe(self, saves: list[object], builder: Builder, /) -> list[object]:
        """Describe to a builder what saved tensors need. Return what it makes of each of them."""
        ...

    def take_counts(self) -> tuple[int, int, int, int, int, float]:
        """Return what was done since the last call.

        Replayed ops, bytes that they brought back, saved tensors, dropped contents and their bytes, and the
        seconds of replays.
        """
        ...

    def capsule(self) -> object:
        """Return the tape for the gate and the hooks. They need the tape itself as well, as its owner."""
        ...


def load_tape() -> Any:
    """Return the module, built if needed, or the NativeError that explains why there is none."""
    if is_switched_off():
        return NativeError("TORCHDELTA_NATIVE disables it")
    return loaded(MODULE)


def new_tape(
    device: torch.device,
    counter: LimitedCounter,
    make_room: Callable[[int, bool], bool],
    raise_changed: Callable[[int, int, int], None],
    hand_over: Callable[[], object],
) -> Tape | NativeError:
    """Return a tape, or the reason why there is none.

    Args:
        device: With its index, if it is an accelerator. Only ops on its tensors are recorded.
        counter: Counts the live bytes.
        make_room: Called with the bytes that a replay needs if they might not fit, and whether it can wait. Returns
            whether they fit. It may hand over.
        raise_changed: Called with the bytes, the version and the expected version of a content that code has changed
            which was not seen. Raises.
        hand_over: Called if a replay fails: describes all to Python, which tries again.
    """
    module = load_tape()
    if isinstance(module, NativeError):
        return module
    return module.Tape(device, counter.live_capsule(), make_room, raise_changed, hand_over)
