"""Memory that runs out inside the copier itself, and other errors at unlucky places: nothing hangs, no room is lost."""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.runtime.tiers.media import ScriptedMedium
from tests.runtime.tiers.storages import filled_storage, is_equal
from torchdelta.errors import TierIOError
from torchdelta.runtime.tiers import copier
from torchdelta.runtime.tiers.bandwidth import LinkEstimate
from torchdelta.runtime.tiers.pooled import PooledTier
from torchdelta.runtime.tiers.slots import SlotAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 30.0


class Once:
    """A function that finds no memory when it is first called."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.has_failed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise, or call the original."""
        if not self.has_failed:
            self.has_failed = True
            raise MemoryError("none left")
        return self.original(*args, **kwargs)


class FailingDeque(deque[Any]):
    """A deque that finds no memory for its first number: the key of a finished copy."""

    has_failed = False

    def append(self, item: Any, /) -> None:
        """Raise, or append."""
        if isinstance(item, int) and not self.has_failed:
            self.has_failed = True
            raise MemoryError("none left")
        super().append(item)


class FailingQueue:
    """A queue that finds no memory for its first item."""

    def __init__(self) -> None:
        items: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.put = Once(items.put)
        self.get = items.get


@pytest.fixture
def tier() -> Iterator[PooledTier]:
    """Open a tier with one thread."""
    tier = PooledTier(ScriptedMedium(is_open=True), capacity_bytes=None)
    yield tier
    tier.close()


def ends(call: Callable[[], object]) -> BaseException | None:
    """Call a function on another thread, which must end. Return its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - whatever it is
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    return errors[0] if errors else None


@pytest.mark.parametrize("where", ["estimate begins", "estimate ends", "clock", "list of finished copies", "token"])
def test_a_copy_ends_wherever_there_is_no_memory(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """It succeeds or fails, but the thread lives on, and later copies are made."""
    if where == "list of finished copies":
        monkeypatch.setattr(copier, "deque", FailingDeque)
    elif where == "token":
        monkeypatch.setattr(copier, "SimpleQueue", FailingQueue)
    tier = PooledTier(ScriptedMedium(is_open=True), capacity_bytes=None)
    if where == "estimate begins":
        monkeypatch.setattr(LinkEstimate, "start", Once(tier.copier.write_link.start))
    elif where == "estimate ends":
        monkeypatch.setattr(LinkEstimate, "end", Once(tier.copier.write_link.end))
    elif where == "clock":
        monkeypatch.setattr(time, "thread_time", Once(time.thread_time))
    slot = tier.reserve(512)

    def copy() -> None:
        tier.write(slot, filled_storage(512, 1)).wait()

    error = ends(copy)
    assert error is None or isinstance(error, TierIOError | MemoryError)
    assert ends(tier.drain) is None
    monkeypatch.undo()
    assert ends(copy) is None
    target = torch.UntypedStorage(512)
    assert ends(lambda: tier.read(slot, target).wait()) is None
    assert is_equal(target, filled_storage(512, 1))
    tier.release(slot)
    assert tier.used_bytes == 0
    tier.close()


def test_room_is_given_back_once(tier: PooledTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if giving it back ends with an error: else two slots would share their bytes."""
    slots = [tier.reserve(1024) for _ in range(3)]
    tier.release(slots[0])
    tier.release(slots[2])
    original = SlotAllocator.give_back

    def give_back(pool: SlotAllocator, extents: Any) -> None:
        original(pool, extents)
        monkeypatch.undo()
        raise MemoryError("none left")

    monkeypatch.setattr(SlotAllocator, "give_back", give_back)
    with pytest.raises(MemoryError):
        tier.release(slots[1])
    first, second = tier.reserve(1024), tier.reserve(3072)
    extents = [*first.extents, *second.extents]
    taken = [range(extent.offset_bytes, extent.offset_bytes + extent.size_bytes) for extent in extents]
    assert sum(len(part) for part in taken) == 4096
    assert len({offset for part in taken for offset in part[::64]}) == 4096 // 64
    assert tier.used_bytes == 4096


def test_a_collection_inside_of_a_release_may_close_the_tier(tier: PooledTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """It frees the last graph of a session, say, which ends the session."""
    slot = tier.reserve(512)

    class Graph:
        """Closes the tier when it dies, in a cycle."""

        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            tier.close()

    def collect(slot: object) -> None:
        del slot
        gc.collect()

    monkeypatch.setattr(tier.copier, "cancel_unstarted_write", collect)
    Graph()
    assert ends(lambda: tier.release(slot)) is None
    assert tier.used_bytes == 0
    assert tier.copier.is_closing


def test_checking_what_was_written_teaches_nothing_about_the_link(
    tier: PooledTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts are read one after the other, which is slower than how the runtime reads."""
    slot = tier.reserve(1024)
    tier.write(slot, filled_storage(1024, 1)).wait()
    learned: list[object] = []
    monkeypatch.setattr(LinkEstimate, "end", lambda *args: learned.append(args))
    tier.check_readable(slot)
    assert not learned
