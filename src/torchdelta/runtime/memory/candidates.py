"""Which persistent tensors may leave, and in which order: those first whose next use is farthest away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from torchdelta._torch.storages import storage_address, storage_num_holders
from torchdelta.runtime.memory.in_use import is_object_held
from torchdelta.runtime.memory.use_order import UseOrder
from torchdelta.runtime.state.buffer import Stays
from torchdelta.runtime.state.kinds import tensors_in
from torchdelta.runtime.state.persistent import Persistent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torchdelta.runtime.memory.in_use import InUse
    from torchdelta.runtime.state.buffer import StorageRecord
    from torchdelta.runtime.state.ledger import Ledger
    from torchdelta.runtime.state.steps import StepTracker

__all__ = ["LEAST_BYTES", "Candidates", "FindsPersistents"]

# Smaller tensors stay: the overhead outweighs the bytes freed. It is more than `WRAPPED_NUMBER_BYTES`, because replays
# pass numbers on as they are, and do not bring them back first.
LEAST_BYTES = 4096
_STAYS = Stays.RESIZED | Stays.IN_FLIGHT | Stays.OTHER_STREAM | Stays.NOT_OURS
# A ranking is used for this many uses, or for this share of the number of tensors if that is more: the next uses change
# slowly, and sorting takes time.
_RANKING_LIFE_USES, _RANKING_LIFE_SHARE = 32, 0.1
_GROWN_SHARE = 1 / 16


class FindsPersistents(Protocol):
    """Finds the persistent tensors: `owners.Owners`."""

    def find(self, is_thorough: bool, in_use: set[int]) -> Iterable[Persistent]:
        """Return the persistent tensors, given the addresses of those in use. Look for new owners first, if asked."""
        ...

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a search has found this optimizer."""
        ...


