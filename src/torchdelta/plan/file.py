"""Plan files: the header, then absences and replays in the order of the plan, in the frame of `trace/frame.py`.

`docs/plan-format.md` is the reference for everybody else. Every failure is a `PlanError`. Plans of version 1 have no
end record: of such a file a cut is noticed only where gzip notices it. What version 2 did not say has a default that
means what it meant.
"""

import os

from torchdelta.errors import PlanError
from torchdelta.plan.model import FORMAT_NAME, READABLE_VERSIONS, Absence, Plan, PlanHeader, Replay
from torchdelta.trace.frame import FileKind, RecordWriter, read_records

__all__ = ["read_plan", "write_plan"]

_KIND = FileKind(
    noun="plan",
    format=FORMAT_NAME,
    versions=READABLE_VERSIONS,
    error=PlanError,
    header=PlanHeader,
    counted={"absences": Absence, "replays": Replay},
    end_since=2,
)


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a file; the same plan gives the same bytes.

    Raises:
        PlanError: The file cannot be written.
    """
    with RecordWriter(path, _KIND, plan.header) as writer:
        for record in (*plan.absences, *plan.replays):
            writer.add(record)


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan from a file. Whether it is a plan of a trace, `plan.validate` tells.

    Raises:
        PlanError: The file is missing, damaged, cut short, foreign or of a newer version. One line that names the file.
    """
    header, *records = (record for _, record in read_records(path, _KIND))
    return Plan(
        header=header,
        absences=tuple(record for record in records if isinstance(record, Absence)),
        replays=tuple(record for record in records if isinstance(record, Replay)),
    )
