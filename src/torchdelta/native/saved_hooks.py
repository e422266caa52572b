"""Saved-tensor hooks that need no Python in steps that run unrecorded; the C++ side is saved_hooks.cpp.

TORCHDELTA_NATIVE=0 disables them: then every step is recorded.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from torchdelta.errors import NativeError
from torchdelta.native.build import NativeModule, is_switched_off, loaded

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    import torch

    from torchdelta.native.tape import Tape

__all__ = ["MODULE", "NativeHooks", "OnTape", "are_same_leaves", "new_hooks", "new_saves"]


# A step whose handles are used, one whose handles are adopted, a write in place, and a node that saves its own output.
_SELF_TEST: Final = """
import gc, weakref
seen = []
def pack(tensor):
    seen.append("pack")
    return [tensor.detach()]
def unpack(packed):
    seen.append("unpack")
    return packed[0]
def on_modified(tensor, version):
    raise RuntimeError(f"modified: {tensor._version} {version}")
larger = []
apart = []
hooks = module.Hooks(pack, unpack, pack, on_modified, lambda: larger.append(1), apart.append)
assert not hooks.end_step()
for size in (8, 8, 8, 9):
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        torch.randn(size, requires_grad=True).exp()
    assert hooks.end_step() == (size == 8 and len(seen) > 1), size
hooks.pause()
for size in (5, 9, 10):
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        torch.randn(size, requires_grad=True).exp()
    assert len(larger) == (size == 10), (size, larger)
    hooks.end_step()
hooks.adopt()
x = torch.randn(8, 8, requires_grad=True)
expected, = torch.autograd.grad(x.exp().tanh().sum(), x)
for adopts in (False, True):
    hooks.pause()
    seen.clear()
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        y = x.exp().tanh()
    assert not seen and hooks.num_handles() == 2, (seen, hooks.num_handles())
    if adopts:
        assert hooks.adopt() == 2 and seen == ["pack", "pack"], seen
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
    assert hooks.num_handles() == 0 and bool(seen) == adopts
hooks.pause()
with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
    y = x.exp()
    y.add_(1)
try:
    y.sum().backward()
except RuntimeError as error:
    assert "modified: 1 0" in str(error), error
else:
    raise AssertionError("a write in place was not noticed")
gone = weakref.ref(y)
del y
assert gone() is None and hooks.num_handles() == 0
hooks.adopt()
events = []
def numbered(tensor, number):
    events.append(("number", number))
    return pack(tensor)
seen.clear()
for size in (8, 9):
    hooks.compare(module.Saves([32, 32], [-1, 7], [0, 0]), lambda index: events.append(("other", index)), numbered)
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        y = torch.randn(8, requires_grad=True).exp()
        y = torch.cat([y, y[:size - 8]]).tanh()
    assert hooks.end_comparison() == (size == 8), size
    assert events == [("number", 7) if size == 8 else ("other", 1)], events
    assert seen == ["pack"] and hooks.num_sizes() == (size == 9), seen
    y.sum().backward()
    events.clear()
    seen.clear()
    hooks.end_step()
hooks.adopt()
class Give(torch.autograd.Function):
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        return x.clone()
    def backward(ctx, gradient):
        return ctx.saved_tensors[0], None
hooks.pause()
for is_held in (True, False):
    y = x + 1
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        loss = Give.apply(x, y).sum()
    y = y if is_held else None
    torch.autograd.grad(loss, x)
    assert len(apart) == 1, len(apart)
