"""Ratios of blocks that took turns: by rounds, and by the plain steps beside each block."""

from __future__ import annotations

import pytest

from benchmarks.turns import (
    BESIDE,
    FEWEST_SAMPLES,
    IN_PAIRS,
    PLAIN,
    Block,
    fair_rounds,
    median_interval,
    name_of_interval,
    ratios,
)


def block(step_s: float, beside_s: float | None = None) -> Block:
    """Return a block of steps of one length, whose first one is slow."""
    made: Block = {"times_s": [9 * step_s, step_s, step_s]}
    if beside_s is not None:
        made[BESIDE] = block(beside_s)
    return made


def test_without_plain_steps_beside_it_a_block_is_divided_by_that_of_the_same_round() -> None:
    """Rounds in which one of the two is missing do not count."""
    rounds = [{PLAIN: block(1.0), "a": block(1.5)}, {PLAIN: block(2.0)}, {PLAIN: block(2.0), "a": block(4.0)}]
    assert ratios(rounds, "a") == [1.5, 2.0]


def test_plain_steps_beside_a_block_take_a_change_of_speed_out() -> None:
    """The machine halved its speed after plain's own block, and doubled it again before the third block."""
    rounds = [{PLAIN: block(1.0), "a": block(2.4, 2.0), "b": block(1.5, 1.0)}]
    assert ratios(rounds, "a") == [pytest.approx(1.2)]
    assert ratios(rounds, "a", "b") == [pytest.approx(1.2 / 1.5)]
    assert ratios(rounds, PLAIN) == [1.0]


def test_steps_that_alternate_with_plain_ones_are_compared_pair_by_pair() -> None:
    """The machine changed its speed twice within the block; the first pair does not count."""
    pairs: Block = {"times_s": [5.0, 1.2, 2.4, 3.6], BESIDE: {"times_s": [1.0, 1.0, 2.0, 3.0], IN_PAIRS: True}}
    other: Block = {"times_s": [5.0, 3.0, 3.0, 1.5], BESIDE: {"times_s": [1.0, 2.0, 2.0, 1.0], IN_PAIRS: True}}
    rounds = [{PLAIN: block(1.0), "a": pairs, "b": other}]
    assert ratios(rounds, "a") == [pytest.approx(1.2)]
    assert ratios(rounds, "a", "b") == [pytest.approx(1.2 / 1.5)]


def test_the_interval_holds_the_median() -> None:
    """One sample is its own interval."""
    assert str(median_interval([1.25])) == "1.250"
    spread = median_interval([1.0, 1.1, 1.5])
    assert spread.low <= spread.median == 1.1 <= spread.high
    with pytest.raises(ValueError, match="no samples"):
        median_interval([])


def test_an_interval_of_few_rounds_is_not_called_one_of_95_percent() -> None:
    """Its ends are the lowest and the highest round, which enclose the median less often; of one round it has none."""
    for num_samples in range(2, FEWEST_SAMPLES):
        samples = [float(value) for value in range(num_samples)]
        interval = median_interval(samples)
        assert (interval.low, interval.high) == (samples[0], samples[-1])
        assert 1 - 2 ** (1 - num_samples) < 0.95
        assert "95 %" not in name_of_interval(num_samples)
    assert 1 - 2 ** (1 - FEWEST_SAMPLES) >= 0.95
    assert "95 %" in name_of_interval(FEWEST_SAMPLES)


def _pair(own_s: float, plain_s: float) -> Block:
    return {"times_s": [9.0, *[own_s] * 3], BESIDE: {"times_s": [9.0, *[plain_s] * 3], IN_PAIRS: True}}


def test_plain_steps_that_are_slower_beside_budgets_count_for_nobody() -> None:
    """A plain process that waits beside a budget loses its pages, and not beside the others."""
    blocks = {PLAIN: _pair(4.0, 4.0), "checkpoint": _pair(5.0, 4.0), "followed @ 50%": _pair(4.2, 5.6)}
    assert ratios([blocks], "followed @ 50%") == pytest.approx([0.75])
    (fair,) = fair_rounds([blocks])
    assert ratios([fair], "followed @ 50%") == pytest.approx([4.2 / 4.0])
    assert ratios([fair], "followed @ 50%", "checkpoint") == pytest.approx([4.2 / 5.0])
    blocks["followed @ 50%"] = _pair(4.2, 4.1)
    assert fair_rounds([blocks]) == [blocks]
