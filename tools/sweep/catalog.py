"""The families that are swept, and one subject judged from its name to its record."""

from __future__ import annotations

import gc
import importlib
import traceback
from typing import TYPE_CHECKING, Any

from tools.sweep import judging
from tools.sweep.subjects import NotConstructibleError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.sweep.pool import Report
    from tools.sweep.subjects import Family, Subject

FAMILIES = ("transformers_classes", "torch_modules")

# Status of a subject.
JUDGED = "judged"
NOT_CONSTRUCTIBLE = "not constructible"
HARNESS_FAILED = "harness failed"


def family(name: str) -> Family:
    """Import a family's module."""
    return importlib.import_module(f"tools.sweep.{name}")  # type: ignore[return-value]


def judge(subject: Subject, modes: Sequence[str], report: Report) -> dict[str, Any]:
    """Build a subject and judge it in every mode; an exception of the harness itself becomes part of the record."""
    record: dict[str, Any] = {
        "family": subject.family,
        "name": subject.name,
        "group": subject.group,
        "task": subject.task,
        "status": JUDGED,
    }
    try:
        steps, facts = family(subject.family).build(subject)
        gc.collect()
        gc.freeze()  # the classes just imported are looked at by no later collection
        record |= facts
        record["modes"] = judging.judge_modes(steps, modes, report)
    except NotConstructibleError as error:
        record |= {"status": NOT_CONSTRUCTIBLE, "reason": str(error)}
    except Exception:  # noqa: BLE001 - nothing may stop the sweep, and nothing may be lost
        record |= {"status": HARNESS_FAILED, "reason": traceback.format_exc(limit=-3)[-600:]}
    finally:
        gc.unfreeze()
    return record
