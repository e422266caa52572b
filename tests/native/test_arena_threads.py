"""The arena and who shares its process: other threads, threads that end, forked children, the garbage collector."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

from tests.native.steps import LEAST_BYTES, block, cut, is_full_of, settle
from torchdelta.errors import NativeError
from torchdelta.native.arena import arena_status, new_arena

if TYPE_CHECKING:
    from torchdelta.native.arena import Arena


def test_other_threads_change_nothing(arena: Arena) -> None:
    """While another thread allocates and frees, its own tensors and ours, the placing goes on as without it."""
    is_over = threading.Event()
    num_wrong: list[int] = []
    to_free: list[torch.Tensor] = []

    def work() -> None:
        generator = random.Random(0)
        held: list[torch.Tensor] = []
        while not is_over.is_set():
            held.append(block(generator.randint(1, 200), 7))
            if len(held) > 20 and not is_full_of(held.pop(generator.randrange(20)), 7):
                num_wrong.append(1)
            if to_free:
                to_free.pop()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for number in range(200):
            held = [block(size, number + size) for size in (40, 50, 60, 70)]
            assert all(is_full_of(t, number + size) for t, size in zip(held, (40, 50, 60, 70), strict=True))
            to_free.append(held.pop())
            del held
            while to_free:
                pass
            cut(arena)
    finally:
        is_over.set()
        thread.join()
    assert not num_wrong
    figures = arena.figures()
    assert figures["num_planned_steps"] >= 190
    assert figures["num_left_plans"] == 0
    assert figures["num_clashes"] <= 20  # a free by the other thread may come a little later than the next allocation


def test_a_forked_child_allocates_as_ever(arena: Arena) -> None:
    """What the parent holds is whole in the child, and what the child does stays there."""
    settle(arena, lambda: [block(64), block(64)])
    held = block(64, 9)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # OpenMP's threads do not exist in the child, and plain torch would wait for them
        is_right = is_full_of(held, 9) and is_full_of(block(64, 3), 3)
        held.zero_()
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert is_full_of(held, 9)


def test_one_arena_a_thread(arena: Arena) -> None:
    """A second one on the same thread is refused; on another thread it has plans of its own."""
    other = new_arena(least_bytes=LEAST_BYTES)
    assert not isinstance(other, NativeError)
    with pytest.raises(RuntimeError, match="already"):
        other.start()
    figures: dict[str, int] = {}

    def work() -> None:
        other.start()
        settle(other, lambda: block(30), 4)
        figures.update(other.figures())
        other.stop()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert figures["num_planned_steps"] == 2
    assert arena.figures()["num_steps"] == 0


def test_a_thread_that_ends_takes_its_arena_along(arena: Arena) -> None:
    """Nobody else may stop it while the thread lives; with the thread its plans and its region are gone."""
    before = arena_status().figures
    other = new_arena(least_bytes=LEAST_BYTES)
    assert not isinstance(other, NativeError)
    is_settled, may_end = threading.Event(), threading.Event()

    def work() -> None:
        other.start()
        settle(other, lambda: block(30), 4)
        is_settled.set()
        may_end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    is_settled.wait()
    try:
        with pytest.raises(RuntimeError, match="on another thread"):
            other.stop()
        arena.stop()
        with pytest.raises(RuntimeError, match="another thread already has"):
            other.start()
        assert other.figures()["num_plans"] == 1
        assert arena_status().figures.mapped_bytes > before.mapped_bytes
    finally:
        may_end.set()
        thread.join()
    deadline_s = time.monotonic() + 30
    while other.figures()["num_plans"] > 0 and time.monotonic() < deadline_s:
        time.sleep(0.001)  # Python has let the thread go a little before the system does
    assert other.figures()["num_plans"] == 0
    other.stop()  # nothing is left to be stopped
    assert arena_status().figures.mapped_bytes == before.mapped_bytes
    other.start()
    settle(other, lambda: block(30), 4)
    assert other.figures()["num_planned_steps"] == 4
    other.stop()


def test_an_arena_that_nobody_holds_is_stopped() -> None:
    """Its thread allocates as ever, and can have another one; what lives is whole."""
    before_bytes = arena_status().figures.mapped_bytes
    first, second = (new_arena(least_bytes=LEAST_BYTES) for _ in range(2))
    if isinstance(first, NativeError) or isinstance(second, NativeError):
        pytest.skip("no arena here")
    first.start()
    settle(first, lambda: block(30), 4)
    held = block(30, 4)
    del first
    others = [block(30, 5) for _ in range(8)]
    second.start()
    settle(second, lambda: block(30), 4)
    second.stop()
    assert is_full_of(held, 4)
    assert all(is_full_of(tensor, 5) for tensor in others)
    del held, others
    assert arena_status().figures.mapped_bytes == before_bytes


COLLECTED = """
import array, gc, torch
from torchdelta.native.arena import arena_status, new_arena
arena = new_arena()
arena.start()
for call in (arena.figures, arena_status, arena.cut, arena.recording, lambda: arena.plan(b"")):
    for number in range(3):
        gc.disable()
        cycle = [torch.ones(50_000)]
        cycle.append(cycle)
        dicts = [{} for _ in range(1000)]  # no freed ones are left: those come without a collection
        gc.set_threshold(1)
        del cycle
        gc.enable()
        try:
            call()
        except ValueError:
            pass
        gc.set_threshold(700)
        arena.cut()
arena.stop()
print("ok")
"""


def test_tensors_may_be_collected_while_it_is_asked(arena: Arena) -> None:
    """Whatever is returned is an allocation of Python's, which may free tensors: the arena must not be locked then."""
    assert arena.figures()["num_steps"] == 0
    done = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "ok", done.stderr
