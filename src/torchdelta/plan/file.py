"""Plan files: the header, then absences and replays in the order of the plan, in the frame of `trace/frame.py`.

`docs/plan-format.md` is the reference for everybody else. Every failure is a `PlanError`. Plans of version 1 have no
end record: of such a file a cut is noticed only where gzip notices it. What version 2 did not say has a default that
means what it meant.
"""

import os

import msgspec

from torchdelta.errors import PlanError
from torchdelta.plan.model import FORMAT_NAME, FORMAT_VERSION, READABLE_VERSIONS, Absence, Plan, PlanHeader, Replay
from torchdelta.trace.frame import FileKind, LineWriter, check_version, damaged, one_line, read_lines

__all__ = ["End", "read_plan", "write_plan"]

_KIND = FileKind(noun="plan", format=FORMAT_NAME, versions=READABLE_VERSIONS, error=PlanError)


class End(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="end", forbid_unknown_fields=True):
    """The last record of a file: how many there are of each kind.

    Attributes:
        num_absences: Records tagged `absence`.
        num_replays: Records tagged `replay`.
    """

    num_absences: int
    num_replays: int


_encode = msgspec.json.Encoder().encode
_decode_header = msgspec.json.Decoder(PlanHeader).decode
_decode_record = msgspec.json.Decoder(Absence | Replay | End).decode


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a file; the same plan gives the same bytes.

    Raises:
        PlanError: The file cannot be written.
    """
    writer = LineWriter(path, _KIND, _encode(plan.header))
    try:
        for record in (*plan.absences, *plan.replays):
            writer.put(_encode(record))
    except BaseException:
        writer.abort()
        raise
    writer.close(_encode(End(num_absences=len(plan.absences), num_replays=len(plan.replays))))


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan from a file. Whether it is a plan of a trace, `plan.validate` tells.

    Raises:
        PlanError: The file is missing, damaged, cut short, foreign or of a newer version. One line that names the file.
    """
    header: PlanHeader | None = None
    end: End | None = None
    absences: list[Absence] = []
    replays: list[Replay] = []
    number = version = 0
    for number, line in read_lines(path, _KIND):
        if number == 1:
            version = check_version(path, _KIND, line)
        if end is not None:
            raise damaged(path, _KIND, number, "there is a record after the end record")
        try:
            if header is None:
                # In memory every plan is of the newest version: they differ in their files alone.
                header = msgspec.structs.replace(_decode_header(line), version=FORMAT_VERSION)
                continue
            record = _decode_record(line)
        # UnicodeDecodeError: not every text in a line is decoded by msgspec's own rules.
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise damaged(path, _KIND, number, f"no record of a plan: {one_line(error)}") from error
        if isinstance(record, Absence):
            absences.append(record)
        elif isinstance(record, Replay):
            replays.append(record)
        else:
            end = record
    if end is None and version > 1:
        raise damaged(path, _KIND, number + 1, "the file ends without an end record: it was cut short")
    found = End(num_absences=len(absences), num_replays=len(replays))
    if end is not None and end != found:
        wrong = f"the end record announces {_in_words(end)}; the file has {_in_words(found)}"
        raise damaged(path, _KIND, number, wrong)
    assert header is not None  # `read_lines` yields at least one line
    return Plan(header=header, absences=tuple(absences), replays=tuple(replays))


def _in_words(end: End) -> str:
    return f"{end.num_absences} absences and {end.num_replays} replays"
