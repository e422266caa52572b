"""The counting CPU allocator: what a thread has allocated, to the byte, and the highest that it was.

A dispatch mode sees the tensors that ops hand out. It does not see what an op allocates inside itself, what the
autograd engine adds up between nodes, or the states of random generators that a tape keeps; the allocator does. It is
the CPU's counterpart of CUDA's allocator statistics. The C++ side is counting.cpp: it forwards to the allocator that
was there before, so memory events of the profiler survive.

Installed once for a process, at the first budget, and never taken out again: a counter that nobody has started costs a
few nanoseconds an allocation. TORCHDELTA_NATIVE=0 leaves it out.
"""

from __future__ import annotations

import functools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from torchdelta.errors import NativeError
from torchdelta.native.build import built_path, load

__all__ = ["Counter", "NativeStatus", "counting_status", "installed_module", "is_switched_off", "new_counter"]

_SOURCE: Final = Path(__file__).with_name("counting.cpp")
_MODULE_NAME: Final = "torchdelta_counting"

# What a broken build would get wrong: tensors from before the installation, exact sums, frees on another thread, raw
# allocations inside ops, a storage that is resized, events of the profiler, and tensors that outlive their counter.
_SELF_TEST: Final = """
import threading
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


class Counter(Protocol):
    """Bytes allocated by one thread; see the methods' own words in counting.cpp."""

    def start(self) -> None:
        """Count what this thread allocates from now on."""

    def stop(self) -> None:
        """Count no more; what is freed later still leaves the count."""

    def add(self, size_bytes: int, /) -> None:
        """Add bytes that came from elsewhere; a negative number takes them off."""

    def live_bytes(self) -> int:
        """Return the bytes that are alive."""
        ...

    def mark(self) -> int:
        """Begin to measure growth here. Returns the live bytes."""
        ...

    def growth_bytes(self) -> int:
        """Return the highest growth since the mark."""
        ...

    def take_peak_bytes(self) -> int:
        """Return the peak since it was last taken."""
        ...

    def owns(self, address: int, /) -> bool:
        """Say whether the allocation at this address is counted here."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeStatus:
    """Whether a native piece is in use, or would be.

    Attributes:
        is_on: It is installed, or is built and will be at the next budget.
        reason: What there is to say about it, in a few words.
    """

    is_on: bool
    reason: str


@functools.cache
def _module() -> Any:
    """Return the installed module, or the NativeError that says why there is none."""
    try:
        module = load(_SOURCE, _MODULE_NAME, _SELF_TEST)
        is_installed = module.install()
    except NativeError as error:
        return error
    except RuntimeError as error:
        return NativeError(str(error))
    return module if is_installed else NativeError("another CPU allocator was installed with a higher priority")


def installed_module() -> Any:
    """Return the C++ side if this process has installed it, else None."""
    module = _module() if _module.cache_info().currsize else None
    return None if isinstance(module, NativeError) else module


def is_switched_off() -> bool:
    """Say whether the environment asks to do without native pieces."""
    return os.environ.get("TORCHDELTA_NATIVE", "1").lower() in {"0", "false", "off", "no"}


def new_counter() -> Counter | NativeError:
    """Return a counter, building and installing the allocator first where that is still to be done.

    A NativeError is returned, not raised, where there is none to be had: the caller goes on with estimates and says so.
    """
    if is_switched_off():
        return NativeError("TORCHDELTA_NATIVE switches it off")
    module = _module()
    if isinstance(module, NativeError):
        return module
    if not module.is_installed():
        return NativeError("another CPU allocator has been installed since")
    return module.Counter()


def counting_status() -> NativeStatus:
    """Say whether budgets of this process count at the allocator. Builds nothing."""
    if is_switched_off():
        return NativeStatus(is_on=False, reason="TORCHDELTA_NATIVE switches it off")
    if _module.cache_info().currsize:
        module = _module()
        if isinstance(module, NativeError):
            return NativeStatus(is_on=False, reason=str(module))
        is_on = module.is_installed()
        return NativeStatus(is_on=is_on, reason="installed" if is_on else "another CPU allocator took its place")
    if built_path(_SOURCE).exists():
        return NativeStatus(is_on=True, reason="built; installed at the first budget")
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return NativeStatus(is_on=False, reason=f"no C++ compiler ({compiler}) to build it: install one, or set CXX")
    return NativeStatus(is_on=True, reason=f"to be built with {compiler} at the first budget")
