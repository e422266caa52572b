"""Judges for the tests of the sweep: they run in processes of their own, which import them from here."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.sweep.pool import Report
    from tools.sweep.subjects import Subject

EQUAL = {"verdict": "equal", "num_recomputed_ops": 1, "swapped_out_bytes": 0}


def harmful(subject: Subject, modes: Sequence[str], report: Report) -> dict[str, Any]:
    """Do to the process what the subject's name says, in the second of its modes."""
    found: dict[str, Any] = {}
    report("plain", found)
    if subject.name == "crash in plain":
        os.kill(os.getpid(), signal.SIGSEGV)
    for index, mode in enumerate(modes):
        report(mode, found)
        if index == 1:
            if subject.name == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            if subject.name == "hang":
                time.sleep(60)
            if subject.name == "exit":
                os._exit(3)
            if subject.name == "swallow memory":
                bytearray(2**40)
        found[mode] = EQUAL
    return record_of(subject, found)


def harmless(subject: Subject, modes: Sequence[str], report: Report) -> dict[str, Any]:
    """Find everything equal."""
    report("plain", {})
    return record_of(subject, dict.fromkeys(modes, EQUAL))


def record_of(subject: Subject, found: dict[str, Any]) -> dict[str, Any]:
    """Make the record of a subject that was judged."""
    return {
        "family": subject.family,
        "name": subject.name,
        "group": subject.group,
        "task": subject.task,
        "status": "judged",
        "modes": found,
    }
