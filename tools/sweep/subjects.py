"""What is swept: one class each, in groups that share a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tests.same_bits.judge import Step


class NotConstructibleError(Exception):
    """A class gives no training step: it cannot be built, needs what is not installed, or nothing has a gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One class that is judged.

    Args:
        family: module of this package that lists it and builds it.
        name: the class, unique within its family.
        group: subjects of one group share a process; for `transformers` the model type.
        task: what it is trained for; empty where the family knows none.
    """

    family: str
    name: str
    group: str
    task: str = ""


# The steps of a subject by these names; only the first is always there. The last one trains the same model each time it
# runs, with the values of its first run: what recognises a step by its parameters sees the same step again.
PLAIN = "plain"
AUTOCAST = "plain autocast"
REPEATED = "plain repeated"
Steps = Mapping[str, "Step"]


class Family(Protocol):
    """A module of this package that knows a kind of subjects."""

    def subjects(self) -> Sequence[Subject]:
        """List every subject of the family, in a fixed order."""
        ...

    def build(self, subject: Subject) -> tuple[Steps, dict[str, Any]]:
        """Make a subject's steps, and facts for its record; or raise NotConstructibleError."""
        ...
