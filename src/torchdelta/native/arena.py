"""The CPU arena: planned addresses for the allocations of training steps that repeat. The C++ side is arena.cpp.

It is installed once per process, at the first budget with `Config(arena=True)`, and never removed; a thread without an
arena allocates as before. The counting allocator, if installed, is always called before the arena, whichever was
installed first: it counts placed allocations like all others. TORCHDELTA_NATIVE=0 disables both.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from torchdelta.errors import NativeError
from torchdelta.native.build import NativeModule, NativeStatus, is_switched_off, load, status_before_use, status_in_use
from torchdelta.native.caching import allocator_below
from torchdelta.native.counting import installed_module

__all__ = ["MODULE", "Arena", "ArenaFigures", "ArenaStatus", "arena_status", "new_arena"]

_LEAST_BYTES: Final = 1 << 14  # smaller allocations are left to the heap: they are many, and it handles them well
_MAX_PLANS: Final = 16
_MAX_LENGTH: Final = 100_000  # the most allocations of a step that are recorded

# What a broken build would get wrong: places given out while a live block overlaps them, blocks of older plans and of
# other allocators, frees on another thread, raw allocations inside ops, resizing, a fork, profiler events.
_SELF_TEST: Final = """
import array, os, threading
old = torch.ones(10000)
assert module.install() and module.install() and module.is_allocator(None)
arena = module.Arena(4096, 4, 1000)
arena.start()
def step():
    a = torch.full((5000,), 1.0)
    b = torch.full((7000,), 2.0)
    total = (a.sum() + b.sum()).item()
    del a
    c = torch.randn(80, 80).softmax(-1)
    return b, c, total
for turn in range(4):
    held = step()
    assert held[2] == 19000.0
    if arena.cut() == 2:
        sizes = array.array("q", arena.recording()[0])
        offsets, top = array.array("q"), 0
        for size in sizes:
            offsets.append(top)
            top += (size + 63) // 64 * 64
        arena.plan(offsets.tobytes())
    if turn < 3:
        held = None
figures = arena.figures()
assert figures["num_plans"] == 1 and figures["num_placed"] >= 3, figures
assert held[0].data_ptr() % 64 == 0 and module.mapped_bytes() > 0
again = step()  # must not overwrite the held tensors
assert held[0].eq(2).all() and again[0].eq(2).all() and again[0].data_ptr() != held[0].data_ptr()
child = os.fork()
if child == 0:
    os._exit(0 if torch.ones(5000).sum() == 5000 and held[0].eq(2).all() else 1)
assert os.waitpid(child, 0)[1] == 0
other = threading.Thread(target=held[0].untyped_storage().resize_, args=(8,))
other.start()
other.join()
with torch.autograd.profiler.profile(profile_memory=True) as profiler:
    torch.ones(5000)
