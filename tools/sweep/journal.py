"""The raw results, one JSON object a line, from which an interrupted sweep goes on.

The first line is a header: what was run, on what. A file whose header says anything else (other sources, versions or
limits) is of another sweep and is begun anew. Every record tells its session and how far into it it came, so that the
wall time of a sweep that was stopped and resumed, or killed, is the sum over its sessions.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import time
from typing import TYPE_CHECKING, Any

from benchmarks import results
from benchmarks.launch import REPOSITORY
from torchdelta.native.build import is_switched_off

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

    from tools.sweep.pool import Limits

Record = dict[str, Any]
Key = tuple[str, str]

# What a result depends on. A commit that changes only words elsewhere does not make the results old.
SOURCES = (
    "src/torchdelta/**/*.py",
    "src/torchdelta/native/*.cpp",
    "src/torchdelta/native/*.h",
    "tools/sweep/*.py",
    "tests/same_bits/*.py",
    "tests/following.py",
    "tests/paused.py",
)
PACKAGES = ("torch", "transformers", "numpy", "scipy")


def describe(modes: Sequence[str], limits: Limits, *, threads: int) -> Record:
    """Make the header of a sweep. Two sweeps with equal conditions may share a file; the commit is stated only."""
    conditions = {
        "sources": digest_sources(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "modes": list(modes),
        "phase_s": limits.phase_s,
        "memory_bytes": limits.memory_bytes,
        "threads": threads,
        "native": not is_switched_off(),
    }
    return {"conditions": conditions, "commit": results.commit()}


def digest_sources() -> str:
    """Return a short SHA-256 over the sources that results depend on."""
    sha = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(REPOSITORY.glob(pattern)):
            sha.update(str(path.relative_to(REPOSITORY)).encode())
            sha.update(path.read_bytes())
    return sha.hexdigest()[:16]


class Journal:
    """The records of one sweep, written down as they come.

    Args:
        path: None keeps them in memory only.
        forget: subjects whose records are left out, to be judged again.
    """

    def __init__(self, path: Path | None, header: Record, forget: Collection[Key] = ()) -> None:
        self.path = path
        self.header = header
        self.records: dict[Key, Record] = {}
        self._session = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._began_s = time.monotonic()
        if path is not None:
            old_header, records = read(path)
            if old_header is not None and old_header["conditions"] == header["conditions"]:
                self.header = old_header
                self.records = {key_of(record): record for record in records if key_of(record) not in forget}
            self._write()

    def add(self, record: Record) -> None:
        """Write a record down at once: a sweep may be stopped at any moment."""
        record = record | {"session": self._session, "elapsed_s": round(time.monotonic() - self._began_s, 1)}
        self.records[key_of(record)] = record
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_encode(record))

    def finish(self, order: Iterable[Key]) -> None:
        """Put the records into a fixed order, so that two sweeps can be compared line by line."""
        ordered = {key: self.records[key] for key in order if key in self.records}
        self.records = ordered | self.records
        if self.path is not None:
            self._write()

    def wall_s(self) -> float:
        """Return the time that all sessions took together."""
        sessions: dict[str, float] = {}
        for record in self.records.values():
            sessions[record["session"]] = max(sessions.get(record["session"], 0.0), record["elapsed_s"])
        return sum(sessions.values())

    def _write(self) -> None:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text("".join(map(_encode, [self.header, *self.records.values()])), encoding="utf-8")
        draft.replace(self.path)


def read(path: Path) -> tuple[Record | None, list[Record]]:
    """Read a raw file: its header, None where there is none, and its records."""
    lines: list[Record] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # half-written when the sweep was killed: that subject is judged again
    if not lines or "conditions" not in lines[0]:
        return None, []
    return lines[0], lines[1:]


def key_of(record: Record) -> Key:
    """Return what identifies a record's subject."""
    return record["family"], record["name"]


def _encode(record: Record) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"