apart.clear()
hooks.adopt()
weight, bias = torch.randn(3, 3, requires_grad=True), torch.randn(3, requires_grad=True)
x = weight.exp()
assert module.are_same_leaves((x.sum(), bias), [weakref.ref(weight)], (True,))
assert not module.are_same_leaves((x.sum() + bias.sum(),), [weakref.ref(weight)], (True,))
assert module.are_same_leaves((x, None), [weakref.ref(weight)], (True,)) is None
"""

MODULE: Final = NativeModule(
    source=Path(__file__).with_name("saved_hooks.cpp"),
    name="torchdelta_saved_hooks",
    self_test=_SELF_TEST,
    without="every step is recorded, which takes more host time",
)


class NativeHooks(Protocol):
    """The pair of hooks of one session."""

    def pack(self, tensor: torch.Tensor, /) -> Any:
        """Return what autograd holds for a tensor that it saves."""

    def unpack(self, packed: Any, /) -> torch.Tensor:
        """Return a saved tensor."""
        ...

    def pause(self) -> None:
        """Make handles, without Python, from now on."""

    def adopt(self) -> int:
        """Call the Python hooks from now on, and pack with them what the living handles hold. Return their number."""
        ...

    def end_step(self) -> bool:
        """Begin a new step. Return whether a recorded one saved the same sizes as the recorded one before it."""
        ...

    def num_saved(self) -> int:
        """Return how many tensors were saved since `pause` or `end_step`, in a pause."""
        ...

    def num_handles(self) -> int:
        """Return the number of living handles."""
        ...

    def when_empty(self, then: Callable[[], object], /) -> None:
        """Call a function once, as soon as no handle lives."""

    def is_in_op(self) -> bool:
        """Return whether a tensor is being packed on this thread: an op has saved it, and goes on afterwards."""
        ...

    def compare(
        self,
        saves: object,
        on_other: Callable[[int], object],
        pack_numbered: Callable[[torch.Tensor, int], Any],
        /,
    ) -> None:
        """Compare what this step saves from here on with a list, and make handles without Python for most of it.

        Args:
            saves: What `new_saves` has made.
            on_other: Called with the position of a saved tensor that is not the expected one; the Python hook packs
                it, and all later ones.
            pack_numbered: The hook for saved tensors that have a number.
        """

    def use_tape(
        self,
        tape: Tape,
        capsule: object,
        adopt_dropped: Callable[[list[object]], list[Any]],
        act: Callable[[int, bool], object],
        /,
    ) -> None:
        """Save on a tape what the list says, until the end of the comparison or `adopt`.

        Args:
            tape: Owns what is in the capsule.
            capsule: Its `capsule()`.
            adopt_dropped: Called in `adopt`; returns what the Python hook would have made of saved tensors whose
                contents were dropped.
            act: Called with the number of a saved tensor, and whether it is unpacked, where Python has something to do.
        """

    def end_comparison(self) -> bool:
        """Call the Python hooks from now on. Return whether the step has saved all that the list has."""
        ...

    def sizes(self) -> list[int]:
        """Return the bytes of each tensor that the Python hook has packed in this step."""
        ...

    def num_sizes(self) -> int:
        """Return how many these are, the running one included."""
        ...


def new_hooks(
    pack: Callable[[torch.Tensor], Any],
    unpack: Callable[[Any], torch.Tensor],
    pack_odd: Callable[[torch.Tensor], Any],
    on_modified: Callable[[torch.Tensor, int], Any],
    on_larger: Callable[[], Any],
    keep_apart: Callable[[torch.Tensor], Any],
) -> NativeHooks | NativeError:
    """Return a pair of hooks; build the module first if needed.

    If that fails, return (not raise) a NativeError: the caller goes on with the Python hooks.

    Args:
        pack: The Python hook, called outside of unrecorded steps.
        unpack: The Python hook, for what `pack` and `pack_odd` return.
        pack_odd: Packs what is not a plain CPU tensor, in an unrecorded step.
        on_modified: Called with a tensor that was written after it was saved, and its version then; raises.
        on_larger: Called, soon after, when an unrecorded step saves a larger tensor than the last recorded one did in
            that place, or one tensor more.
        keep_apart: Called with a tensor that a handle returns to the backward of a custom Function, if others hold its
            storage.
    """
    if is_switched_off():
        return NativeError("TORCHDELTA_NATIVE disables it")
    module = loaded(MODULE)
    if isinstance(module, NativeError):
        return module
    hooks: NativeHooks = module.Hooks(pack, unpack, pack_odd, on_modified, on_larger, keep_apart)
    return hooks


class OnTape(enum.IntFlag):
    """What happens on the tape to a saved tensor that has a number. Nothing: Python packs it."""

    DROPPED = 1  # its content may be dropped
    KEPT = 2
    SAVED_IN_PYTHON = 4  # Python has something to do when it is saved
    UNPACKED_IN_PYTHON = 8  # and when it is unpacked


def new_saves(sizes_bytes: list[int], numbers: list[int], on_tape: list[OnTape]) -> object:
    """Return a list of saved tensors for `NativeHooks.compare`. Call this only where there are such hooks.

    Args:
        sizes_bytes: By saved tensor.
        numbers: For those that the Python hook packs, by a number; -1 for all others.
        on_tape: For those with a number: what happens instead where there is a tape.
    """
    return loaded(MODULE).Saves(sizes_bytes, numbers, on_tape)


def are_same_leaves(
    outputs: tuple[object, ...], leaves: list[weakref.ref[torch.Tensor]], has_no_gradient: tuple[bool, ...]
) -> bool | None:
    """Return whether a backward accumulates into these leaves, in the order of `headroom.leaves_of`.

    Return None where Python has to find out: an output is an edge of a graph, or a leaf has hooks after the
    accumulation of its gradient. Call this only where there are native hooks.

    Args:
        outputs: Where the backward starts.
        leaves: What it has to accumulate into.
        has_no_gradient: By leaf: whether it must have no gradient now.
    """
    is_same: bool | None = loaded(MODULE).are_same_leaves(outputs, leaves, has_no_gradient)
    return is_same
