"""How many programs are kept, and which are forgotten first."""

from __future__ import annotations

from torchdelta.plan.request import Answer
from torchdelta.runtime.follow.program import _MOST_PROGRAMS, Position, Program, ProgramCache
from torchdelta.runtime.follow.schedule import Schedule

BUDGET_BYTES = 1000


def _program(number: int, start_bytes: int = 0) -> Program:
    """Return a program of a step of its own."""
    schedule = Schedule(
        exact_hashes=(number,), shape_free_hashes=(1,), saved_bytes=(1,), first_saves={}, evictions={}, due={}
    )
    return Program(
        schedule=schedule, key=(1, number), start_bytes=start_bytes, answer=Answer(), step=None, margin_bytes=0
    )


def test_the_least_recently_used_program_is_forgotten() -> None:
    """The cache is bounded; a program that has carried out a step lately stays, however old it is."""
    cache = ProgramCache(BUDGET_BYTES)
    programs = [_program(number) for number in range(_MOST_PROGRAMS + 2)]
    for program in programs[:_MOST_PROGRAMS]:
        cache.add(program)
    cache.use(programs[0])
    for program in programs[_MOST_PROGRAMS:]:
        cache.add(program)
    assert len(cache) == _MOST_PROGRAMS
    assert cache.holds(programs[0])
    assert not cache.holds(programs[1])
    assert not cache.holds(programs[2])
    assert [program.key for program in cache] == [
        program.key for program in (*programs[3:_MOST_PROGRAMS], programs[0], *programs[_MOST_PROGRAMS:])
    ]


def test_programs_for_about_the_same_start_replace_each_other() -> None:
    """Of one step, there is one program for each start that differs by more than a fiftieth of the budget."""
    cache = ProgramCache(BUDGET_BYTES)
    first, near, far = _program(1, 500), _program(1, 510), _program(1, 600)
    for program in (first, near, far):
        cache.add(program)
    assert list(cache) == [near, far]
    assert cache.find((1, 1), 505) is near
    assert cache.find((1, 1), 560) is far
    assert cache.find((1, 1), 900) is None


def test_a_paused_program_is_followed_again() -> None:
    """Its step, and others that begin with the same tensors, react until it goes on; it does so in time."""
    cache = ProgramCache(BUDGET_BYTES)
    paused, other = _program(1), _program(2)
    position = Position()
    position.num_saves, position.exact = 1, 1
    cache.add(paused)
    cache.add(other)
    cache.pause(paused.key, is_paused=True)
    assert cache.choose(position) is None
    assert [cache.age_paused(3) for _ in range(3)] == [[], [], [paused.key]]
    assert cache.choose(position) == (paused, True)
    assert cache.age_paused(3) == []
    cache.pause(paused.key, is_paused=True)
    cache.pause(paused.key, is_paused=False)
    assert cache.choose(position) == (paused, True)
