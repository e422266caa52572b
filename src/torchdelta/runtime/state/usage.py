"""What counts against the budget: the bytes of the known storages, and what the allocator counts beyond them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.native.counting import Counter, LimitedCounter

__all__ = ["Peak", "Usage"]

_NO_LIMIT: Final = (1 << 63) - 1


class Peak:
    """The highest bytes in use while this is measured."""

    __slots__ = ("size_bytes", "start_bytes")

    def __init__(self, start_bytes: int) -> None:
        self.start_bytes = self.size_bytes = start_bytes


class Usage:
    """Bytes in use on the device. `total_bytes` is what the budget limits. Mutable."""

    def __init__(self) -> None:
        self.live_bytes = 0  # of the known storages
        self.unseen_bytes = 0  # what the counter had beyond them when it was last asked
        self.uncertain_bytes = 0  # by how much an expensive counter may have risen since then (device/reserve.py)
        self.rounding_bytes = 0  # what the latest request may take of that; its memory may not be allocated yet
        self.num_readings = 0  # of an expensive counter
        self.counter: Counter | None = None  # at the allocator, if it exists (native/counting.py)
        self.is_counting = False  # false in a survey, whose storages take no memory
        self._is_exact = True  # whether the counter knows every byte at every moment
        self._is_cheap = True  # whether asking the counter is
        self._glance: Callable[[], int | None] | None = None  # reads the watch of an expensive counter
        self._peak_bytes = 0
        self._other_peaks: list[Peak] = []  # that are being measured beside `peak_bytes`

    def count_with(self, counter: Counter) -> None:
        """Count at the allocator from now on. Memory allocated before is added as it becomes known."""
        assert not self.live_bytes
        self.counter = counter
        self.is_counting = True
        self._is_exact = getattr(counter, "is_exact", True)  # an accelerator's (device/counter.py) is neither
        self._is_cheap = getattr(counter, "is_cheap", True)
        self._glance = getattr(counter, "glance_bytes", None)
        counter.start()

    def stop_counting(self) -> None:
        """Stop the allocator's counter, if there is one."""
        if self.counter is not None:
            self.counter.stop()

    def stop(self) -> None:
        """Stop counting, and reset the byte counts."""
        self.live_bytes = self.unseen_bytes = self.uncertain_bytes = self.rounding_bytes = 0
        self.is_counting = False
        self.counter = self._glance = None

    def set_limit(self, limit_bytes: int, most_bytes: int | None, on_limit: Callable[[], object]) -> None:
        """Call back, between two instructions of Python, once more than `limit_bytes` are in use.

        Args:
            limit_bytes: The limit.
            most_bytes: Allocations beyond these are refused with torch's own error; None: none are.
            on_limit: The callback.
        """
        if self.counter is not None:
            refused_bytes = _NO_LIMIT if most_bytes is None else most_bytes
            cast("LimitedCounter", self.counter).set_limit(limit_bytes, refused_bytes, on_limit)

    def clear_limit(self) -> None:
        """Have no limit from now on."""
        if self.counter is not None:
            cast("LimitedCounter", self.counter).clear_limit()

    @property
    def has_exact_peak(self) -> bool:
        """Whether `peak_bytes` is measured at the allocator, to the byte."""
        return self.is_counting and self._is_exact

    @property
    def sees_peaks(self) -> bool:
        """Whether `peak_bytes` is measured at the allocator; otherwise it is computed from known sizes.

        If so, limits call back as well.
        """
        return self.is_counting and self.counter is not None and getattr(self.counter, "sees_peaks", True)

    @property
    def total_bytes(self) -> int:
        """The bytes that count against the budget."""
        return self.live_bytes + self.unseen_bytes

    @property
    def most_bytes(self) -> int:
        """The same with all that the latest reading of an expensive counter may lack."""
        return self.live_bytes + self.unseen_bytes + self.uncertain_bytes

    def ask_counter(self, *, fresh: bool = False) -> None:
        """Update the bytes that live in no known storage. Negative: the known storages have more than the counter.

        Args:
            fresh: Ask even if that is expensive. Otherwise an expensive counter is not read: the running count of its
                watch is used, or, without one, the latest reading.
        """
        if not self.is_counting or self.counter is None:
            return
        if fresh or self._is_cheap:
            self.unseen_bytes = self.counter.live_bytes() - self.live_bytes
            if not self._is_cheap:
                self.uncertain_bytes = self.rounding_bytes
                self.num_readings += 1
            self._raise_peak(self.live_bytes)
        elif self._glance is not None and (counted_bytes := self._glance()) is not None:
            self.unseen_bytes = counted_bytes - self.live_bytes

    def take_missed_bytes(self) -> int | None:
        """Return by how much the count of a watch was too low since the last call; None if nothing is watched."""
        take = getattr(self.counter, "take_missed_bytes", None)
        return take() if take is not None else None

    @property
    def peak_bytes(self) -> int:
        """The highest bytes in use since this was last set."""
        self._take_peak()
        return self._peak_bytes

    @peak_bytes.setter
    def peak_bytes(self, size_bytes: int) -> None:
        self._take_peak()
        self._peak_bytes = size_bytes

    def begin_peak(self) -> Peak:
        """Begin to measure one more peak, whoever sets `peak_bytes` meanwhile. Call this only if `sees_peaks`."""
        self.ask_counter(fresh=True)
        self._take_peak()
        peak = Peak(self.total_bytes)
        self._other_peaks.append(peak)
        return peak

    def end_peak(self, peak: Peak) -> None:
        """End what `begin_peak` began. `peak` has its result."""
        self._take_peak()
        self._other_peaks.remove(peak)

    def _take_peak(self) -> None:
        if self.sees_peaks and self.counter is not None:
            taken_bytes = self.counter.take_peak_bytes()
            self._peak_bytes = max(self._peak_bytes, taken_bytes)
            for peak in self._other_peaks:
                peak.size_bytes = max(peak.size_bytes, taken_bytes)

    def restart_peak(self) -> None:
        """Start a new peak at the current usage."""
        self.ask_counter(fresh=True)
        self.peak_bytes = self.total_bytes

    def add(self, size_bytes: int) -> None:
        """Add the bytes by which the known storages have grown. Negative: they have shrunk."""
        self.live_bytes += size_bytes
        if size_bytes > 0 and not (self.is_counting and self._is_exact):
            self._raise_peak(self.live_bytes)

    def note_workspace(self, size_bytes: int) -> None:
        """Count the estimated workspace of the last op in the peak."""
        self._raise_peak(self.live_bytes + size_bytes)

    def _raise_peak(self, size_bytes: int) -> None:
        if not self.sees_peaks:
            self._peak_bytes = max(self._peak_bytes, size_bytes + self.unseen_bytes + self.uncertain_bytes)

    # -- growth, if there is a counter

    def mark(self) -> bool:
        """Begin to measure growth. Return whether there is a counter to measure with."""
        if self.is_counting and self.counter is not None:
            self.counter.mark()
            return True
        return False

    def growth_bytes(self) -> int | None:
        """Return the highest growth since the last mark, or None without a counter."""
        return self.counter.growth_bytes() if self.is_counting and self.counter is not None else None
