"""The caching allocator where addresses or locks are scarce, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from torchdelta.errors import NativeError
from torchdelta.native.caching import caching_allocator
from torchdelta.native.counting import new_counter

_BEGIN = """
import faulthandler, gc, resource, threading, torch
faulthandler.dump_traceback_later(60, exit=True)
from torchdelta.native import caching, counting
counting.new_counter()
caching.caching_allocator().start()
MIB = 1 << 20
def used():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
def block(num_mib):
    return torch.empty(num_mib * MIB, dtype=torch.uint8)
"""


no_sanitizer = pytest.mark.skipif(
    "TSAN_OPTIONS" in os.environ or "ASAN_OPTIONS" in os.environ,
    reason="the sanitizers end a process without addresses",
)


def run(program: str) -> str:
    """Return what a program prints; it must end by itself."""
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN + program], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(autouse=True)
def _needs_it() -> None:
    new_counter()
    if isinstance(allocator := caching_allocator(), NativeError):
        pytest.skip(f"no caching allocator here: {allocator}")


@no_sanitizer
@pytest.mark.parametrize("rest", ["block(128)", "[torch.empty(MIB // 4 * 3, dtype=torch.uint8) for _ in range(100)]"])
def test_kept_pages_make_way_where_addresses_are_limited(rest: str) -> None:
    """Half of 512 MiB was freed, in pieces: another 75 to 128 MiB fit, also where they come from the heap."""
    program = f"""
held = [block(64) for _ in range(8)]
resource.setrlimit(resource.RLIMIT_AS, (used() + 16 * MIB,) * 2)
del held[::2]
more = {rest}
print("ok", len(held))
"""
    assert run(program) == "ok 4\n"


@no_sanitizer
def test_what_cannot_fit_is_still_an_error() -> None:
    """With the heap's own words, and nothing is lost."""
    program = """
held = [block(64).fill_(i) for i in range(8)]
resource.setrlimit(resource.RLIMIT_AS, (used() + 16 * MIB,) * 2)
del held[::2]
try:
    block(1024)
except RuntimeError as error:
    print("memory" in str(error), all(bool(each.eq(2 * i + 1).all()) for i, each in enumerate(held)))
"""
    assert run(program) == "True True\n"


def test_figures_may_collect_garbage() -> None:
    """CPython 3.11 collects while it makes a dict: a block that is freed then takes the same lock."""
    program = """
class Cycle:
    pass
gc.collect()
gc.set_threshold(10**6, 10, 10)
cycle = Cycle()
cycle.me, cycle.tensor = cycle, block(1)
del cycle
dicts = [{} for _ in range(1000)]  # CPython keeps no freed dict for later
gc.set_threshold(5, 10, 10)
print(caching.caching_figures().live_bytes <= MIB)
"""
    assert run(program) == "True\n"


@pytest.mark.parametrize("who", ["its own thread", "another thread"])
def test_a_refused_allocation_cannot_deadlock(who: str) -> None:
    """`multinomial` allocates while it holds its generator's lock: no Python may run in there."""
    program = f"""
counter = counting.new_counter()
counter.start()
shares = torch.rand(4, 1 << 18)
torch.multinomial(shares, 4, replacement=True)
begins = threading.Event()
class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self):
        if {who == "another thread"}:
            begins.set()
            other.join(1.0)
        else:
            torch.rand(1)
gc.disable()
Cycle()
other = threading.Thread(target=lambda: (begins.wait(), torch.get_rng_state()))
other.start()
counter.set_limit(1 << 60, counter.live_bytes() + (1 << 19), lambda: None)
try:
    torch.multinomial(shares, 4, replacement=True)
except torch.OutOfMemoryError:
    print("refused")
begins.set()
other.join()
"""
    assert run(program) == "refused\n"
