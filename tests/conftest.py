"""What every test shares: subprocesses find the package where this checkout has it, and tests find their device.

`rest` marks what `make test` leaves to `make test-rest`, `whole` what both leave to `make test-whole`
(tests/sampling.py chooses among parameters). `long` marks what takes ten seconds and more.

Two more say what a test needs. `cuda`: a CUDA device. `accelerator`: any device with streams and autograd threads of
its own, which is CUDA, or the stand-in that is built from C++ where there is none. Both are left out where the device
is not there. TORCHDELTA_TEST_DEVICE ("cpu", "cuda", "standin" or "racecheck") says what the steps of same_bits/ and
accelerator/ run on; with "cuda", those of same_bits/ count as `cuda` as well. "racecheck" is the accelerator that
computes late (tests/racecheck): with it, each test is one schedule, and fails if its accesses to memory are unordered.
"""

import gc
import importlib
import importlib.util
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.collector import leave_out, leave_out_many

_SRC = str(Path(__file__).parent.parent / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_SRC, os.environ.get("PYTHONPATH")]))
_DEVICE = os.environ.get("TORCHDELTA_TEST_DEVICE", "cpu")

# How long an example takes says something about the machine only. Here, because settings are read where a test file is
# imported: the same test would have a deadline or none, depending on which files were imported before it.
if importlib.util.find_spec("hypothesis") is not None:  # a GPU machine may lack it
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")

if _DEVICE == "standin":
    from tests.accelerator import standin

    standin.load()  # before the first backward
if _DEVICE == "racecheck":
    from tests.racecheck import device as racecheck

    racecheck.load()
if _DEVICE != "cuda":
    # On a machine with a GPU too, what is written for the CPU runs on the CPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Collect no garbage while the test files import what they need: each collection would visit a million objects."""
    gc.disable()


@pytest.fixture(autouse=_DEVICE == "racecheck")
def drawn_schedule(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the device work in an order that the test's name draws, and look for races afterwards."""
    extension = racecheck.load()
    extension.reset()
    extension.take_complaints()
    extension.set_mode(1, zlib.crc32(request.node.nodeid.encode()))
    yield
    extension.settle()
    extension.set_mode(0, 0)
    assert extension.take_complaints() == []


def pytest_collection_finish() -> None:
    """Leave what the test files have imported out of the collections in tests."""
    leave_out()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Keep the collections in a test quick, whatever the tests before it have imported or given back."""
    leave_out_many()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a device that is not there."""
    has_cuda = _DEVICE == "cuda" and importlib.import_module("torch").cuda.is_available()
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        if _DEVICE == "cuda" and {"same_bits", "accelerator"} & set(item.path.parts):
            item.add_marker(pytest.mark.cuda)
        has_device = True
        if item.get_closest_marker("cuda") is not None:
            has_device = has_cuda
        elif item.get_closest_marker("racecheck") is not None:
            has_device = _DEVICE == "racecheck"
        elif item.get_closest_marker("accelerator") is not None:
            has_device = _DEVICE != "cpu"
        (kept if has_device else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
    if hasattr(config, "workerinput"):
        # At the end, a worker would be left alone with a long test.
        items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name bytes by their length: what gzip wrote differs by the second, and workers have to collect the same names."""
    return f"{len(val)}-bytes" if isinstance(val, bytes) else None


@pytest.fixture
def needs_counter() -> None:
    """Skip a test where allocations cannot be counted: nothing is planned or measured without that."""
    from torchdelta.errors import NativeError
    from torchdelta.native.counting import new_counter

    made = new_counter()
    if isinstance(made, NativeError):
        pytest.skip(f"no counting allocator here: {made}")
