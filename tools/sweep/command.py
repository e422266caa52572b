"""The sweep: its options, what is still to be judged, and its progress on stderr."""

from __future__ import annotations

import json
import random
import sys
import time
from typing import TYPE_CHECKING

from benchmarks import results
from tools.sweep import catalog, pool
from tools.sweep.journal import Journal, describe, key_of, read
from tools.sweep.judging import EVERYTHING, FOLLOWED, PAUSED
from tools.sweep.report import is_failed, sum_up
from torchdelta.native.build import is_switched_off

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.outcome import Outcome
    from tools.sweep.pool import Judge, Limits
    from tools.sweep.subjects import Subject

NAME = "sweep"
GIB = 2**30
MODES = ("recompute", "swap", "mixed", "bf16", FOLLOWED, EVERYTHING, PAUSED)
# A quick sweep judges every so many groups.
QUICK_STRIDE = 24
PROGRESS_S = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.set_defaults(timeout=240.0)
    parser.add_argument("--workers", type=int, default=2, help="processes that judge at the same time")
    parser.add_argument("--memory-gib", type=float, default=4.0, help="most memory of one of them (RLIMIT_DATA)")
    modes = [mode for mode in MODES if mode != PAUSED or not is_switched_off()]  # Python's recorder never pauses
    parser.add_argument("--modes", nargs="+", choices=MODES, default=modes)
    parser.add_argument("--families", nargs="+", choices=catalog.FAMILIES, default=list(catalog.FAMILIES))
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="judge these and print the records; writes nothing")
    parser.add_argument(
        "--rerun-failed",
        action="store_true",
        help="judge again what failed in the raw file; where that is of other sources, as --only does",
    )


def run(options: argparse.Namespace) -> Outcome:
    """Judge what the raw file does not hold yet, and sum all of it up."""
    limits = pool.Limits(phase_s=options.timeout, memory_bytes=int(options.memory_gib * GIB))
    header = describe(options.modes, limits, threads=options.threads)
    subjects = [subject for name in options.families for subject in catalog.family(name).subjects()]
    path = raw_path(options)
    old_header, old_records = read(path)
    failed = {key_of(record) for record in old_records if is_failed(record)} if options.rerun_failed else set()
    chosen = None
    if options.only:
        chosen = set(options.only)
    elif failed and old_header is not None and old_header["conditions"] != header["conditions"]:
        chosen = {name for _, name in failed}
    if chosen is not None:
        options.no_write = True
        unknown = chosen - {subject.name for subject in subjects}
        if unknown:
            raise SystemExit(f"not in {', '.join(options.families)}: {', '.join(sorted(unknown))}")
        subjects = [subject for subject in subjects if subject.name in chosen]
    elif options.quick:
        subjects = [subject for group in group_up(subjects)[::QUICK_STRIDE] for subject in group]
    journal = Journal(None if options.no_write else path, header, failed)
    judge_all(catalog.judge, subjects, journal, limits, options.modes, num_workers=options.workers)
    if chosen is not None:
        print(*(json.dumps(record, indent=1) for record in journal.records.values()), sep="\n")
    return sum_up(journal, subjects, options.modes, is_whole=chosen is None and not options.quick)


def raw_path(options: argparse.Namespace) -> Path:
    """Return the raw file that stands beside the summary."""
    return results.RESULTS / f"{results.file_name(NAME, options)}.jsonl"


def group_up(subjects: Sequence[Subject]) -> list[list[Subject]]:
    """Put the subjects of one group together."""
    groups: dict[tuple[str, str], list[Subject]] = {}
    for subject in subjects:
        groups.setdefault((subject.family, subject.group), []).append(subject)
    return list(groups.values())


def judge_all(
    judge: Judge,
    subjects: Sequence[Subject],
    journal: Journal,
    limits: Limits,
    modes: Sequence[str],
    *,
    num_workers: int,
) -> None:
    """Judge every subject that the journal has no record of."""
    waiting = [subject for subject in subjects if (subject.family, subject.name) not in journal.records]
    groups = group_up(waiting)
    # Neighbours in the alphabet share habits: a drawn order shows early what the whole will bring, and how long.
    random.Random(0).shuffle(groups)
    num_known = len(subjects) - len(waiting)
    if num_known:
        print(f"{num_known} of {len(subjects)} classes are in the raw file", file=sys.stderr)
    began_s = said_s = time.monotonic()
    num_failed = 0
    records = pool.judge_groups(judge, groups, modes, limits, num_workers=num_workers)
    for num_judged, record in enumerate(records, start=1):
        journal.add(record)
        num_failed += is_failed(record)
        now_s = time.monotonic()
        if is_failed(record):
            print(f"FAILED {record['name']}: {json.dumps(record)[:600]}", file=sys.stderr, flush=True)
        if now_s - said_s > PROGRESS_S:
            said_s = now_s
            left_s = (now_s - began_s) / num_judged * (len(waiting) - num_judged)
            words = f"{num_known + num_judged} of {len(subjects)} classes, {num_failed} failed"
            print(f"{words}, about {left_s / 60:.0f} minutes left", file=sys.stderr, flush=True)
    journal.finish((subject.family, subject.name) for subject in subjects)
