"""The ledger: every living storage on the device, its bytes, and which buffer it holds now.

It only counts; memory/ makes room. Its verbs are the only writers of where content is and of what a storage holds (see
buffer.py for the fields that others write). Most come in pairs. A native recorder has to provide the same verbs:

| verb | what has happened |
|---|---|
| `know`, `know_by_tensor`, `know_inner` | a storage is seen, perhaps for the first time |
| `resize` | a storage has a new size |
| `emptied` / `refilled` | the memory of a storage was freed in place, its content is on a tier / it has both again |
| `watch_storages_of` | two tensors are about to be exchanged: records refer to storages only |
| `exchange_witnesses` | two tensors were exchanged (`torch.utils.swap_tensors`) |
| `recheck_unwatched`, `sweep` | storages may have died without a callback |
| `made` | an op put new content into a new storage |
| `buffer_of`, `view_of` | an op or a saved tensor refers to a storage's content, perhaps for the first time |
| `dropped` | an op that was recorded elsewhere has made content that is in no storage |
| `exchanged` | an op has given a tensor another storage |
| `invalidate` / `written` | the content of a storage ends here / an op has put other content into it |
| `reinstate` | the content did not end after all: the op failed |
| `succeed` | the handles of a buffer follow its storage to the next content |
| `hold` / `release` | hold a buffer's storage / stop that |
| `watch` | another tensor's version shows unrecorded writes to a buffer |
| `brought_back` | a storage holds the content of a buffer again |
| `leave` / `unleave` | a buffer is evicted as soon as its copy has arrived / it stays after all |
| `copied` / `uncopied` | a buffer has a copy on a tier / that copy failed or is not needed any more |
| `fetch` / `unfetch` | a transfer that brings a buffer back has started / has ended or was given up |
| `save` / `unsave` | one more / one less saved tensor needs a buffer |
| `cannot_replay` | the op of a buffer cannot be replayed any more |
| `stay`, `stay_resizable` | a buffer, or all contents of a storage, must not leave from now on |
| `cut` | no saved tensor is left: the recorded ops are forgotten |
| `disown` | the tape was cut while an op ran: it cannot be replayed |
| `cut_unread` | a step ends while a graph is kept: the ops of contents that nothing reads are forgotten |
| `invalidate_unheld`, `forget` | the scope ends: writes are no longer recorded / nothing is counted any more |
| `begin_survey` / `end_survey` | changes are logged from here on / they are undone |
| `suspend_alias` | in a survey, the program has freed a storage that is still needed to undo that |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchdelta.runtime.state.contents import Contents
from torchdelta.runtime.state.copies import SurveyedCopy
from torchdelta.runtime.state.journal import Journal
from torchdelta.runtime.state.observer import Observing
from torchdelta.runtime.state.storages import memory_address
from torchdelta.runtime.state.tape import sources

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.state.buffer import Buffer, OpEntry

__all__ = ["Ledger"]


class Ledger(Contents):
    """All known storages, their contents and the saved tensors on them. The budget limits `usage.total_bytes`."""

    def __init__(self, device: torch.device | str, observing: Observing | None = None) -> None:
        super().__init__(device, observing if observing is not None else Observing())
        self.cut_at = 0  # the clock when the tape was cut
        self.num_cuts = 0
        self.num_handles = 0  # of saved tensors
        self.on_last_handle: Callable[[], None] | None = None
        self.is_closing = False  # the scope has ended: the death of the last handle ends the session
        self._num_saved = 0

    # -- saved tensors

    def save(self, buffer: Buffer) -> None:
        """Count one more saved tensor on a buffer."""
        self.num_handles += 1
        self._num_saved += 1
        buffer.num_saved += 1
        buffer.last_used = self.clock
        buffer.save_order = self._num_saved

    def unsave(self, buffer: Buffer) -> None:
        """Count one saved tensor less on a buffer. The last one releases a buffer that has an op."""
        self.num_handles -= 1
        following: Buffer | None = buffer
        while following is not None:
            following.num_saved -= 1
            if following.num_saved == 0:
                self.observing.observer.on_unsave(following)
                if following.fetching is not None:
                    self.unfetch(following)
                if following.op is not None:
                    self.release(following)
                    if following.copy is not None:
                        self.uncopied(following)
            following = following.successor
        if self.num_handles == 0 and self.on_last_handle is not None:
            self.on_last_handle()

    def drop_guard(self) -> None:
        """Uncount a handle that was counted to prevent `on_last_handle` from being called in the middle of an op.

        This calls `on_last_handle` only after the end of the scope. Within it, the next real handle will do so.
        """
        self.num_handles -= 1
        if self.num_handles == 0 and self.is_closing and self.on_last_handle is not None:
            self.on_last_handle()

    # -- forgetting

    def cut(self) -> None:
        """Forget the ops that made the living buffers.

        No saved tensor is left, so no op from before this moment will be replayed. Without the cut, the tape would grow
        from step to step (a momentum buffer is computed from itself), and an optimizer's in-place ops would have to
        copy the old parameters while the user still has the loss.
        """
        self.num_lost = 0
        self.num_cuts += 1
        self.cut_at = self.clock
        for record in list(self.records.values()):
            buffer = record.current
            if buffer is not None:
                buffer.op = None
                buffer.successor = None
                self.uncopied(buffer)
        held, self.held = self.held, {}
        for buffer in held.values():
            buffer.op = None
            self.uncopied(buffer)
            self.release(buffer)

    def disown(self, entry: OpEntry) -> None:
        """Forget one op: it has captured what it reads before a cut, which has forgotten how that was made."""
        for reference in entry.outputs:
            buffer = reference()
            if buffer is not None:
                buffer.op = None

    def cut_unread(self) -> None:
        """Forget the ops of the contents that no saved tensor and no recorded op needs.

        If the program keeps a graph from step to step, there is always a saved tensor, so `cut` is never called, and
        the tape of what an optimizer computes from itself (a momentum buffer) would grow without end.
        """
        if not self.num_handles:
            return
        waiting = [record.current for record in list(self.records.values()) if record.current is not None]
        while waiting:
            buffer = waiting.pop()
            if buffer.op is None or buffer.num_views or buffer.num_saved:
                continue
            read = [source for source in sources(buffer.op) if source.record is not None]
            buffer.op = None
            waiting += read  # perhaps nothing else reads them

    def invalidate_unheld(self) -> None:
        """Stop reading storages that only the user keeps alive: after the scope, writes to them are not recorded.

        Buffers on them that have an op or a copy are brought back instead.
        """
        for record in list(self.records.values()):
            buffer = record.current
            if buffer is not None and buffer.strong is None and (buffer.op is not None or buffer.copy is not None):
                self.invalidate(record)

    def forget(self) -> None:
        """Stop counting. The storages live on."""
        for record in list(self.records.values()):
            record.forget()  # as in `_died`
            record.emptied = record.spare = None
        self.records.clear()
        self.num_emptied = 0
        self.usage.stop()

    # -- surveys

    @property
    def surveys(self) -> bool:
        """Whether a survey is running: evictions are counted, but nothing is moved. See survey/survey.py."""
        return self._journal is not None

    @property
    def suspended_bytes(self) -> int:
        """Bytes that the survey counts as evicted although their storages live."""
        return sum(record.size_bytes for record in self._journal.suspended) if self._journal is not None else 0

    def begin_survey(self) -> None:
        """Log all changes from here on, so that `end_survey` can undo them."""
        self._journal = Journal(self.records)
        self.usage.is_counting = False  # `unseen_bytes` stays as it is
        self.new_device = torch.device("meta")
        self.counted_devices = frozenset({self.device, self.new_device})

    def end_survey(self) -> None:
        """Restore the state at the beginning of the survey, except for what the program itself has freed since."""
        journal, self._journal = self._journal, None
        assert journal is not None
        for record in list(self.records.values()):
            if record.is_fake:
                del self.records[record.address]
                record.forget()
                self._vacate(record)
        # One that the program alone still held may have died meanwhile, and its address may be another storage's now.
        self.records.update((record.address, record) for record in journal.suspended if record.storage() is not None)
        for record in list(self.records.values()):
            storage = record.storage()
            if storage is not None and storage.device == self.device and not journal.knows(record):
                self._enter_counter(record, memory_address(storage))  # not done while the usage was not counting
        for buffer in journal.restore():
            if buffer.strong is not None and buffer.num_saved == 0 and (buffer.op is not None or not buffer.num_views):
                self.release(buffer)  # its last handle died during the survey
            if buffer.strong is not None:
                self.held[id(buffer)] = buffer
            else:
                self.held.pop(id(buffer), None)
            if isinstance(buffer.copy, SurveyedCopy):
                self.uncopied(buffer)
            record = buffer.record
            if record is not None and self.records.get(record.address) is not record:
                self._vacate(record)
        self.new_device = self.device
        self.counted_devices = frozenset({self.device})
        self.usage.live_bytes = sum(record.size_bytes for record in list(self.records.values()))
        self.usage.is_counting = self.usage.counter is not None
        self.usage.ask_counter(fresh=True)
