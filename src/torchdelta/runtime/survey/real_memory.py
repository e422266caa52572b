"""What a survey on fake tensors would miss: memory outside tensors, and outputs without a size on meta tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchdelta.runtime.record.needs import omitted_bytes
from torchdelta.runtime.state.storages import memory_address

if TYPE_CHECKING:
    from torchdelta.aten.facts import OpFacts
    from torchdelta.runtime.state.buffer import StorageRecord
    from torchdelta.runtime.state.ledger import Ledger

_WORKSPACE_OUTPUT = 3  # index among the outputs of oneDNN's LSTM


class RealMemory:
    """Counts what is really allocated during a survey outside the known storages; fake tensors take no memory.

    An example is the state of a random generator: 5 KB for each dropout that may be replayed.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        usage = ledger.usage
        self._counter = usage.counter if usage.is_counting and ledger.device.type == "cpu" else None
        self._real = {record.id for record in ledger.records.values()}

    def ask(self) -> None:
        """Update the bytes that live in no known storage. Storages that the survey counts as evicted still live."""
        ledger = self._ledger
        if self._counter is None:
            return
        real_bytes = sum(record.size_bytes for record in ledger.records.values() if self._is_real(record))
        ledger.usage.unseen_bytes = self._counter.live_bytes() - real_bytes - ledger.suspended_bytes

    def _is_real(self, record: StorageRecord) -> bool:
        if record.id in self._real:
            return True
        storage = record.storage()
        if storage is None or storage.device.type == "meta":
            return False
        # Memory of another library (a batch from numpy) is not in the counter.
        return self._counter is not None and self._counter.owns(memory_address(storage))


def with_omitted_workspace(mode: Any, facts: OpFacts, args: tuple[Any, ...], out: Any) -> Any:
    """Return an op's outputs, with the workspace output that its meta kernel leaves empty."""
    if not facts.name.startswith("aten.mkldnn_rnn_layer.") or not isinstance(out, tuple | list):
        return out
    size_bytes = omitted_bytes(facts, args)
    with mode:
        workspace = torch.empty(size_bytes, dtype=torch.uint8, device=out[0].device)
    return type(out)((*out[:_WORKSPACE_OUTPUT], workspace, *out[_WORKSPACE_OUTPUT + 1 :]))
