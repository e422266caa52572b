"""Bandwidth estimates: bytes over busy seconds, with little weight for tiny transfers."""

import pytest

from torchdelta.runtime.tiers.bandwidth import LinkEstimate

MIB = 1 << 20


def test_large_transfers_replace_the_start_value() -> None:
    """After a GiB at 2 GB/s the estimate is 2 GB/s, whatever it was."""
    link = LinkEstimate(1e8)
    now_s = 0.0
    for _ in range(64):
        link.start(now_s)
        now_s += 16 * MIB / 2e9
        link.end(now_s, 16 * MIB)
        now_s += 1.0  # idle time does not count
    assert link.bytes_per_s == pytest.approx(2e9, rel=1e-3)


def test_a_tiny_transfer_moves_it_little() -> None:
    """A kilobyte that took a millisecond, a thousandth of the bandwidth, is latency and not bandwidth."""
    link = LinkEstimate(1e9)
    link.start(0.0)
    link.end(1e-3, 1000)
    assert link.bytes_per_s == pytest.approx(1e9, rel=0.05)


@pytest.mark.parametrize("overlap_s", [0.0, 0.5])
def test_copies_side_by_side_share_their_seconds(overlap_s: float) -> None:
    """Two threads that each move 4 MiB in a second, in step or shifted, make a link of 8 MiB/s."""
    link = LinkEstimate(1e9)
    link.start(0.0)
    link.start(overlap_s)
    for second in range(1, 200):
        for now_s in (second, second + overlap_s):
            link.end(now_s, 4 * MIB)
            link.start(now_s)
    assert link.bytes_per_s == pytest.approx(8 * MIB, rel=0.1)


def test_a_failed_copy_says_nothing() -> None:
    """No bytes, no estimate."""
    link = LinkEstimate(1e9)
    link.start(0.0)
    link.end(5.0, 0)
    assert link.bytes_per_s == 1e9
