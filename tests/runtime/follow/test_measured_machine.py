"""What copies take from kernels is measured beside the steps, and priced by the planner's machine."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from torchdelta.runtime.follow import measured_machine
from torchdelta.runtime.follow.measured_machine import MeasuredMachine
from torchdelta.runtime.state.counters import Counters

GB = 10**9
CPU = torch.device("cpu")


class Clocks:
    """The time, the stolen time and the bytes moved so far, as a test sets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time_s = 100.0
        self.stolen_s: float | None = 7.0
        self.counters = Counters()
        monkeypatch.setattr(measured_machine, "read_stolen_s", lambda: self.stolen_s)
        monkeypatch.setattr(measured_machine.time, "perf_counter", lambda: self.time_s)

    def machine(self, device: torch.device = CPU, tier_name: str = "disk") -> MeasuredMachine:
        """Return a machine with a tier that moves 1 GB/s, and whose copying threads take 0.1 s for a GB."""
        tier = SimpleNamespace(
            name=tier_name,
            write_bytes_per_s=1.0 * GB,
            read_bytes_per_s=1.0 * GB,
            write_cpu_s_per_byte=0.1 / GB,
            read_cpu_s_per_byte=0.1 / GB,
            capacity_bytes=None,
        )
        transfers = SimpleNamespace(tier=tier, counters=self.counters)
        return MeasuredMachine(transfers, device, budget_bytes=GB)  # pyright: ignore[reportArgumentType]

    def step(self, machine: MeasuredMachine, *, stolen_s: float, out_bytes: int = 0, in_bytes: int = 0) -> None:
        """End a step of a second."""
        self.time_s += 1.0
        if self.stolen_s is not None:
            self.stolen_s += stolen_s
        self.counters.swapped_out_bytes += out_bytes
        self.counters.swapped_in_bytes += in_bytes
        machine.observe()


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    """Return clocks that stand still between steps, on a machine whose kernels lose what copies take."""
    monkeypatch.setattr(measured_machine, "_LOST_ON_ALL_CORES", 1.0)
    monkeypatch.setattr(measured_machine, "_ASSUMED_BYTES", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return Clocks(monkeypatch)


def test_stolen_time_counts_like_that_of_the_copying_threads(clocks):
    """Kernels on all cores lose all of it."""
    machine = clocks.machine()
    machine.observe()
    clocks.step(machine, stolen_s=0.4, out_bytes=GB // 2, in_bytes=GB // 2)
    now = machine.now()
    assert now.out_compute_s_per_byte == now.in_compute_s_per_byte == pytest.approx(0.5 / GB)


def test_kernels_beside_a_free_core_lose_less(clocks, monkeypatch):
    """One thread of two cores."""
    machine = clocks.machine()
    machine.observe()
    clocks.step(machine, stolen_s=0.4, out_bytes=GB)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert 0.0 < machine.now().out_compute_s_per_byte < 0.5 / GB


def test_what_is_stolen_without_copies_is_not_theirs(clocks):
    """A neighbour of a virtual machine takes a share all the time."""
    machine = clocks.machine()
    machine.observe()
    for _ in range(20):
        clocks.step(machine, stolen_s=0.3)
    clocks.step(machine, stolen_s=0.5, out_bytes=GB)
    assert machine.now().out_compute_s_per_byte == pytest.approx(0.3 / GB, rel=0.01)


def test_a_busy_neighbour_makes_a_copy_at_most_one_core_dearer(clocks):
    """Few bytes in a second of which the neighbour takes half."""
    machine = clocks.machine()
    machine.observe()
    clocks.step(machine, stolen_s=0.5, out_bytes=GB // 1000)
    assert machine.now().out_compute_s_per_byte == pytest.approx(1.1 / GB)


def test_without_stolen_time_more_than_the_thread_time_is_lost(clocks):
    """The kernel does not tell, or no step has ended yet."""
    clocks.stolen_s = None
    machine = clocks.machine()
    machine.observe()
    clocks.step(machine, stolen_s=0.0, out_bytes=GB)
    assert machine.now().out_compute_s_per_byte > 0.1 / GB


def test_until_much_is_copied_what_other_machines_lost_counts(clocks, monkeypatch):
    """A first reading may be a neighbour's; many bytes later, only what is read here counts."""
    monkeypatch.setattr(measured_machine, "_ASSUMED_BYTES", GB // 10)
    monkeypatch.setattr(measured_machine, "_STOLEN_ON_ALL_CORES_S", 0.25 / GB)
    machine = clocks.machine()
    machine.observe()
    assert machine.now().out_compute_s_per_byte == pytest.approx(0.35 / GB)
    clocks.step(machine, stolen_s=0.09, out_bytes=GB // 10)
    assert 0.5 / GB < machine.now().out_compute_s_per_byte < 0.9 / GB
    for _ in range(200):
        clocks.step(machine, stolen_s=0.04, out_bytes=GB // 20)
    assert machine.now().out_compute_s_per_byte == pytest.approx(0.9 / GB, rel=0.01)


def test_copies_within_memory_are_not_taken_to_cost_what_those_of_a_disk_do(clocks, monkeypatch):
    """No disk's work is in them."""
    monkeypatch.setattr(measured_machine, "_ASSUMED_BYTES", GB)
    machine = clocks.machine(tier_name="memory")
    machine.observe()
    assert machine.now().out_compute_s_per_byte == pytest.approx(0.1 / GB)


def test_the_newest_copies_count_most(clocks):
    """A disk that other jobs have left."""
    machine = clocks.machine()
    machine.observe()
    clocks.step(machine, stolen_s=0.8, out_bytes=GB)
    for _ in range(4):
        clocks.step(machine, stolen_s=0.2, out_bytes=GB)
    assert machine.now().out_compute_s_per_byte == pytest.approx(0.3 / GB, rel=0.01)


def test_a_few_copied_bytes_say_little(clocks):
    """The kernel counts in steps of 10 ms: one of them beside 4 KiB is no rate."""
    machine = clocks.machine()
    machine.observe()
    clocks.step(machine, stolen_s=0.01, out_bytes=4096)
    clocks.step(machine, stolen_s=0.02, out_bytes=GB // 10)
    assert 0.3 / GB < machine.now().out_compute_s_per_byte < 0.4 / GB


def test_a_count_that_falls_is_left_out(clocks):
    """The thread may use fewer processors than before."""
    machine = clocks.machine()
    machine.observe()
    clocks.step(machine, stolen_s=0.2, out_bytes=GB)
    clocks.step(machine, stolen_s=-50.0)
    clocks.step(machine, stolen_s=-50.0, out_bytes=GB)
    clocks.step(machine, stolen_s=0.2, out_bytes=GB)
    assert machine.now().out_compute_s_per_byte == pytest.approx(0.3 / GB)


def test_readings_are_some_time_apart(clocks, monkeypatch):
    """Steps of a millisecond do not read a file of the kernel each."""
    machine = clocks.machine()
    readings = []
    monkeypatch.setattr(measured_machine, "read_stolen_s", lambda: readings.append(0) or 0.0)
    for _ in range(1000):
        clocks.time_s += 0.001
        machine.observe()
    assert 1 <= len(readings) <= 3


def test_copies_of_other_devices_take_nothing_from_kernels(clocks):
    """They have engines of their own."""
    machine = clocks.machine(torch.device("cuda", 0))
    machine.observe()
    clocks.step(machine, stolen_s=0.4, out_bytes=GB)
    now = machine.now()
    assert now.out_compute_s_per_byte == now.in_compute_s_per_byte == now.copy_compute_s == 0.0


def test_what_steps_took_more_than_predicted_is_the_cost_of_copies(clocks):
    """It is divided as the times of the copies are, and counts until it is forgotten."""
    machine = clocks.machine()
    planned = machine.now()
    both_s = planned.out_compute_s_per_byte + planned.in_compute_s_per_byte
    assert machine.learn(planned, 0.25, GB // 2)
    now = machine.now()
    assert now.out_compute_s_per_byte + now.in_compute_s_per_byte == pytest.approx(both_s + 0.5 / GB)
    assert now.out_compute_s_per_byte == pytest.approx(now.in_compute_s_per_byte)
    machine.forget()
    assert machine.now() == planned


@pytest.mark.parametrize(("more_s", "swapped_bytes"), [(0.25, 0), (2.5, GB), (-1.5, GB)])
def test_copies_cannot_take_more_than_their_time_or_less_than_nothing(clocks, more_s, swapped_bytes):
    """Then something else was predicted wrongly, and nothing is learned."""
    machine = clocks.machine()
    planned = machine.now()
    assert not machine.learn(planned, more_s, swapped_bytes)
    assert machine.now() == planned


def test_a_disk_shares_its_rate_between_both_directions(clocks: Clocks) -> None:
    """Host memory does not."""
    assert clocks.machine().now().both_ways_factor < 1
    assert clocks.machine(tier_name="memory").now().both_ways_factor == 1
