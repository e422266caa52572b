"""What exists before the scope opens is counted: at once, or from its first use."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import nn

from tests.runtime.programs import mlp, reachable_bytes, running
from torchdelta._torch.fake import FakeTensorMode
from torchdelta.native.counting import counting_status
from torchdelta.runtime.record.scan import others_may_train, scan_storages
from torchdelta.runtime.state.ledger import Ledger
from torchdelta.runtime.tiers.disk import DiskTier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Lazy:
    """An object whose class is not what it says, and which must not be asked."""

    @property
    def __class__(self) -> type:
        """Fail."""
        message = "the scan woke a lazy object"
        raise AssertionError(message)


def test_scan_finds_all_that_python_holds() -> None:
    """Parameters, gradients, optimizer states, inputs and graphs: as many bytes as an independent walk finds."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 64)
    model(x).sum().backward()
    optimizer.step()
    gc.collect()
    ledger = Ledger("cpu")
    found_bytes = scan_storages(ledger)
    assert found_bytes == ledger.usage.live_bytes == reachable_bytes()


@pytest.mark.parametrize("what", ["parameter", "gradient", "state", "buffer", "view"])
def test_scan_finds(what: str) -> None:
    """Each kind of storage by itself."""
    gc.collect()
    empty = Ledger("cpu")
    scan_storages(empty)
    size = 10_000
    parameter = nn.Parameter(torch.zeros(1))
    kept: object
    if what == "parameter":
        kept = nn.Parameter(torch.zeros(size))
    elif what == "gradient":
        parameter = kept = nn.Parameter(torch.zeros(size))
        parameter.grad = torch.zeros(size)
    elif what == "state":
        optimizer = kept = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros(size)
    elif what == "buffer":
        kept = nn.BatchNorm1d(size)
    else:
        kept = [torch.zeros(size)[:3]]
    ledger = Ledger("cpu")
    scan_storages(ledger)
    expected_bytes = {"parameter": 4, "gradient": 8, "state": 4, "buffer": 16, "view": 4}[what] * size
    assert expected_bytes <= ledger.usage.live_bytes - empty.usage.live_bytes <= expected_bytes + 16
    del kept


def test_scan_wakes_no_lazy_object() -> None:
    """Objects are asked by `type(o)`; a property called `__class__` does not run."""
    lazy = [Lazy()]
    scan_storages(Ledger("cpu"))
    assert len(lazy) == 1


def test_scan_passes_over_what_has_no_storage() -> None:
    """Sparse, quantized, meta and uninitialized tensors cost nothing and break nothing."""
    kept = [torch.eye(3).to_sparse(), torch.zeros(1000, device="meta"), nn.LazyLinear(3), torch.eye(3).to_mkldnn()]
    gc.collect()
    ledger = Ledger("cpu")
    scan_storages(ledger)
    assert ledger.usage.live_bytes == reachable_bytes()
    assert len(kept) == 4


@pytest.fixture
def _warns_always() -> Iterator[None]:
    """Have torch say every time what it says once."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.usefixtures("_warns_always")
def test_scan_asks_no_fake_memory_for_its_address() -> None:
    """A plain tensor on a fake one's storage warns if asked; a survey that failed leaves some in its traceback."""
    fake = FakeTensorMode().from_tensor(torch.ones(1000))
    plain = torch.empty(0, device="meta")
    plain.set_(fake.untyped_storage(), 0, (1000,), (1,))
    with pytest.warns(UserWarning, match="data pointer"):
        plain.untyped_storage().data_ptr()
    with running() as (_, session):
        assert session.ledger.usage.live_bytes == reachable_bytes()


def test_gradient_that_only_torch_holds_is_found() -> None:
    """A leaf's `.grad` may have no Python object: it is asked for."""
    x = torch.zeros(5000, requires_grad=True)
    x.sum().backward()
    gc.collect()
    before_bytes = scan_storages(Ledger("cpu"))
    x.grad = None
    gc.collect()
    assert before_bytes - scan_storages(Ledger("cpu")) == pytest.approx(20_000, abs=64)


