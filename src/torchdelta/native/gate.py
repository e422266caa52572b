"""The gate: in a followed step, only the ops that its program replays reach the recorder; the C++ side is gate.cpp.

TORCHDELTA_NATIVE=0 disables it: then followed steps are recorded as a whole.
"""

from __future__ import annotations

import enum
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from torchdelta.errors import NativeError
from torchdelta.native.build import NativeModule, find, is_switched_off, loaded
from torchdelta.native.tape import MODULE as TAPE_MODULE
from torchdelta.native.tape import load_tape

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from torchdelta.native.counting import LimitedCounter
    from torchdelta.native.tape import Tape

__all__ = ["GATE_KEY", "MODULE", "Gate", "Recorded", "load_gate", "load_gate_soon", "new_gate", "new_sequence"]

GATE_KEY: Final = "Fake"
"""The dispatch key that it is a fallback on: `kKey` of gate.cpp."""
_builder: threading.Thread | None = None

# A sequence that is learned and followed, ops below autocast, an op that differs, and one that needs room.
_SELF_TEST: Final = """
import ctypes
from torch.utils._python_dispatch import TorchDispatchMode
assert module.install() and module.install()
seen, asked = [], []
class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C._RestorePythonTLSSnapshot():
            seen.append((func.__name__, torch.is_autocast_enabled("cpu")))
        return func(*args, **(kwargs or {}))
mode = Mode()
live = ctypes.c_int64(0)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
name = ctypes.c_char_p(b"torchdelta.live_bytes")
capsule = new_capsule(ctypes.byref(live), name, None)
def on_other(position):
    asked.append(("other", position))
    gate.end()
def on_unseen(tensors):
    asked.append(("unseen", [tuple(tensor.shape) for tensor in tensors]))
    return lambda: asked.append("written")
gate = module.Gate(
    mode, torch.device("cpu"), None, capsule, on_other, lambda need: asked.append(("room", need)), on_unseen
)
x = torch.randn(4, 4, requires_grad=True)
def step(size=4):
    return torch.nn.functional.layer_norm((x[:size] @ x).exp(), (4,)).sum()
step()
assert not seen
gate.record()
step()
whole = [name for name, _ in seen]
assert whole[-1] == "sum.default" and "exp.default" in whole, whole
seen.clear()
gate.learn()
expected = step()
learned = gate.learned()
assert [name for name, _ in seen] == whole and len(learned) == len(set(learned)) == len(whole), (seen, learned)
exp = whole.index("exp.default")
needs = [0] * len(whole)
needs[exp + 1] = 100
sequence = module.Sequence(learned, needs, [index == exp for index in range(len(whole))])
for size, live.value in ((4, 0), (4, 950), (3, 0)):
    seen.clear()
    asked.clear()
    gate.follow(sequence, 1000)
    loss = step(size)
    is_complete = gate.is_complete()
    gate.close()
    assert is_complete == (size == 4)
    if size == 4:
        assert torch.equal(loss, expected)
        assert seen == [("exp.default", False)], seen
        assert asked == ([("room", 100)] if live.value else []), asked
    else:
        assert len(asked) == 1 and asked[0][0] == "other", asked
seen.clear()
slots = [torch.zeros(4), torch.zeros(4)]
def write(slot):
    seen.clear()
    slots[0] + 1
    slot.add_(1)
    gate.close()
    gate.forget()
    return [name for name, _ in seen]
gate.learn()
write(slots[1])
sequence = module.Sequence(gate.learned(), [0, 0], [True, False])
for slot in slots:
    gate.follow(sequence, 1000)
    assert write(slot) == ["add.Tensor", "add_.Tensor"][:1 + (slot is slots[0])], seen
gate.follow(sequence, 1000)
gate.know(slots[1])
assert len(write(slots[1])) == 2, seen
asked.clear()
gate.follow(sequence, 1000)
slots[0] + 1
with torch._C._DisableTorchDispatch():
    slots[0].mul_(2)
    slots[1].mul_(2)
gate.close()
gate.forget()
assert asked == [("unseen", [(4,)]), "written"], asked
seen.clear()
gate.record()
with torch.autocast("cpu"):
    x @ x
assert ("mm.default", True) in seen, seen
seen.clear()
gate.end()
x + 1
assert not seen
with mode:
    x + 1
assert [name for name, _ in seen] == ["add.Tensor"], seen
gate.close()
expected.backward()
assert x.grad is not None
del gate
"""

