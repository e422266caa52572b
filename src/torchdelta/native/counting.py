"""The counting CPU allocator: the bytes that a thread has allocated, exactly, and their peak.

A dispatch mode sees the outputs of ops. It does not see what an op allocates inside itself, the sums that the autograd
engine makes between nodes, or the states of random generators that a tape keeps; the allocator does. It corresponds to
CUDA's allocator statistics. The C++ side is counting.cpp: it forwards to the previous allocator, so the profiler still
records memory events.

It is installed once per process, at the first budget, and never removed: without a started counter it costs a few
nanoseconds per allocation. TORCHDELTA_NATIVE=0 disables it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from torchdelta.errors import NativeError
from torchdelta.native.build import (
    NativeModule,
    NativeStatus,
    is_switched_off,
    loaded,
    status_before_use,
    status_in_use,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "MODULE",
    "Counter",
    "LimitedCounter",
    "counting_status",
    "installed_module",
    "loaded_module",
    "new_counter",
]


# What a broken build would get wrong: tensors from before the installation, exact sums, frees on another thread, raw
# allocations inside ops, a storage that is resized, profiler events, tensors that outlive their counter, storages that
# die while a weak reference to them exists, and storages whose memory is a file.
_SELF_TEST: Final = """
import mmap, tempfile, threading, weakref
class Keeper:
    pass
keeper, page, mapped = Keeper(), mmap.PAGESIZE, torch.UntypedStorage(0)
kept = weakref.ref(keeper)
try:
    with tempfile.TemporaryFile() as file:
        file.write(page * b"a" + page * b"b")
        file.flush()
        module.map_pieces(mapped._cdata, page + 1, file.fileno(), [(page, page), (0, page)], keeper)
        module.free_pieces(-1, [(0, page)])
except OSError:
    pass  # there is no such directory, or its file system cannot map: nor will that of the swap file
else:
    del keeper
    assert mapped.nbytes() == page + 1 and mapped[0] == ord("b") and mapped[page] == ord("a")
    mapped[0] = 7
    assert mapped[0] == 7 and kept() is not None and mapped.resizable()
    mapped.resize_(0)
    assert kept() is None
del mapped
watched = torch.ones(10)
weak = module.WeakStorage(torch._C._storage_address(watched))
assert weak.num_holders() == 1
watched.data = torch.ones(20)
assert weak.num_holders() == 0
del weak, watched
old = torch.ones(1000)
assert module.install() and module.install() and module.is_installed()
counter = module.Counter()
counter.start()
new = torch.ones(1000)
assert counter.live_bytes() == 4000 and counter.owns(new.data_ptr()) and not counter.owns(old.data_ptr())
del old
assert counter.live_bytes() == 4000
counter.mark()
scores = torch.randn(64, 64).softmax(-1)
assert counter.growth_bytes() == 2 * 4 * 64 * 64, counter.growth_bytes()
holder = [scores]
del scores
other = threading.Thread(target=holder.clear)
other.start()
other.join()
assert counter.live_bytes() == 4000
new.untyped_storage().resize_(8000)
assert counter.live_bytes() == 8000
counter.add(100)
counter.add(-100)
passed = []
counter.set_limit(8100, 1 << 40, lambda: passed.append(1))
small = torch.ones(10)
assert not passed
large = torch.ones(100)
torch.ones(100)
assert passed == [1], passed
try:
    counter.set_limit(1 << 40, 9000, lambda: passed.append(3))
    torch.ones(1000)
except torch.OutOfMemoryError as error:
    assert "within this budget" in str(error), error
else:
    raise AssertionError("an allocation beyond the most was not refused")
assert passed == [1, 3], passed
passed.pop()
counter.set_limit(1, 1 << 40, lambda: passed.append(2))
counter.clear_limit()
torch.ones(100)
assert passed == [1], passed
del small, large
assert counter.take_peak_bytes() >= 4000 + 2 * 4 * 64 * 64
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(5))
before = counter.live_bytes()
with torch.autograd.profiler.profile(profile_memory=True) as profiler:
    model(torch.randn(2, 3, 8, 8)).sum().backward()
events = [e.nbytes() for e in profiler.kineto_results.events() if e.name() == "[memory]"]
assert events and sum(events) == counter.live_bytes() - before, (sum(events), counter.live_bytes() - before)
counter.stop()
uncounted = torch.ones(10)
left = counter.live_bytes()
assert not counter.owns(uncounted.data_ptr())
del counter
del new, model
"""

MODULE: Final = NativeModule(
    source=Path(__file__).with_name("counting.cpp"), name="torchdelta_counting", self_test=_SELF_TEST
)


class Counter(Protocol):
    """The bytes allocated by one thread, see counting.cpp."""

    def start(self) -> None:
        """Count the allocations of this thread from now on."""

    def stop(self) -> None:
        """Stop counting allocations; later frees are still subtracted."""

    def add(self, size_bytes: int, /) -> None:
        """Add bytes that were allocated elsewhere; a negative number subtracts."""

    def live_bytes(self) -> int:
        """Return the live bytes."""
        ...

    def mark(self) -> int:
        """Start to measure growth. Return the live bytes."""
        ...

    def growth_bytes(self) -> int:
        """Return the largest growth since the mark."""
        ...

    def take_peak_bytes(self) -> int:
        """Return the peak since the last call."""
        ...

    def owns(self, address: int, /) -> bool:
        """Return whether this counter counts the allocation at this address."""
        ...


class LimitedCounter(Counter, Protocol):
    """The native counter, which calls back when a limit is passed."""

    def set_limit(self, limit_bytes: int, most_bytes: int, on_limit: Callable[[], object], /) -> None:
        """Call a function once when the live bytes pass a limit: on the main thread, between two instructions.

        An allocation that would pass `most_bytes` raises torch's error for too little memory, and calls the function.
        """

    def clear_limit(self) -> None:
        """Call none, and refuse none."""

    def live_capsule(self) -> object:
        """Return a capsule with the address of the live bytes, for other native modules."""
        ...


def loaded_module() -> Any:
    """Return the module, built and imported but not installed, or the NativeError that explains why there is none."""
    return loaded(MODULE)


@functools.cache
def _module() -> Any:
    """Return the installed module, or the NativeError that explains why there is none."""
    try:
        module = loaded_module()
        if isinstance(module, NativeError):
            return module
        is_installed = module.install()
    except RuntimeError as error:
        return NativeError(str(error))
    return module if is_installed else NativeError("another CPU allocator was installed with a higher priority")


def installed_module() -> Any:
    """Return the C++ side if this process has installed it, else None."""
    module = _module() if _module.cache_info().currsize else None
    return None if isinstance(module, NativeError) else module


def new_counter() -> Counter | NativeError:
    """Return a counter; build and install the allocator first if needed.

    If that fails, return (not raise) a NativeError: the caller warns and continues with estimates.
    """
    if is_switched_off():
        return NativeError("TORCHDELTA_NATIVE disables it")
    module = _module()
    if isinstance(module, NativeError):
        return module
    if not module.is_installed():
        return NativeError("another CPU allocator has replaced it")
    return module.Counter()


def counting_status() -> NativeStatus:
    """Return whether budgets of this process count at the allocator. Builds nothing."""
    if is_switched_off() or not _module.cache_info().currsize:
        return status_before_use(MODULE, "at the first budget")
    return status_in_use(_module(), lambda module: module.is_installed())
