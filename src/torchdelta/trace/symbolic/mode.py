"""Writes down what a step does while it runs on fake tensors: ops, storages, their versions and their lives.

[Note: a storage lives as its fake one does]
Fake tensors share storages as real ones do, and are let go at the same moments, so a storage is dead when the Python
object of its fake storage is. `Tensor.untyped_storage()` makes that object, which then stays as long as the storage
itself; a weak reference tells of its end. The address alone is not enough: it is used again.

[Note: accumulation in place]
Where two gradients of one tensor meet, the engine adds them between two nodes: in place if nobody else holds one of
them, but never under a dispatch mode or for a tensor subclass (`can_accumulate_inplace` in torch's input_buffer.cpp).
Here it is both, so the mode sees `aten.add.Tensor`, and plain would not have made a third storage. Whether plain could
is asked as the engine asks it: dense memory, one holder of the tensor, one of the storage; our own references are
taken off (holders.py measures how many). The sum then counts as a new version of that storage. The engine's
addition is known by what comes right before it: validating a node's outputs, it asks each for its device.
A leaf that has a gradient already is added to in place in the same way.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.engine import ACCUMULATE, current_node, graph_task_id
from torchdelta._torch.modes import NoFunction, TorchDispatchMode
from torchdelta._torch.ops import decompose
from torchdelta._torch.storages import address_of, storage_address, storage_num_holders
from torchdelta._torch.tensors import is_dense, tensor_num_holders
from torchdelta.aten.batch_norm import STATISTICS_POSITIONS, TRAINING_POSITION
from torchdelta.aten.facts import Kind, OpFacts, facts_of, written_tensors
from torchdelta.aten.order import is_fixed_here, races_here
from torchdelta.modules import ModulePaths
from torchdelta.notices import warn_once
from torchdelta.trace.draft import Saved
from torchdelta.trace.model import BEFORE_STEP, Op
from torchdelta.trace.symbolic.costs import flops_of, layout_of, moved_bytes, product_of, workspace_bytes
from torchdelta.trace.symbolic.draft import Draft, Storage
from torchdelta.trace.symbolic.holders import plain_gradient_holders

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchdelta.trace.draft import Version
    from torchdelta.trace.model import BufferKind, Phase

_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr})
_ADD = torch.ops.aten.add.Tensor
_DEVICE = torch.ops.prim.device.default


class StepMode(TorchDispatchMode):
    """Sees every op of a step. Use `saved_hooks` together with it.

    Args:
        device: Type of the device that is modelled: `"cpu"` or `"cuda"`.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.draft = Draft()
        self.shapes: list[tuple[tuple[int, ...], ...]] = []
        """The shapes of each op's tensors, in the order of its arguments."""
        self.stage: Phase | None = None
        """The phase, where the caller knows it; None: it is found out."""
        self.is_in_optimizer = False
        self._has_seen_backward = False
        self._was_device = False  # the op before asked for a device: see [Note: accumulation in place]
        self._paths = ModulePaths()
        self._alive: dict[int, tuple[weakref.ref[Any], Storage]] = {}  # by address
        self._noted: list[Storage] = []  # what was known to live when the step began
        self._gradient_holders = plain_gradient_holders()

    # -- storages

    def note(self, tensors: Iterable[torch.Tensor], kind: BufferKind) -> None:
        """Say what tensors are for, whether they have been seen or not."""
        for tensor in tensors:
            version = self._version(tensor, BEFORE_STEP)
            if version is not None:
                version.storage.kind = kind

    def note_kept(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Put down storages that live when the step begins, whether it uses them or not."""
        for fake in storages:
            address = address_of(fake)
            if address not in self._alive:
                self._watch(fake, address, self.draft.new_storage(fake.nbytes(), BEFORE_STEP, self._phase()))
        self._noted = list({storage.id: storage for _, storage in self._alive.values()}.values())

    def living(self) -> list[torch.UntypedStorage]:
        """Return the fake storages that live now."""
        return [fake for reference, _ in list(self._alive.values()) if (fake := reference()) is not None]

    def growth_bytes(self) -> int:
        """Return how many bytes more live now than before the step.

        What was there before the step and was first seen in it (a table that the caller made) is left out of both.
        """
        living = {storage.id: storage for _, storage in self._alive.values()}
        before = {storage.id for storage in self._noted}
        now_bytes = sum(
            storage.current.size_bytes
            for id_, storage in living.items()
            if id_ in before or storage.birth_phase is not None
        )
        return now_bytes - sum(storage.first_bytes for storage in self._noted)

    def _version(self, tensor: torch.Tensor, birth_op: int) -> Version[Storage] | None:
        """Return the content that a tensor has now; one that was never seen is born. None: it has no storage."""
        try:
            address = storage_address(tensor)
        except RuntimeError:
            return None
        found = self._alive.get(address)
        if found is not None:
            return found[1].current
        storage = self.draft.new_storage(tensor.untyped_storage().nbytes(), birth_op, self._phase())
        self._watch(tensor.untyped_storage(), address, storage)
        return storage.current

    def _watch(self, fake: torch.UntypedStorage, address: int, storage: Storage) -> None:
        """Follow the life of a fake storage; two may stand for one, one after the other."""

        def died(_: object) -> None:
            del self._alive[address]
            storage.num_living -= 1
            if not storage.num_living:
                storage.current.death_op = len(self.draft.ops)

        storage.num_living += 1
        self._alive[address] = (weakref.ref(fake, died), storage)

    def close(self) -> None:
        """Stop following storages: what lives now outlives the step."""
        self._alive.clear()

    # -- ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and put it down."""
        del types
        kwargs = kwargs or {}
        if func is _DEVICE:
            self._was_device = True
            return func(*args, **kwargs)
        was_device, self._was_device = self._was_device, False
        # In inference mode composite ops arrive whole: a reshape that copies, a product.
        if torch.is_inference_mode_enabled() and _run_as_parts(args, kwargs):
            output = decompose(func, self, args, kwargs)
            if output is not NotImplemented:
                return output
        facts = facts_of(func)
        if facts.kind is Kind.VIEW or facts.kind is Kind.NO_OUTPUT:
            return func(*args, **kwargs)
        with NoFunction():
            return self._run(func, facts, args, kwargs, was_device=was_device)

    def _run(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, *, was_device: bool) -> Any:
        tensors: list[torch.Tensor] = []
        _collect(args, tensors)
        _collect(kwargs.values(), tensors)
        node = current_node() if graph_task_id() >= 0 else ""
        total: Storage | None = None
        is_engines = node != "" and func is _ADD and (was_device or node == ACCUMULATE) and len(tensors) == 2
        if is_engines:
            total = self._accumulated(tensors, is_leaf=node == ACCUMULATE)
        written = self._written(facts, args, kwargs)
        overwritten = args[0] if facts.overwrites and written else None
        unread = overwritten if overwritten is not None and _covers(overwritten) else None
        reads = dict.fromkeys(
            version.id
            for tensor in tensors
            if tensor is not unread and (version := self._version(tensor, BEFORE_STEP)) is not None
        )
        # What it overwrites counts as before the step if it was never seen.
        targets = {id(version.storage): version.storage for t in written if (version := self._version(t, BEFORE_STEP))}
        output = func(*args, **kwargs)

        index = len(self.draft.ops)
        outputs: list[torch.Tensor] = []
        _collect((output,), outputs)
        writes: dict[int, None] = {}
        if total is not None:
            self._watch(outputs[0].untyped_storage(), storage_address(outputs[0]), total)
            targets = {id(total): total}
        for storage in targets.values():
            writes[storage.write(index).id] = None
        for tensor in written:
            self._resized(tensor)  # also one that `out=` lets grow
        if total is None:
            for tensor in outputs:
                version = self._version(tensor, index)
                if version is not None and version.birth_op == index:
                    writes[version.id] = None
        if node and any(tensor.layout in _SPARSE for tensor in outputs):
            warn_once(
                "the step has sparse gradients; their size depends on data, so the trace lacks what the optimizer does "
                "with them"
            )
        self.shapes.append(tuple(tuple(tensor.shape) for tensor in tensors))
        flops, dtype = flops_of(func, args, kwargs, output)
        phase = self._phase()
        self.draft.ops.append(
            Op(
                index=index,
                name="torchdelta.accumulate" if is_engines else facts.name,
                phase=phase,
                module=self._paths.current() if phase != "optimizer" else "",
                reads=tuple(reads),
                writes=tuple(writes),
                random=facts.is_random,
                recomputable=not is_engines and self._is_recomputable(facts, args, kwargs),
                workspace_bytes=workspace_bytes(facts.base_name, args, outputs, device=self.device),
                node=node,
                flops=flops,
                dtype=dtype,
                moved_bytes=moved_bytes(facts.base_name, tensors, outputs, written, overwritten),
                product=product_of(facts.base_name, args, flops),
                layout=layout_of(tensors),
            )
        )
        return output

    def _accumulated(self, tensors: list[torch.Tensor], *, is_leaf: bool) -> Storage | None:
        """Return the storage into which plain adds up two gradients, None where it makes a new one."""
        for tensor in tensors[:1] if is_leaf else tensors:
            version = self._version(tensor, BEFORE_STEP)
            if version is None or version.birth_op == BEFORE_STEP:
                continue
            holders = (tensor_num_holders(tensor), storage_num_holders(storage_address(tensor)))
            if is_leaf or (holders == self._gradient_holders and is_dense(tensor)):
                return version.storage
        return None

    def _written(self, facts: OpFacts, args: Any, kwargs: Any) -> list[torch.Tensor]:
        written = written_tensors(facts, args, kwargs) if facts.kind in {Kind.WRITE, Kind.REPLACE} else []
        if facts.keeps_statistics and facts.kind is Kind.COMPUTE and args[TRAINING_POSITION]:
            written = [args[place] for place in STATISTICS_POSITIONS if args[place] is not None]
        return written

    def _resized(self, tensor: torch.Tensor) -> None:
        version = self._version(tensor, len(self.draft.ops))
        if version is not None:
            version.size_bytes = tensor.untyped_storage().nbytes()

    def _is_recomputable(self, facts: OpFacts, args: Any, kwargs: Any) -> bool:
        if not facts.is_recomputable:
            return False
        # Which ops have no fixed order differs between a CPU and an accelerator: see aten/order.py.
        if self.device == "cpu":
            return not (facts.may_race and races_here(facts.base_name, args, kwargs))
        return not facts.order_varies or is_fixed_here(facts.base_name, args, kwargs)

    def begin_forward(self) -> None:
        """Count what follows as forward: the closure of an optimizer begins."""
        self.is_in_optimizer = self._has_seen_backward = False

    def _phase(self) -> Phase:
        if self.stage is not None:
            return self.stage
        if graph_task_id() >= 0:
            self._has_seen_backward = True
            return "backward"
        if self.is_in_optimizer:
            return "optimizer"
        # After a backward, work outside of all modules (clipping, scaling, a moving average) belongs to the update. It
        # does so until something is saved: then another forward has begun.
        return "optimizer" if self._has_seen_backward and not self._paths.current() else "forward"

    # -- saved tensors

    def saved_hooks(self) -> Any:
        """Return the hooks that put down what autograd saves, and when it wants it."""

        def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, Saved[Storage] | None]:
            if graph_task_id() < 0:
                self._has_seen_backward = False
            with NoFunction():
                version = self._version(tensor, BEFORE_STEP)
                saved = None
                if version is not None:
                    saved = Saved(
                        op=len(self.draft.ops),
                        version=version,
                        shape=tuple(tensor.shape),
                        stride=tuple(tensor.stride()),
                        offset=int(tensor.storage_offset()),
                        dtype=tensor.dtype,
                    )
                    self.draft.saved.append(saved)
            return tensor, saved

        def unpack(packed: tuple[torch.Tensor, Saved[Storage] | None]) -> torch.Tensor:
            tensor, saved = packed
            if saved is not None:
                found = self._version(tensor, BEFORE_STEP)
                # What its own op overwrote unseen (the statistics of a batch norm) is read as it is now.
                if found is not None and found.birth_op == saved.op:
                    saved.version = found
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _run_as_parts(args: Any, kwargs: Any) -> bool:
    """Return whether a composite op on these arguments runs as its parts: other layouts may have another kernel."""
    tensors: list[torch.Tensor] = []
    _collect((*args, *kwargs.values()), tensors)
    return all(tensor.layout is torch.strided and not tensor.is_nested for tensor in tensors)


def _covers(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is all of its storage."""
    try:
        return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
    except RuntimeError:  # a sparse tensor has none
        return True


def _collect(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, found)
