"""Sum a sweep up: counts and names by family and mode, and the promises that they keep or break."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from benchmarks.outcome import Outcome, format_table
from tools.sweep.catalog import HARNESS_FAILED, JUDGED
from tools.sweep.judging import BROKEN, EQUAL, EVERYTHING, FOLLOWED, NOT_REPRODUCIBLE, PLAIN_FAILS
from tools.sweep.pool import BUILD, CRASHED, TIMEOUT
from tools.sweep.subjects import AUTOCAST, PLAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.sweep.journal import Journal
    from tools.sweep.subjects import Subject

Record = dict[str, Any]

# How many classes must be equal in each mode of a whole sweep.
LEAST_EQUAL = {"transformers_classes": 730}
MOST_WALL_S = 3600.0
CUT_OFF = {CRASHED, TIMEOUT}
NOT_RUN = "not run"
LEAKS = "leaks"
COLUMNS = (EQUAL, *BROKEN, LEAKS, NOT_REPRODUCIBLE, PLAIN_FAILS, NOT_RUN)


def verdict_of(record: Record, mode: str) -> str:
    """Return a subject's verdict in a mode, also where its process did not come back."""
    if mode in record["modes"]:
        return record["modes"][mode]["verdict"]
    if record["phase"] == mode:
        return record["status"]
    return PLAIN_FAILS if record["phase"] == AUTOCAST else NOT_RUN


def is_judgeable(record: Record) -> bool:
    """Tell whether there was a plain step to compare with."""
    if record["status"] in CUT_OFF:
        return record["phase"] not in {BUILD, PLAIN}
    return record["status"] == JUDGED


def is_failed(record: Record) -> bool:
    """Tell whether a record breaks a promise."""
    if record["status"] in CUT_OFF:
        return record["phase"] not in {BUILD, PLAIN, AUTOCAST}
    found = record.get("modes", {}).values()
    return record["status"] == HARNESS_FAILED or any(f["verdict"] in BROKEN or LEAKS in f for f in found)


def sum_up(journal: Journal, subjects: Sequence[Subject], modes: Sequence[str], *, is_whole: bool) -> Outcome:
    """Print the tables and make the outcome; the counts of a whole sweep must reach what is promised."""
    outcome = Outcome()
    records = [journal.records[key] for s in subjects if (key := (s.family, s.name)) in journal.records]
    wall_s = journal.wall_s()
    outcome.data = {"conditions": journal.header["conditions"], "wall_s": round(wall_s, 1), "families": {}}
    for family in dict.fromkeys(subject.family for subject in subjects):
        ours = [record for record in records if record["family"] == family]
        num_subjects = sum(subject.family == family for subject in subjects)
        outcome.data["families"][family] = sum_up_family(outcome, family, ours, num_subjects, modes, is_whole=is_whole)
    if is_whole:
        detail = f"{wall_s / 60:.1f} minutes"
        outcome.check("the whole sweep in under 60 minutes", detail, passed=wall_s < MOST_WALL_S, required=False)
    return outcome


def sum_up_family(
    outcome: Outcome,
    family: str,
    records: Sequence[Record],
    num_subjects: int,
    modes: Sequence[str],
    *,
    is_whole: bool,
) -> dict[str, Any]:
    """Print one family's table and check its counts."""
    judgeable = [record for record in records if is_judgeable(record)]
    apart = group_by_reason(record for record in records if not is_judgeable(record))
    num_groups = len({record.get("model_type", record["group"]) for record in judgeable})
    num_apart = len(records) - len(judgeable)
    print(f"\n{family}: {num_subjects} classes, {len(judgeable)} trained ({num_groups} groups), {num_apart} not")
    names: dict[str, dict[str, list[str]]] = {mode: names_by_verdict(judgeable, mode) for mode in modes}
    print(format_table(["mode", *COLUMNS], [[m, *(str(len(names[m][c])) for c in COLUMNS)] for m in modes]))
    print_apart(names, apart)
    data: dict[str, Any] = {
        "num_subjects": num_subjects,
        "num_trained": len(judgeable),
        "num_groups": num_groups,
        "modes": {},
        "not_trained": apart,
    }
    sources = Counter(record["source"] for record in judgeable if "source" in record)
    if sources:
        data["inputs_from"] = dict(sources)
        print("inputs from:", ", ".join(f"{source} {num}" for source, num in sources.items()))
    for mode in modes:
        found = names[mode]
        broken = [f"{name} ({kind})" for kind in (*BROKEN, LEAKS, NOT_RUN) for name in found[kind]]
        detail = ", ".join(broken[:5]) or f"{len(found[EQUAL])} equal"
        outcome.check(f"{family} {mode}: nothing unequal, crashed or leaked", detail, passed=not broken)
        least = LEAST_EQUAL.get(family)
        if is_whole and least:
            num_equal = len(found[EQUAL])
            outcome.check(f"{family} {mode}: at least {least} equal", str(num_equal), passed=num_equal >= least)
        idle = [r["name"] for r in judgeable if r["modes"].get(mode, {}).get("verdict") == EQUAL and is_idle(r, mode)]
        data["modes"][mode] = {
            "num_equal": len(found[EQUAL]),
            **{kind.replace(" ", "_"): found[kind] for kind in COLUMNS[1:]},
            "nothing_left_memory": idle,
        }
        if mode == FOLLOWED:  # where everything may leave, steps are recorded as a whole
            native = [r for r in judgeable if r["modes"].get(mode, {}).get("num_native_steps")]
            data["modes"][mode]["num_with_native_steps"] = len(native)
    failed = [record["name"] for record in records if record["status"] == HARNESS_FAILED]
    if failed:
        outcome.check(f"{family}: the harness itself", f"failed on {', '.join(failed)}", passed=False)
    if len(records) < num_subjects:
        outcome.check(f"{family}: every class has a record", f"{num_subjects - len(records)} missing", passed=False)
    return data


def is_idle(record: Record, mode: str) -> bool:
    """Tell whether nothing left that this mode is about: equal bits then say little."""
    found = record["modes"][mode]
    if mode == EVERYTHING:
        return not found["num_emptied"]
    return not found["num_recomputed_ops"] and not found["swapped_out_bytes"]


def names_by_verdict(records: Sequence[Record], mode: str) -> dict[str, list[str]]:
    """Sort the names of the classes by their verdict in a mode."""
    names: dict[str, list[str]] = {column: [] for column in COLUMNS}
    for record in records:
        names[verdict_of(record, mode)].append(record["name"])
        if LEAKS in record.get("modes", {}).get(mode, {}):
            names[LEAKS].append(record["name"])
    return names


def group_by_reason(records: Any) -> dict[str, list[str]]:
    """Sort the names of the classes that could not be trained by the reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for record in records:
        words = record.get("reason", "")
        if record["status"] in CUT_OFF:
            words = f"plain eager itself, {record['phase']}: {words}"
        reasons[words].append(record["name"])
    return dict(sorted(reasons.items(), key=lambda item: -len(item[1])))


def print_apart(names: dict[str, dict[str, list[str]]], apart: dict[str, list[str]]) -> None:
    """Name everything that is neither equal nor trained."""
    for mode, found in names.items():
        for kind in COLUMNS[1:]:
            if found[kind]:
                print(f"{mode}, {kind}: {', '.join(found[kind])}")
    if apart:
        print("not trained, by reason:")
        for reason, classes in apart.items():
            print(f"  {reason}: {', '.join(classes)}")