events = [event.nbytes() for event in profiler.kineto_results.events() if event.name() == "[memory]"]
assert sum(events) == 0 and 20000 in events, events
arena.stop()
assert again[0].eq(2).all() and module.mapped_bytes() > 0
del held, again
assert module.mapped_bytes() == 0
del old, arena
"""

MODULE: Final = NativeModule(
    source=Path(__file__).with_name("arena.cpp"), name="torchdelta_arena", self_test=_SELF_TEST
)


class Arena(Protocol):
    """The arena of one thread, see arena.cpp."""

    def start(self) -> None:
        """Place the allocations of this thread from now on."""

    def stop(self) -> None:
        """Stop placing and forget all plans. Live blocks keep their places until they are freed.

        An arena also stops when its thread ends.

        Raises:
            RuntimeError: The arena runs on another thread.
        """

    def cut(self) -> int:
        """End a step. Return 2 if a recording waits to be planned, 1 if one will after the next step, else 0."""
        ...

    def recording(self) -> tuple[bytes, bytes] | None:
        """Return the sizes and ends of a step to be planned, as int64; None if there is none.

        Allocation i lives from moment i. An end above the number of allocations is in the next step; -1 means later
        than the same moment of the next step.
        """
        ...

    def plan(self, offsets_bytes: bytes, /) -> None:
        """Set the offsets of the last recording, as int64, multiples of 64; -1 leaves an allocation outside."""

    def figures(self) -> dict[str, int]:
        """Return the fields of `ArenaFigures` by name, except `mapped_bytes`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaFigures:
    """What the arenas of this process have done.

    Attributes:
        num_steps: Steps that ended while an arena was on.
        num_planned_steps: Steps whose allocations all matched a plan, from the first to the last.
        num_left_plans: Steps that began like a plan and then differed: the rest was allocated outside the arena.
        num_loose_steps: Steps that began like no plan, and whose large allocations were mapped one by one.
        num_placed: Allocations that got their planned address.
        num_outside: Allocations that a plan leaves to the previous allocator, because they outlive their step.
        num_clashes: Allocations whose place was still in use, and which were therefore allocated outside.
        num_plans: Plans that are kept now.
        mapped_bytes: Bytes of the regions now. Free parts of them may not be resident.
    """

    num_steps: int = 0
    num_planned_steps: int = 0
    num_left_plans: int = 0
    num_loose_steps: int = 0
    num_placed: int = 0
    num_outside: int = 0
    num_clashes: int = 0
    num_plans: int = 0
    mapped_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaStatus(NativeStatus):
    """Whether arenas are available, and what those of this process have done: nothing before the first arena."""

    figures: ArenaFigures


def new_arena(
    *, least_bytes: int = _LEAST_BYTES, max_plans: int = _MAX_PLANS, max_length: int = _MAX_LENGTH
) -> Arena | NativeError:
    """Return an arena; build and install the allocator first if needed.

    If that fails, return (not raise) a NativeError: the caller warns and allocates without an arena.

    Args:
        least_bytes: Smaller allocations are ignored.
        max_plans: The most plans that are kept; the least recently used is dropped first.
        max_length: The most allocations of a step that are recorded; longer steps get no plan.
    """
    reason = _cannot()
    if reason is not None:
        return NativeError(reason)
    module = _module()
    if isinstance(module, NativeError):
        return module
    if not _is_in_use(module):
        return NativeError("another CPU allocator has replaced it")
    return module.Arena(least_bytes, max_plans, max_length)


def arena_status() -> ArenaStatus:
    """Return whether arenas are available in this process, and what they have done. Builds nothing."""
    reason, figures = _cannot(), ArenaFigures()
    if reason is not None:
        return ArenaStatus(is_on=False, reason=reason, figures=figures)
    if not _module.cache_info().currsize:
        status = status_before_use(MODULE, "at the first budget with Config(arena=True)")
    else:
        module = _module()
        status = status_in_use(module, _is_in_use)
        if not isinstance(module, NativeError):
            figures = ArenaFigures(**module.figures(), mapped_bytes=module.mapped_bytes())
    return ArenaStatus(is_on=status.is_on, reason=status.reason, figures=figures)


def _cannot() -> str | None:
    if is_switched_off():
        return "TORCHDELTA_NATIVE disables it"
    if importlib.util.find_spec("numba") is None:
        return "planning needs numba: pip install 'torchdelta[plan]'"
    return None


@functools.cache
def _module() -> Any:
    """Return the installed module, or the NativeError that explains why there is none."""
    try:
        module = load(MODULE)
        counting = installed_module()
        if counting is None:
            module.install()
        else:
            counting.set_previous(module.install_before(counting.previous()))
    except NativeError as error:
        return error
    except RuntimeError as error:
        return NativeError(str(error))
    return module if _is_in_use(module) else NativeError("another CPU allocator was installed with a higher priority")


def _is_in_use(module: Any) -> bool:
    if module.is_allocator(None):
        return True
    counting = installed_module()
    if counting is None or not counting.is_installed():
        return False
    if module.is_allocator(counting.previous()):
        return True
    below = allocator_below()  # the caching allocator may be between them
    return below is not None and module.is_allocator(below)
