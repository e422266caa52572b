"""Keeps persistent tensors here while compiled code runs, which reads them without the recorder."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.memory.candidates import Candidates
    from torchdelta.runtime.memory.emptying import Emptying
    from torchdelta.runtime.state.buffer import StorageRecord
    from torchdelta.runtime.state.persistent import Persistent

__all__ = ["CompiledReads"]


class CompiledReads:
    """The compiled functions that run. Mutable.

    Args:
        candidates: The tensors that may leave.
        emptying: Knows which ones have left.
        bring: Brings some back.
    """

    def __init__(
        self, candidates: Candidates, emptying: Emptying, bring: Callable[[list[StorageRecord]], None]
    ) -> None:
        self._candidates = candidates
        self._emptying = emptying
        self._bring = bring
        self._running: list[bool] = []  # for each, the innermost last: whether it may read optimizer states

    @property
    def is_running(self) -> bool:
        """Whether any compiled function runs."""
        return bool(self._running)

    def begin(self, *, with_states: bool) -> None:
        """Bring back what compiled code may read, and let it stay until `end`. See [Note: compiled code].

        `with_states`: It may read optimizer states, too.
        """
        is_here = any(self._running) or (bool(self._running) and not with_states)  # for an outer call
        self._running.append(with_states)
        try:
            self._emptying.finish_spares()
            if not is_here:
                self._bring_missing()
        except BaseException:
            self.end()
            raise

    def let_read_states(self) -> None:
        """Bring optimizer states back if compiled code runs: an optimizer steps in there."""
        if self._running:
            self._running[-1] = True
            self._bring_missing()

    def end(self) -> None:
        """End what `begin` began last."""
        had_states = any(self._running)
        self._running.pop()
        for key, record in self._emptying.spares.items():
            known = self._candidates.known.get(key)
            if had_states or known is None or not known.is_state:
                record.spare = None  # it may have been written

    def may_read(self, known: Persistent | None) -> bool:
        """Return whether compiled code that runs may read a tensor; None: one of which nothing is known."""
        return bool(self._running) and (any(self._running) or known is None or not known.is_state)

    def _bring_missing(self) -> None:
        self._emptying.prune()
        emptied, known = self._emptying.emptied, self._candidates.known
        if emptied and not all(self._running):
            self._candidates.search()  # a state may have become a parameter's data
        missing = [record for key, record in emptied.items() if self.may_read(known.get(key))]
        if missing:
            self._bring(missing)
