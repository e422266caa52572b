"""Decides which steps are traced, because they have no program of their own.

[Note: when a step is traced]
Tracing costs time, and only the end of a step tells which one it was. So steps are traced from their start on as long
as one of the latest had no program of its own. The first save tells whether the running step may be one of these or a
new one; if not, its trace is dropped there. While steps are recorded in part, a trace begins only at that save. If
`MOST_FRUITLESS_TRACES` traces turn out to be of steps that have programs, tracing stops until the step without a
program is seen again; then half as many are allowed, and so on. A step that has left its outline once is an example: it
is not known as a whole, and may never come again. Each trace takes a token, and new tokens come slowly. Once there are
as many programs as are kept, steps that keep to the budget with a borrowed one are not traced. So a loop in which no
two steps are alike is not traced forever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torchdelta.notices import warn_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.follow.follower import EndedStep
    from torchdelta.runtime.follow.program import Key

__all__ = ["MOST_FRUITLESS_TRACES", "WantedSteps"]

MOST_FRUITLESS_TRACES: Final = 6
_WANTED_STEPS: Final = 32  # so many steps after one without a program are traced at most
_MOST_TOKENS: Final = 96
_STEPS_PER_TOKEN: Final = 16
_MOST_UNPLANNABLE: Final = 256
_MOST_REPLACED: Final = 2  # programs of a step that moved tensors which the training had replaced


@dataclass(kw_only=True)
class _Wanted:
    """A step that has no program of its own: its first save, the bytes in use there, and when it was seen last.

    `num_fruitless` counts the steps traced since then that began with the same save and had a program already.
    """

    first: int
    start_bytes: int
    seen_at: int
    num_fruitless: int = 0


class WantedSteps:
    """The steps of one session that are to be traced. Mutable."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._tokens = float(_MOST_TOKENS)
        self._wanted: dict[Key, _Wanted] = {}
        self._unplannable: dict[Key, int] = {}  # from which start on a step has no plan
        self._num_replaced: dict[Key, int] = {}  # how many programs in a row moved tensors that the training replaced
        self._num_given_up: dict[int, int] = {}  # by first save: how often such a step did not come again in time

    @property
    def wants_trace(self) -> bool:
        """Whether the next step is to be traced. See [Note: when a step is traced]."""
        return bool(self._wanted) and self._tokens >= 1

    def begins(self, first: int) -> bool:
        """Return whether one of the steps begins with this save (`Position.first`)."""
        return any(wanted.first == first for wanted in self._wanted.values())

    def take_token(self) -> None:
        """Count a trace."""
        self._tokens -= 1

    def return_token(self) -> None:
        """Uncount a trace that was dropped at the first save."""
        self._tokens += 1

    def on_step_end(
        self,
        ended: EndedStep,
        has_program: Callable[[Key, int], bool],
        *,
        is_fruitless: bool,
        is_served: bool = False,
    ) -> None:
        """Note whether a step has no program, and forget those that have one now or did not come again.

        Args:
            ended: The step.
            has_program: Whether the step of a key and a start has a program that is up to date, or will have one.
            is_fruitless: Whether it was traced although it had a program.
            is_served: Whether it has kept to the budget with a program, and there is no room for one more.
        """
        self._num_steps += 1
        self._tokens = min(_MOST_TOKENS, self._tokens + 1 / _STEPS_PER_TOKEN)
        if not ended.key[0]:
            return
        self._note_replaced(ended)
        was_wanted = ended.key in self._wanted
        self._wanted[ended.key] = _Wanted(first=ended.first, start_bytes=ended.start_bytes, seen_at=self._num_steps)
        for key, wanted in list(self._wanted.items()):
            is_old = self._num_steps - wanted.seen_at >= _WANTED_STEPS
            is_unplannable = self.is_unplannable(key, wanted.start_bytes)
            wanted.num_fruitless += is_fruitless and wanted.first == ended.first
            has_one = has_program(key, wanted.start_bytes) or (is_served and key == ended.key)
            is_given_up = wanted.num_fruitless >= self._most_fruitless(wanted.first)
            if has_one and (was_wanted or key != ended.key):
                self._num_given_up.pop(wanted.first, None)
            elif is_given_up and len(self._num_given_up) < _MOST_UNPLANNABLE:
                self._num_given_up[wanted.first] = self._num_given_up.get(wanted.first, 0) + 1
            if is_old or is_given_up or is_unplannable or has_one:
                del self._wanted[key]

    def _note_replaced(self, ended: EndedStep) -> None:
        """Want no trace any more of a step whose programs move tensors that the training replaces each time."""
        if ended.has_replaced:
            if len(self._num_replaced) >= _MOST_UNPLANNABLE:
                self._num_replaced.clear()
            self._num_replaced[ended.key] = self._num_replaced.get(ended.key, 0) + 1
            if self._num_replaced[ended.key] >= _MOST_REPLACED:
                self.note_unplannable(ended.key, 0)
                warn_once(
                    "a kind of step is not planned any more: it replaces parameters or optimizer states by new tensors "
                    "each time, which no plan can know"
                )
        elif ended.program is not None:
            self._num_replaced.pop(ended.key, None)

    def _most_fruitless(self, first: int) -> int:
        return max(1, MOST_FRUITLESS_TRACES >> self._num_given_up.get(first, 0))

    def is_unplannable(self, key: Key, start_bytes: int) -> bool:
        """Return whether a step that begins with so many bytes in use is known to have no plan."""
        return key in self._unplannable and start_bytes >= self._unplannable[key]

    def note_unplannable(self, key: Key, start_bytes: int) -> None:
        """Want no trace any more of a step that begins with so many bytes in use, or more: it has no plan."""
        if len(self._unplannable) < _MOST_UNPLANNABLE or key in self._unplannable:
            self._unplannable[key] = min(start_bytes, self._unplannable.get(key, start_bytes))
