"""A sweep that was stopped goes on where it stopped, with nothing judged twice and nothing lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.launch import REPOSITORY
from tests.sweep import judges
from tools.sweep import command, pool
from tools.sweep.journal import SOURCES, Journal, describe, read
from tools.sweep.subjects import Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

LIMITS = pool.Limits(phase_s=1, memory_bytes=2**30)
SUBJECTS = [Subject(family="family", name=f"class {index}", group=f"group {index // 2}") for index in range(6)]
KEYS = [(subject.family, subject.name) for subject in SUBJECTS]


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Judge without processes, and tell who was judged."""
    names: list[str] = []

    def judge_groups(
        judge: Callable[..., Any], groups: Sequence[Sequence[Subject]], modes: Sequence[str], *_: Any, **__: Any
    ) -> Iterator[dict[str, Any]]:
        for subject in [subject for group in groups for subject in group]:
            names.append(subject.name)
            yield judge(subject, modes, lambda *_: None)

    monkeypatch.setattr(pool, "judge_groups", judge_groups)
    return names


def sweep(path: Path, subjects: list[Subject], header: dict[str, Any], forget: Any = ()) -> Journal:
    """Judge what a raw file does not hold yet."""
    journal = Journal(path, header, forget)
    command.judge_all(judges.harmless, subjects, journal, LIMITS, ["swap"], num_workers=1)
    return journal


@pytest.fixture
def header() -> dict[str, Any]:
    """The header of a sweep of these sources."""
    return describe(["swap"], LIMITS, threads=1)


def test_a_second_sweep_judges_only_what_is_missing(tmp_path: Path, judged: list[str], header: dict[str, Any]) -> None:
    """What the file holds is not judged again, and the file ends complete and in order."""
    path = tmp_path / "sweep.jsonl"
    sweep(path, SUBJECTS[2:5], header)
    judged.clear()
    journal = sweep(path, SUBJECTS, header)
    assert sorted(judged) == ["class 0", "class 1", "class 5"]
    assert list(journal.records) == KEYS
    assert [record["name"] for record in read(path)[1]] == [name for _, name in KEYS]


def test_a_killed_sweep_loses_at_most_the_line_it_was_writing(
    tmp_path: Path, judged: list[str], header: dict[str, Any]
) -> None:
    """Half a line at the end of the file is judged again, the lines before it are not."""
    path = tmp_path / "sweep.jsonl"
    sweep(path, SUBJECTS, header)
    path.write_text(path.read_text()[:-20])
    judged.clear()
    assert list(sweep(path, SUBJECTS, header).records) == KEYS
    assert judged == ["class 5"]


@pytest.mark.parametrize("condition", ["sources", "phase_s", "modes", "native"])
def test_results_of_other_conditions_are_not_taken_over(
    tmp_path: Path, judged: list[str], header: dict[str, Any], condition: str
) -> None:
    """Other sources or limits begin the file anew: old verdicts say nothing about them."""
    path = tmp_path / "sweep.jsonl"
    sweep(path, SUBJECTS, header)
    judged.clear()
    sweep(path, SUBJECTS, {**header, "conditions": {**header["conditions"], condition: "other"}})
    assert len(judged) == len(SUBJECTS)


def test_the_sources_are_all_files_of_the_library() -> None:
    """In Python and in C++."""
    watched = {path for pattern in SOURCES for path in REPOSITORY.glob(pattern)}
    library = REPOSITORY / "src" / "torchdelta"
    files = {path for path in library.rglob("*") if path.suffix in {".py", ".cpp", ".h"}}
    assert files
    assert files <= watched


def test_another_commit_of_the_same_sources_keeps_the_results(
    tmp_path: Path, judged: list[str], header: dict[str, Any]
) -> None:
    """A commit that changed other files makes nothing old; the file goes on stating the commit that it began with."""
    path = tmp_path / "sweep.jsonl"
    sweep(path, SUBJECTS, {**header, "commit": "first"})
    judged.clear()
    assert sweep(path, SUBJECTS, {**header, "commit": "second"}).header["commit"] == "first"
    assert judged == []


def test_named_records_are_judged_again(tmp_path: Path, judged: list[str], header: dict[str, Any]) -> None:
    """What failed can be tried again without the rest."""
    path = tmp_path / "sweep.jsonl"
    sweep(path, SUBJECTS, header)
    judged.clear()
    sweep(path, SUBJECTS, header, forget={KEYS[3]})
    assert judged == ["class 3"]


def test_wall_time_is_the_sum_over_the_sessions(tmp_path: Path, header: dict[str, Any]) -> None:
    """The time of an interrupted sweep includes what was done before it was resumed."""
    journal = Journal(tmp_path / "sweep.jsonl", header)
    for name, session, elapsed_s in (("a", "1", 10.0), ("b", "1", 25.0), ("c", "2", 5.0)):
        journal.records["family", name] = {"session": session, "elapsed_s": elapsed_s}
    assert journal.wall_s() == 30.0
