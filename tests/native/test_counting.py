"""The counting allocator: exact to the byte, invisible to everybody else, and done without where it cannot be had."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from tests.native.without import WITHOUT_NATIVE, run_without
from tests.sampling import sample
from torchdelta import Config, MemoryBudget
from torchdelta.cli.allocator_peak import AllocatorPeak
from torchdelta.errors import NativeError
from torchdelta.native.counting import counting_status, new_counter

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from torchdelta.native.counting import Counter


@pytest.fixture
def counter() -> Iterator[Counter]:
    """Start a counter on this thread."""
    made = new_counter()
    if isinstance(made, NativeError):
        pytest.skip(f"no counting allocator here: {made}")
    made.start()
    yield made
    made.stop()


def test_counts_what_lives_to_the_byte(counter: Counter) -> None:
    """Allocations add their bytes, frees take them off, and the peak stays."""
    tensor = torch.empty(1000)
    assert counter.live_bytes() == 4000
    other = torch.empty(24, dtype=torch.uint8)
    assert counter.live_bytes() == 4024
    del tensor
    assert counter.live_bytes() == 24
    assert counter.take_peak_bytes() == 4024
    assert counter.take_peak_bytes() == 24
    del other
    assert counter.live_bytes() == 0


def test_growth_shows_what_an_op_takes_inside_itself(counter: Counter) -> None:
    """A gradient of batch norm makes more than it hands out."""
    x = torch.randn(4, 8, 16, 16, requires_grad=True)
    y = nn.functional.batch_norm(x, None, None, torch.ones(8, requires_grad=True), torch.zeros(8), training=True)
    live_bytes = counter.mark()
    y.sum().backward()
    assert counter.growth_bytes() > counter.live_bytes() - live_bytes > 0


def test_tensors_from_before_are_not_its_own(counter: Counter) -> None:
    """What another counter, or nobody, has counted leaves this count alone when it dies."""
    counter.stop()
    earlier = torch.empty(1000)
    counter.start()
    assert not counter.owns(earlier.data_ptr())
    del earlier
    assert counter.live_bytes() == 0
    later = torch.empty(10)
    assert counter.owns(later.data_ptr())


def test_a_free_on_another_thread_counts_and_its_allocations_do_not(counter: Counter) -> None:
    """The bytes are the allocating thread's wherever they are freed."""
    holder = [torch.empty(1000)]
    kept: list[torch.Tensor] = []

    def elsewhere() -> None:
        holder.clear()
        kept.append(torch.empty(500))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert counter.live_bytes() == 0
    assert not counter.owns(kept[0].data_ptr())


def test_many_threads_at_once_keep_their_sums_apart() -> None:
    """Every thread's counter ends at what that thread holds."""
    if isinstance(new_counter(), NativeError):
        pytest.skip("no counting allocator here")
    sums: dict[int, tuple[int, int]] = {}

    def work(index: int) -> None:
        mine = new_counter()
        assert not isinstance(mine, NativeError)
        mine.start()
        held = [torch.empty(100 + index) for _ in range(20)]
        for _ in range(300):
            held[torch.randint(20, ()).item()] = torch.empty(100 + index).relu()  # type: ignore[index]
        sums[index] = (mine.live_bytes(), sum(tensor.nbytes for tensor in held))
        mine.stop()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sums) == 8
    assert all(counted == held for counted, held in sums.values())


def test_a_storage_outlives_its_counter() -> None:
    """Whoever dies last, nothing is freed twice and nothing is lost."""
    made = new_counter()
    if isinstance(made, NativeError):
        pytest.skip("no counting allocator here")
    made.start()
    tensors = [torch.arange(1000) for _ in range(10)]
    made.stop()
    del made
    assert all(tensor.sum().item() == 499500 for tensor in tensors)
    tensors.clear()


def test_the_profiler_still_sees_every_event(counter: Counter) -> None:
    """Memory events add up to the counter's own figures, peak and all."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    x = torch.randn(32, 64)
    live_bytes = counter.live_bytes()
    counter.take_peak_bytes()
    with AllocatorPeak() as meter:
        model(x).sum().backward()
    assert meter.num_events > 10
    assert meter.live_bytes == counter.live_bytes() - live_bytes
    assert meter.peak_bytes == counter.take_peak_bytes() - live_bytes


def test_a_budget_counts_random_states_and_workspaces(counter: Counter) -> None:
    """The peak that a budget reports is the allocator's, also of what no dispatch mode sees."""
    counter.stop()

    def step(model: nn.Module, x: torch.Tensor) -> None:
        model(x).sum().backward()

    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3), nn.Dropout(), nn.BatchNorm2d(8)) for _ in range(4)))
    x = torch.randn(4, 8, 24, 24)
    known_bytes = x.nbytes + sum(tensor.nbytes for tensor in model.state_dict().values())
    with AllocatorPeak() as meter:
        budget = MemoryBudget("1GiB")
        with budget:
            step(model, x)
    extra_bytes = budget.summary().peak_bytes - meter.peak_bytes
    # Other tests' tensors may be alive in this process: they are counted by the budget and not by the meter.
    with MemoryBudget("1GiB", Config(count_allocations=False)) as empty:
        torch.empty(1)
    assert known_bytes <= extra_bytes <= empty.summary().peak_bytes


def test_a_data_loader_with_workers_is_no_trouble(counter: Counter) -> None:
    """Forked children allocate and free on their own account."""
    data = torch.utils.data.TensorDataset(torch.arange(64.0).view(16, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2)
    before_bytes = counter.live_bytes()
    total = 0.0
    for (batch,) in loader:
        total += batch.sum().item()
    assert total == sum(range(64))
    del batch
    assert counter.live_bytes() - before_bytes < 4096


@pytest.mark.parametrize(("environment", "expected"), sample(WITHOUT_NATIVE, 1))
def test_without_it_a_budget_works_and_says_so(
    environment: dict[str, str], expected: str, tmp_path: os.PathLike[str]
) -> None:
    """Switched off or without a compiler: one line of warning, estimates, and the step is trained."""
    program = """
import logging, torch
logging.basicConfig()
from torchdelta import MemoryBudget
from torchdelta.native.counting import counting_status
for _ in range(2):
    with MemoryBudget("1GiB") as budget:
        torch.nn.Linear(4, 4)(torch.randn(2, 4)).sum().backward()
status = counting_status()
print(status.is_on, status.reason, budget.summary().peak_bytes > 0)
"""
    done = run_without(environment, program, tmp_path)
    assert done.stdout.startswith("False")
    assert expected in done.stdout
    assert done.stdout.rstrip().endswith("True")
    warnings = [line for line in done.stderr.splitlines() if "not counting at the allocator" in line]
    assert len(warnings) == 1
    assert expected in warnings[0]


def test_the_status_names_what_is_in_use(counter: Counter) -> None:
    """With a counter at work the status says that it is on."""
    assert counter.live_bytes() >= 0
    assert counting_status().is_on
    assert counting_status().reason == "installed"
