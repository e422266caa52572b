"""Instances and placements as CSV: `id,lower,upper,size`, the format of google/minimalloc, and `offset` in addition.

Other columns are kept out of the way: they are read over, and not written. Spaces around a column's name and before a
value do not count. A capacity may stand in the file's name, as theirs do: `A.1048576.csv`.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from typing import TYPE_CHECKING

import numpy as np

from torchdelta.errors import PoolError
from torchdelta.pool.model import MAX_BYTES, Instance, make_instance, quoted
from torchdelta.whole_file import write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_COLUMNS = ("id", "lower", "upper", "size")
_CAPACITY_IN_NAME = re.compile(r"\.(\d+)\.csv$")


def read_instance(path: Path, *, alignment_bytes: int = 1, capacity_bytes: int | None = None) -> Instance:
    """Read lives.

    Raises:
        PoolError: The file cannot be read, lacks a column, holds something that is no number, or no lives at all; or
            what `make_instance` raises.
    """
    rows = _rows(path, _COLUMNS)
    return make_instance(
        ids=[row["id"] for row in rows],
        starts=[_number(path, row, "lower") for row in rows],
        ends=[_number(path, row, "upper") for row in rows],
        sizes_bytes=[_number(path, row, "size") for row in rows],
        alignment_bytes=alignment_bytes,
        capacity_bytes=capacity_bytes,
    )


def capacity_in_name(path: Path) -> int | None:
    """Return the capacity that a file's name states, if it does."""
    found = _CAPACITY_IN_NAME.search(path.name)
    return int(found[1]) if found else None


def read_offsets(path: Path, instance: Instance) -> NDArray[np.int64]:
    """Read the offsets of an instance's lives from a placement.

    Raises:
        PoolError: As `read_instance`, or a life has no offset there, or an id has two, or an offset passes 2**62 bytes.
    """
    by_id: dict[str, int] = {}
    for row in _rows(path, ("id", "offset")):
        if row["id"] in by_id:
            raise PoolError(f"{path} has more than one offset for {quoted(row['id'])}: every life needs just one")
        offset = by_id[row["id"]] = _number(path, row, "offset")
        if abs(offset) > MAX_BYTES:
            raise PoolError(f"{path}: the offset of {quoted(row['id'])} passes 2**62 bytes")
    missing = [each for each in instance.ids if each not in by_id]
    if missing:
        raise PoolError(f"{path} has no offset for {quoted(missing[0])} and {len(missing) - 1} others")
    return np.array([by_id[each] for each in instance.ids], np.int64)


def write_placement(path: Path, instance: Instance, offsets_bytes: NDArray[np.int64]) -> None:
    """Write the columns of an instance, and the offsets.

    Raises:
        PoolError: The file cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    # Spaces before a value do not count, but within quotes they do.
    of_spaces = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow((*_COLUMNS, "offset"))
    columns = (instance.starts, instance.ends, instance.sizes_bytes, offsets_bytes)
    for row in zip(instance.ids, *(column.tolist() for column in columns), strict=True):
        (of_spaces if row[0].startswith(" ") else writer).writerow(row)
    try:
        write_whole(path, text.getvalue().encode())
    except OSError as error:
        raise PoolError(f"{path} cannot be written: {error.strerror}") from error


def _rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = itertools.dropwhile(lambda line: not line.strip(), file)
            reader = csv.DictReader(lines, skipinitialspace=True)
            reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
            missing = [column for column in columns if column not in reader.fieldnames]
            if missing:
                raise PoolError(f"{path} has no column {missing[0]!r}: its first line must name {', '.join(columns)}")
            rows = list(reader)
    except OSError as error:
        raise PoolError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise PoolError(f"{path} is no CSV file: {error}") from error
    if not rows:
        raise PoolError(f"{path} has no lives: nothing to place")
    for number, row in enumerate(rows, 1):
        if row["id"] is None:
            raise PoolError(f"{path}: row {number} ends before its id")
    return rows


def _number(path: Path, row: dict[str, str], column: str) -> int:
    text = row[column]
    try:
        return int(text)
    except (TypeError, ValueError):
        raise PoolError(f"{path}: the {column} of {quoted(row['id'])} is {quoted(text)}, not a whole number") from None