class Candidates:
    """The persistent tensors that are known.

    Args:
        ledger: The ledger.
        steps: The position in the training step.
        in_use: What must stay.
        owners: Finds the persistent tensors.
    """

    def __init__(
        self,
        ledger: Ledger,
        steps: StepTracker,
        in_use: InUse,
        owners: FindsPersistents,
    ) -> None:
        self.order = UseOrder()
        self.known: dict[int, Persistent] = {}  # by the id of the record
        self.by_key: dict[int, Persistent] = {}
        self.has_found = False  # whether any was known
        self.on_use: Callable[[int], None] | None = None  # where a plan is followed
        self._making: list[list[Any]] = []  # in which the running optimizer collects states, before it stores them
        self._making_in = -1  # the step of these lists
        self._ledger = ledger
        self._steps = steps
        self._in_use = in_use
        self._owners = owners
        self._lent: set[int] | None = None  # see `lend`
        # The step in which new owners were looked for, how many steps were refused before, and the bytes that all
        # storages had, those that are away included.
        self._searched_in, self._searched_bytes = (-1, 0), 0
        # A step, and its phases in which the owners were asked.
        self._searched_phases: tuple[int, set[str]] = (-1, set())
        self._left: set[int] = set()  # keys of those that left in the last step
        self._leaving: set[int] = set()  # and in this one
        self._fleeting: set[int] = set()  # keys of gradients that the program frees after the optimizer has stepped
        self._ranking: list[Persistent] = []
        self._ranked_at = -1

    @property
    def is_on_cpu(self) -> bool:
        """Whether the tensors are on the CPU: elsewhere, several streams may write them."""
        return self._ledger.device.type == "cpu"

    # -- what is known

    def use(self, record: StorageRecord) -> None:
        """Note that an op uses a storage."""
        known = self.known.get(record.id)
        if known is not None:
            self.order.use(known.key)
            self._ledger.observing.observer.on_use(record, known.key)
            if self.on_use is not None:
                self.on_use(known.key)

    def search(self, *, is_thorough: bool = False) -> None:
        """Find the persistent tensors; `is_thorough`: look for new parameters and optimizers first."""
        if is_thorough:
            self._searched_in = (self._steps.num_steps, self._steps.num_refused)
            self._searched_bytes = self._all_bytes()
        self._phases_of_step().add(self._steps.phase)
        self._ranking.clear()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.known.clear()  # its C++ reads and writes them at any time
            self.by_key.clear()
            self.has_found = True
            return
        earlier = self.by_key
        found = [*self._owners.find(is_thorough, self._in_use.addresses()), *self._made()]
        self.known = {known.record.id: known for known in found}
        self.by_key = {known.key: known for known in found}
        self.has_found |= bool(found)
        observer = self._ledger.observing.observer
        if observer.wants_uses:
            for known in found:
                observer.on_persistent(known)
        for known in found:
            if known.is_gradient and known.key in earlier and earlier[known.key].record is not known.record:
                self._fleeting.add(known.key)

    def note_making(self, states: list[Any]) -> None:
        """Note a list in which the running optimizer collects its states. It stores them when it has updated all."""
        if self._making_in != self._steps.num_steps:
            self._making_in = self._steps.num_steps
            self._making.clear()
        if any(state is None for state in states):  # else the optimizer has all of them already
            self._making.append(states)

    def _made(self) -> Iterator[Persistent]:
        """Yield the states in these lists that an op has made."""
        if not self._steps.is_in_optimizer:
            self._making.clear()
        for state in tensors_in(self._making):
            record = self._ledger.records.get(storage_address(state)) if state.layout is torch.strided else None
            if type(state) is torch.Tensor and record is not None and record.reference is not None:
                yield Persistent(record, record.id, is_state=True)

    def search_once_a_phase(self) -> None:
        """Find the persistent tensors, unless that was done in this phase of the step: gradients and states are new."""
        if self._steps.phase not in self._phases_of_step():
            self.search()

    def _phases_of_step(self) -> set[str]:
        if self._searched_phases[0] != self._steps.num_steps:
            self._searched_phases = (self._steps.num_steps, set())
        return self._searched_phases[1]

    @property
    def was_searched(self) -> bool:
        """Whether new parameters and optimizers were looked for in this step, since the latest refused one.

        That does not count if much more lives now: a copy of the model may be in the making, or an optimizer's states.
        """
        is_same = self._searched_in == (self._steps.num_steps, self._steps.num_refused)
        return is_same and self._all_bytes() <= self._searched_bytes * (1 + _GROWN_SHARE)

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the next shortage search again if the optimizer that is about to step is not known."""
        if not self._owners.knows(optimizer):
            self._searched_in = (-1, 0)

    def _all_bytes(self) -> int:
        """Return the bytes of all storages, those that are away included."""
        return sum(
            record.size_bytes if record.emptied is None else record.emptied.size_bytes
            for record in list(self._ledger.records.values())  # a garbage collection may remove some
        )

    # -- which leave

    def ranking(self) -> list[Persistent]:
        """Return the tensors in the order in which they leave, the first of them at the end. Callers take from it."""
        life_uses = max(_RANKING_LIFE_USES, _RANKING_LIFE_SHARE * len(self.known))
        if not self._ranking or self.order.count - self._ranked_at > life_uses:
            records = ((known, known.record) for known in self.known.values())
            here = [known for known, each in records if each.emptied is None and each.size_bytes >= LEAST_BYTES]
            self._ranking = sorted(here, key=self._nearness)
            self._ranked_at = self.order.count
        return self._ranking

    def end_step(self) -> None:
        """Predict from the step that ends here."""
        self.order.end_step()
        self._left, self._leaving = self._leaving, set()
        self._ranking.clear()

    def note_leaving(self, records: Iterable[StorageRecord]) -> None:
        """Note that tensors leave."""
        self._leaving.update(known.key for record in records if (known := self.known.get(record.id)) is not None)

    def will_leave(self, known: Persistent) -> bool:
        """Return whether a tensor left in the last step, or in this one."""
        return known.key in self._left or known.key in self._leaving

    def _nearness(self, known: Persistent) -> tuple[int, int]:
        if known.key in self._fleeting and not self.order.is_used_again(known.key):
            return (-1, 0)  # soon it is freed, so a copy would be made in vain
        return self.order.next_use(known.key)

    def is_idle(self, known: Persistent) -> bool:
        """Return whether the next use of a tensor is at least a quarter of a step away."""
        return self._nearness(known)[0] > self.order.length // 4

    def may_leave(self, known: Persistent) -> bool:
        """Return whether a tensor can be emptied in place now. Whether it is in use is not looked at."""
        record = known.record
        if record.emptied is not None or record.size_bytes < LEAST_BYTES or record.is_resizable:
            return False
        if record.is_exported or record.num_writing:
            return False
        if self._ledger.records.get(record.address) is not record:
            return False
        current = record.current
        if current is not None and current.stays & _STAYS:
            return False
        if self._lent is None:
            if is_object_held(record):
                return False
        elif record.id not in self._lent:
            return False
        storage = record.storage()
        if storage is None or not storage.resizable() or storage.device != self._ledger.device:
            return False
        if storage.nbytes() != record.size_bytes or (storage.device.type == "cpu" and storage.is_shared()):
            return False
        if known.is_gradient:
            num_own = 2 + (current is not None and current.strong is not None)  # its `.grad`, and the storage's object
            return storage_num_holders(record.address) <= num_own
        return True

    # -- `torch.save`

    @property
    def is_lent(self) -> bool:
        """Whether a call of torch runs that holds storage objects but reads them one at a time."""
        return self._lent is not None

    def lend(self) -> None:
        """Begin a call of torch that holds storage objects but reads them one at a time, as `torch.save`."""
        self._lent = {known.record.id for known in self.known.values() if not is_object_held(known.record)}
        records = list(self._ledger.records.values())
        self._lent.update(record.id for record in records if record.emptied is not None)

    def take_back(self) -> None:
        """End what `lend` began."""
        self._lent = None
