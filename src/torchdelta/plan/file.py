"""Plan files: JSON lines, gzip-compressed, as trace files are; a stranger reads them with zcat.

The first line is the header (`plan.model.PlanHeader`), then an absence or a replay a line, in the order of the plan.
"""

import gzip
import os
import zlib
from pathlib import Path

import msgspec

from torchdelta.errors import PlanError
from torchdelta.plan.model import FORMAT_NAME, FORMAT_VERSION, Absence, Plan, PlanHeader, Replay

__all__ = ["read_plan", "write_plan"]

_Record = PlanHeader | Absence | Replay


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a file; the same plan gives the same bytes."""
    encoder = msgspec.json.Encoder()
    lines = [encoder.encode(record) for record in (plan.header, *plan.absences, *plan.replays)]
    Path(path).write_bytes(gzip.compress(b"\n".join([*lines, b""]), mtime=0))


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan from a file.

    Raises:
        PlanError: The file is missing, damaged, foreign or of a newer version. One line that names the file.
    """
    try:
        lines = gzip.decompress(Path(path).read_bytes()).splitlines()
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "damaged, or not gzip"
        raise PlanError(f"{os.fspath(path)}: cannot read the plan: {reason}") from None
    decoder = msgspec.json.Decoder(_Record)
    records: list[_Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise PlanError(f"{os.fspath(path)}, line {number}: no record of a plan: {error}") from None
    header = records[0] if records else None
    if not isinstance(header, PlanHeader) or header.format != FORMAT_NAME:
        raise PlanError(f"{os.fspath(path)}: no plan file: its first line is not a plan's header")
    if header.version > FORMAT_VERSION:
        raise PlanError(f"{os.fspath(path)}: version {header.version} is newer than the {FORMAT_VERSION} known here")
    return Plan(
        header=header,
        absences=tuple(record for record in records if isinstance(record, Absence)),
        replays=tuple(record for record in records if isinstance(record, Replay)),
    )