def test_frozen_objects_count_from_their_first_use() -> None:
    """After `gc.freeze()` the collector lists nothing old: what a step touches is counted then."""
    model = mlp(64, 2)
    x = torch.randn(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    gc.collect()
    gc.freeze()
    try:
        with running() as (_, session):
            at_start_bytes = session.ledger.usage.live_bytes
            loss = model(x).sum()
            after_forward_bytes = session.ledger.usage.live_bytes
            loss.backward()
            after_backward_bytes = session.ledger.usage.live_bytes
            optimizer.step()
            optimizer.zero_grad()
            del loss
            at_end_bytes = session.ledger.usage.live_bytes
    finally:
        gc.unfreeze()
    assert at_start_bytes < size_bytes
    assert after_forward_bytes >= at_start_bytes + size_bytes + x.nbytes
    assert after_backward_bytes >= at_start_bytes + 2 * size_bytes + x.nbytes  # and the gradients
    assert at_end_bytes >= at_start_bytes + 2 * size_bytes + x.nbytes  # parameters and momentum
    assert at_end_bytes == pytest.approx(at_start_bytes + 2 * size_bytes + x.nbytes, abs=1024)


def test_what_dies_inside_the_scope_is_counted_off() -> None:
    """A storage from before the scope that is freed inside it gives its bytes back."""
    x = torch.zeros(10_000)
    with running() as (_, session):
        before_bytes = session.ledger.usage.live_bytes
        del x
        assert session.ledger.usage.live_bytes == before_bytes - 40_000


# Reading a gradient while another thread's engine, or its `p.grad = None`, replaces it is a crash: most of these scans
# meet one.
TRAINING_BESIDE = """
import gc, sys, threading
import torch
from torchdelta.runtime.record import scan
from torchdelta.runtime.state.ledger import Ledger

torch.set_num_threads(1)
sys.setswitchinterval(1e-4)
models = [torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(20))) for _ in range(2)]
is_over = threading.Event()

class Collector:
    isenabled, enable, disable = gc.isenabled, gc.enable, gc.disable

    def get_referrers(self, *kinds):
        return [parameter for model in models for parameter in model.parameters()] * 20

scan.gc = Collector()

def train(model):
    x = torch.randn(8, 16)
    while not is_over.is_set():
        model(x).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

threads = [threading.Thread(target=train, args=(model,)) for model in models]
for thread in threads:
    thread.start()
for _ in range(400):
    scan.scan_storages(Ledger("cpu"))
is_over.set()
for thread in threads:
    thread.join()
print("done")
"""


@pytest.mark.rest
def test_gradients_of_threads_that_train_are_left_alone() -> None:
    """A scope that opens while others train does not crash the process."""
    command = [sys.executable, "-c", TRAINING_BESIDE]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


def test_what_others_are_building_is_let_go() -> None:
    """A tuple that another thread is filling while a scope opens can go on growing."""
    is_over = threading.Event()
    errors: list[BaseException] = []

    def build() -> None:
        try:
            while not is_over.is_set():
                assert len(tuple(number for number in range(100))) == 100
        except BaseException as error:  # noqa: BLE001 - judged below
            errors.append(error)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=build)
    thread.start()
    try:
        for _ in range(10):
            scan_storages(Ledger("cpu"))
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval_s)
    assert errors == []


def test_copy_threads_of_a_tier_do_not_train(tmp_path: Path) -> None:
    """Gradients are counted while another scope's tier waits for work; the package may be an editable install."""
    x = torch.zeros(5000, requires_grad=True)
    x.sum().backward()
    tier = DiskTier(swap_dir=tmp_path)
    try:
        gc.collect()
        before_bytes = scan_storages(Ledger("cpu"))
        x.grad = None
        gc.collect()
        assert before_bytes - scan_storages(Ledger("cpu")) == pytest.approx(20_000, abs=64)
    finally:
        tier.close()


def test_who_waits_is_not_at_work() -> None:
    """A thread that waits in Python's own library is no reason to leave gradients out; one in the program is."""
    assert not others_may_train()
    is_over, is_spinning = threading.Event(), threading.Event()
    ends: list[bool] = []  # `is_over.is_set()` would be in Python's own library now and then
    waiting = threading.Thread(target=is_over.wait)
    waiting.start()
    assert not others_may_train()

    def spin() -> None:
        is_spinning.set()
        number = 0
        while not ends:
            number += 1

    spinning = threading.Thread(target=spin)
    spinning.start()
    is_spinning.wait()
    try:
        assert any(others_may_train() for _ in range(1000))
    finally:
        is_over.set()
        ends.append(True)
        waiting.join()
        spinning.join()


@pytest.mark.skipif(not counting_status().is_on, reason="needs the counter at the allocator")
@pytest.mark.parametrize(
    ("what", "found"), [("parameter", True), ("leaf", True), ("buffer of a file", True), ("array", False)]
)
def test_a_scan_for_late_parameters_leaves_out_other_memory(tmp_path: Path, what: str, found: bool) -> None:
    """What NumPy or another thread allocated counts once an op uses it; a model's tensors count at once."""
    array = np.zeros(10_000, np.float32)
    if what == "buffer of a file":
        torch.save({"weight": torch.zeros(10_000)}, tmp_path / "model.pt")
        kept = torch.load(tmp_path / "model.pt", mmap=True)["weight"]
    else:
        kept = torch.from_numpy(array)
        kept = nn.Parameter(kept) if what == "parameter" else kept.requires_grad_(what == "leaf")
    with running() as (_, session):
        fresh = Ledger("cpu")
        fresh.usage.count_with(session.ledger.usage.counter)
        scan_storages(fresh, others="parameters")
        assert (fresh.find(kept) is not None) == found
