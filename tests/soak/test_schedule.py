"""The soak's schedule: fair, repeatable, and the same for both processes."""

from __future__ import annotations

from collections import Counter

from benchmarks.soak import schedule


def test_a_round_meets_every_combination_once() -> None:
    """Every model meets every policy on every tier before any combination comes again."""
    num_episodes = schedule.num_episodes_a_round()
    for start in (0, num_episodes):
        episodes = [schedule.draw(3, start + index, 0) for index in range(num_episodes)]
        met = Counter((episode.model, episode.policy, episode.tier) for episode in episodes)
        assert len(met) == num_episodes
        assert set(met.values()) == {1}


def test_a_schedule_is_repeatable() -> None:
    """The same seed draws the same episodes, in another process too; another seed draws others."""
    assert schedule.draw(1, 5, 40) == schedule.draw(1, 5, 40)
    assert schedule.draw(1, 5, 40) != schedule.draw(2, 5, 40)


def test_every_fault_is_drawn() -> None:
    """A long run suffers all of them; the last step of an episode, which is measured, suffers none."""
    episodes = [schedule.draw(0, index, 0) for index in range(100)]
    faults = Counter(step.fault for episode in episodes for step in episode.steps)
    assert set(faults) == {"", *schedule.SHARED_FAULTS, *schedule.OWN_FAULTS}
    assert all(not episode.steps[-1].fault and episode.steps[-1].is_metered for episode in episodes)


def test_shapes_are_mixed_and_come_again() -> None:
    """Lengths change from step to step, and an episode returns to those that it has met."""
    episode = schedule.draw(0, 0, 0)
    shapes = [shape for step in episode.steps for shape in step.shapes]
    assert 1 < len(set(shapes)) <= schedule.NUM_SHAPES < len(shapes)
