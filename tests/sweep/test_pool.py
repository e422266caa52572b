"""The sweep's processes: what one class does to its process costs no other class its result."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sweep import judges
from tools.sweep import command, pool, report
from tools.sweep.journal import Journal
from tools.sweep.subjects import Subject
from torchdelta.native.build import is_switched_off

MODES = ("recompute", "swap", "mixed")
HARMS = ("crash in plain", "crash", "hang", "exit", "swallow memory")
LIMITS = pool.Limits(phase_s=2.0, memory_bytes=2**32)


@pytest.fixture(scope="module")
def harmed() -> dict[str, Any]:
    """Judge harmful subjects between harmless ones, all of one group."""
    names = [name for harm in HARMS for name in (f"before {harm}", harm)] + ["last"]
    groups = [[Subject(family="family", name=name, group="one") for name in names]]
    # The first process starts the fork server, whose imports must not count as hanging.
    list(pool.judge_groups(judges.harmless, groups, MODES, pool.Limits(phase_s=120, memory_bytes=2**32), num_workers=1))
    records = list(pool.judge_groups(judges.harmful, groups, MODES, LIMITS, num_workers=2))
    assert [record["name"] for record in records] == names
    return {record["name"]: record for record in records}


@pytest.mark.rest
def test_the_others_of_the_group_keep_their_results(harmed: dict[str, Any]) -> None:
    """Each harm ends its process; those after it get a new one."""
    harmless = [record for name, record in harmed.items() if name not in HARMS]
    assert len(harmless) == len(HARMS) + 1
    assert all(record["status"] == "judged" and record["modes"].keys() == set(MODES) for record in harmless)


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("crash", "crashed", "killed by SIGSEGV"),
        ("exit", "crashed", "exit code 3"),
        ("hang", "timeout", "not finished after 2 s"),
        ("swallow memory", "crashed", "exit code 1"),
    ],
)
def test_a_harm_is_told_with_its_mode_and_what_was_known(
    harmed: dict[str, Any], name: str, status: str, words: str
) -> None:
    """The mode in which it happened fails, the one before it keeps its verdict, the one after it was not run."""
    record = harmed[name]
    assert (record["status"], record["phase"], record["reason"]) == (status, "swap", words)
    assert [report.verdict_of(record, mode) for mode in MODES] == ["equal", status, "not run"]
    assert report.is_failed(record)


def test_a_crash_of_plain_eager_is_no_failure(harmed: dict[str, Any]) -> None:
    """Nothing of ours ran: the class is listed apart."""
    record = harmed["crash in plain"]
    assert not report.is_judgeable(record)
    assert not report.is_failed(record)


def test_a_whole_class_through_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One real class goes the whole way from its name to its verdicts, and something was really recomputed."""
    from tools.sweep.__main__ import build_parser

    monkeypatch.setattr(Journal, "_write", None)  # --only writes nothing
    # Without native parts every step is recorded: there is nothing to pause.
    wanted = [mode for mode in command.MODES if mode != "paused" or not is_switched_off()]
    options = build_parser().parse_args(["--only", "GPT2Model", "--workers", "1"])
    outcome = command.run(options)
    assert outcome.passed
    modes = outcome.data["families"]["transformers_classes"]["modes"]
    assert {mode: (found["num_equal"], found["nothing_left_memory"]) for mode, found in modes.items()} == {
        mode: (1, []) for mode in wanted
    }
    assert '"num_recomputed_ops"' in capsys.readouterr().out