MODULE: Final = NativeModule(
    source=Path(__file__).with_name("gate.cpp"),
    name="torchdelta_gate",
    self_test=_SELF_TEST,
    without="followed steps are recorded as a whole, which takes more host time",
)


class Gate(Protocol):
    """Sees the ops of one thread. Mutable."""

    @property
    def position(self) -> int:
        """How many ops of the sequence there were so far, the running one included."""
        ...

    def record(self) -> None:
        """Record every op."""

    def learn(self) -> None:
        """Record every op from here on, and learn the sequence."""

    def learned(self) -> list[int]:
        """Return the hashes of the ops since `learn`."""
        ...

    def follow(self, sequence: object, most_bytes: int, /) -> None:
        """Compare the ops from here on with a sequence, and call `make_room` before one that may pass these bytes."""

    def is_complete(self) -> bool:
        """Return whether the sequence was followed to its end."""
        ...

    def end(self) -> None:
        """The recorder is on the thread's stack again: only record what was dispatched before that."""

    def close(self) -> None:
        """See no op from now on."""

    def use_tape(self, tape: Tape | None, capsule: object, /) -> None:
        """Record on a tape what the sequence says, from here on; (None, None): on none."""

    def know(self, tensor: object, /) -> None:
        """Record every later op that writes the storage of a tensor, as if a recorded op had read it."""

    def forget(self) -> None:
        """Forget which storages the recorder has seen: nothing will be replayed that reads them."""


def load_gate() -> Any:
    """Return the module, built and installed if needed, or the NativeError that explains why there is none."""
    if is_switched_off():
        return NativeError("TORCHDELTA_NATIVE disables it")
    module = loaded(MODULE)
    if not isinstance(module, NativeError) and not module.install():
        return NativeError("the dispatch key of the gate is in use")
    return module


def load_gate_soon() -> Any:
    """Return what `load_gate` returns, or None while another thread builds the module: that takes half a minute."""
    global _builder  # noqa: PLW0603 - one for the process
    if not is_switched_off() and None in (find(MODULE.source), find(TAPE_MODULE.source)):
        if _builder is None:
            _builder = threading.Thread(target=_load_both, name="torchdelta-build", daemon=True)
            _builder.start()
        if _builder.is_alive():
            return None
    return load_gate()


def _load_both() -> None:
    load_tape()
    load_gate()


def new_gate(
    mode: object,
    device: torch.device,
    counter: LimitedCounter,
    on_other: Callable[[int], object],
    make_room: Callable[[int], object],
    on_unseen: Callable[[list[torch.Tensor]], Callable[[], object]],
) -> Gate:
    """Return a gate for this thread. Call this only after `load_gate`, if that returned a module.

    Args:
        mode: The dispatch mode to which it gives ops; not on the thread's stack meanwhile.
        device: With its index, if it is an accelerator.
        counter: Counts the live bytes.
        on_other: Called with the position of an op that is not the expected one, before it runs.
        make_room: Called with the bytes that an op needs, before it runs, if they might not fit.
        on_unseen: Called with known tensors that an op is about to write which no mode would see. Returns what is
            called after that op.
    """
    return load_gate().Gate(mode, device, counter, counter.live_capsule(), on_other, make_room, on_unseen)


class Recorded(enum.IntFlag):
    """How an op of a sequence is recorded; 0: not at all. Without a tape, all others are recorded in Python."""

    IN_PYTHON = 1
    ON_TAPE = 2
    HAS_STATISTICS = 4  # a batch norm
    WRITES = 8  # it writes its first argument
    OVERWRITES = 16  # the same, all of it, without reading it
    IS_RANDOM = 32
    UNSEEN = 64  # not at all where there is a tape: that is told of the writes of all ops
    IS_CONSTANT = 128  # it reads nothing


def new_sequence(hashes: list[int], needs_bytes: list[int], recorded: list[Recorded]) -> object:
    """Return a sequence of ops: what each is known by, what it needs, and how it is recorded."""
    return load_gate().Sequence(hashes, needs_bytes, recorded)
