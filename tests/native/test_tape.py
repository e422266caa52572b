"""The tape alone, with the gate and the hooks that give it ops and saved tensors: no session, no budget."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.native.test_gate import Seen
from torchdelta.errors import NativeError
from torchdelta.native.counting import counting_status, new_counter
from torchdelta.native.gate import Recorded, load_gate, new_gate, new_sequence
from torchdelta.native.saved_hooks import OnTape, new_hooks, new_saves
from torchdelta.native.tape import load_tape, new_tape

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.skipif(not counting_status().is_on, reason="needs the native parts"),
]

COMPUTES = Recorded.IN_PYTHON | Recorded.ON_TAPE
_UNLIMITED_BYTES = 1 << 60


class _Builder:
    """Lists what a tape describes."""

    def __init__(self) -> None:
        self.described: list[tuple[Any, ...]] = []

    def resident(self, name: int, tensor: torch.Tensor, version: int) -> None:
        self.described.append(("resident", name, tensor.nbytes, version))

    def made(self, op: str, overload: str, args: Any, kwargs: Any, *others: Any) -> None:
        del overload
        self.described.append(("made", op, args, kwargs, *others))

    def view(self, name: int, shape: tuple[int, ...], *others: Any) -> Any:
        return ("view", name, shape, *others)

    def scratch(self, *others: Any) -> Any:
        return ("scratch", *others)

    def fresh(self, *others: Any) -> Any:
        return ("fresh", *others)

    def save(self, view: Any, probe: torch.Tensor, version: int, number: int) -> Any:
        return [view, probe, version, number]


class Taped:
    """Runs steps on a tape: three ops, of which the first two are recorded and their results saved."""

    def __init__(self) -> None:
        for module in (load_gate(), load_tape()):
            if isinstance(module, NativeError):
                pytest.skip(str(module))
        self.mode = Seen()
        self.asked: list[Any] = []
        self.builder = _Builder()
        counter: Any = new_counter()
        self.gate = new_gate(
            self.mode, torch.device("cpu"), counter, self.on_other, self.asked.append, self.asked.append
        )
        hooks = new_hooks(
            lambda t: [t.detach()], self.unpack, lambda t: t, self.on_modified, lambda: None, lambda _: None
        )
        assert not isinstance(hooks, NativeError)
        self.hooks = hooks
        self.counter = counter
        self.use_tape_with(lambda _size_bytes, _is_optional: True)

    def use_tape_with(self, make_room: Callable[[int, bool], bool]) -> None:
        """Use a new tape that asks this for room."""
        tape = new_tape(torch.device("cpu"), self.counter, make_room, self.on_changed, self.hand_over)
        assert not isinstance(tape, NativeError)
        self.tape, self.capsule = tape, tape.capsule()

    def on_other(self, position: int) -> None:
        self.asked.append(("other", position))
        self.hand_over()
        self.gate.end()

    def on_modified(self, tensor: torch.Tensor, version: int) -> None:
        raise RuntimeError(f"{tuple(tensor.shape)} was at version {version}")

    def on_changed(self, size_bytes: int, version: int, expected: int) -> None:
        raise ValueError(f"{size_bytes} bytes at version {version}, not {expected}")

    def unpack(self, packed: Any) -> torch.Tensor:
        self.asked.append(("unpack", len(packed)))
        return packed[0] if isinstance(packed[0], torch.Tensor) else torch.zeros(packed[0][2])

    def hand_over(self) -> None:
        self.hooks.adopt()
        self.gate.use_tape(None, None)
        self.tape.clear()

    def follow(
        self,
        step: Callable[[], torch.Tensor],
        recorded: list[Recorded],
        sizes_bytes: list[int],
        *,
        drops: dict[int, list[int]],
        replays: dict[int, list[list[int]]],
        most_bytes: int = _UNLIMITED_BYTES,
    ) -> torch.Tensor:
        """Run a step's forward on the tape. Its saved tensors have these sizes, and may all be dropped."""
        with saved_tensors_hooks(self.hooks.pack, self.hooks.unpack):
            self.gate.learn()
            step()
            hashes = self.gate.learned()
            self.gate.close()
            self.gate.forget()
            self.mode.names.clear()
            self.tape.begin(drops, replays, most_bytes)
            self.gate.use_tape(self.tape, self.capsule)
            self.hooks.use_tape(self.tape, self.capsule, self.adopt_dropped, lambda *what: self.asked.append(what))
            self.gate.follow(new_sequence(hashes, [4000] * len(hashes), recorded), _UNLIMITED_BYTES)
            numbers = list(range(len(sizes_bytes)))
            saves = new_saves(sizes_bytes, numbers, [OnTape.DROPPED] * len(numbers))
            self.hooks.compare(saves, self.asked.append, lambda *_: 0)
            result = step()
            assert self.hooks.end_comparison()
        assert self.gate.is_complete()
        self.gate.close()
        self.tape.end_forward()
        return result

    def forward(self, x: torch.Tensor, most_bytes: int = _UNLIMITED_BYTES) -> torch.Tensor:
        """Run the forward of a step whose two saved tensors are dropped together, and come back together."""
        return self.follow(
            lambda: _step(x),
            [COMPUTES, COMPUTES, Recorded(0)],
            [x.nbytes] * 2,
            drops={1: [0, 1]},
            replays={1: [[0, 1]]},
            most_bytes=most_bytes,
        )

    def adopt_dropped(self, saves: list[object]) -> list[object]:
        return self.tape.describe(saves, self.builder)


def _step(x: torch.Tensor) -> torch.Tensor:
    return x.exp().tanh().sum()  # saves the results of exp and tanh


def _gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(_step(x), x)[0]


@pytest.fixture
def taped() -> Any:
    """Return a tape that is left empty."""
    made = Taped()
    yield made
    made.gate.close()
    made.tape.clear()


def test_what_was_dropped_is_replayed(taped: Taped) -> None:
    """Without Python, and nothing stays."""
    x = torch.randn(1000, requires_grad=True)
    expected = _gradient(x)
    for _ in range(3):
        loss = taped.forward(x)
        assert taped.hooks.num_handles() == 2
        loss.backward()
        assert x.grad is not None
        assert torch.equal(x.grad, expected)
        x.grad = None
        del loss
        assert taped.hooks.num_handles() == 0
        assert taped.tape.take_counts()[:5] == (2, 8000, 2, 2, 8000)
    assert not taped.mode.names
    assert not taped.asked


def test_a_handover_in_between_describes_all(taped: Taped) -> None:
    """Contents come before what is made of them."""
    x = torch.randn(1000, requires_grad=True)
    loss = taped.forward(x)
    taped.hand_over()
    resident, exp, tanh = taped.builder.described
    assert resident[0] == "resident"
    assert resident[2] == 4000
    assert exp[:2] == ("made", "aten::exp")
    assert exp[2][0][:3] == ("view", resident[1], (1000,))
    assert exp[-1] == [(exp[-1][0][0], 0, 4000)]
    assert tanh[1] == "aten::tanh"
    assert tanh[2][0][1] == exp[-1][0][0]
    loss.backward()
    assert taped.asked == [("unpack", 4)] * 2


def test_a_replay_without_room_is_handed_over(taped: Taped) -> None:
    """What can wait is not replayed; what cannot wait asks once more, and Python takes over."""
    x = torch.randn(1000, requires_grad=True)

    def make_room(size_bytes: int, is_optional: bool) -> bool:
        taped.asked.append((size_bytes, is_optional))
        if not is_optional:
            taped.hand_over()
        return not is_optional

    taped.use_tape_with(make_room)
    taped.forward(x, most_bytes=-1).backward()
    assert taped.asked == [(4000, True), (4000, False), ("unpack", 4), ("unpack", 4)]


def test_a_source_that_was_changed_unseen_raises(taped: Taped) -> None:
    """What Python raises reaches the program."""
    x = torch.randn(1000, requires_grad=True)
    loss = taped.forward(x)
    torch.autograd.graph.increment_version(x)
    with pytest.raises(ValueError, match=r"4000 bytes at version 1, not 0"):
        loss.backward()


def test_a_write_in_place_is_replayed_on_a_copy(taped: Taped) -> None:
    """The content before it is made again by its own op."""
    x = torch.randn(1000, requires_grad=True)

    def step() -> torch.Tensor:
        return (x.exp() * 1).sigmoid_().sum()

    (expected,) = torch.autograd.grad(step(), x)
    recorded = [COMPUTES, COMPUTES, COMPUTES | Recorded.WRITES, Recorded(0)]
    loss = taped.follow(step, recorded, [4000] * 2, drops={1: [0, 1]}, replays={})
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)
    assert taped.tape.take_counts()[0] == 3


def test_a_copy_without_room_is_made_before_the_next_write(taped: Taped) -> None:
    """The first write fails, and does not run. The next one finds room."""
    x = torch.randn(1000, requires_grad=True)
    expected = _gradient(x)
    has_room = iter([False])
    taped.use_tape_with(lambda _size_bytes, _is_optional: next(has_room, True))
    loss = taped.forward(x, most_bytes=-1)
    with pytest.raises(RuntimeError, match="there is no room to keep a tensor"):
        taped.tape.before_write(x)
    taped.tape.before_write(x)
    x.data.add_(1)
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_running_out_of_memory_keeps_its_type(taped: Taped) -> None:
    """So that programs which catch it, and try with less, go on. The next write is seen as well."""
    x = torch.randn(1000, requires_grad=True)
    expected = _gradient(x)
    loss = taped.forward(x)
    taped.counter.start()
    try:
        taped.counter.set_limit(_UNLIMITED_BYTES, 0, lambda: None)  # any allocation is refused
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            taped.tape.before_write(x)
    finally:
        taped.counter.clear_limit()
        taped.counter.stop()
    taped.tape.before_write(x)
    x.data.add_(1)
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_a_graph_outlives_its_tape() -> None:
    """Handles keep the hooks alive, and these the tape."""
    x = torch.randn(1000, requires_grad=True)
    expected = _gradient(x)
    taped = Taped()
    loss = taped.forward(x)
    tape = weakref.ref(taped)
    taped.gate.use_tape(None, None)
    del taped
    gc.collect()
    assert tape() is not None, "the hooks call it"
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)
    del loss
    gc.collect()
    assert tape() is None


def test_a_long_chain_is_freed_without_recursion(taped: Taped) -> None:
    """Each content owns the op that made it, that op the content before, and so on."""
    x = torch.randn(8, requires_grad=True)
    num_ops = 50_000

    def step() -> torch.Tensor:
        y = x
        for _ in range(num_ops):
            y = y + 1
        return y.exp()

    y = taped.follow(step, [COMPUTES] * (num_ops + 1), [32], drops={0: [0]}, replays={})
    expected = y.detach().clone()
    (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(gradient, expected)
    del y
    assert taped.hooks.num_handles() == 0


def _set(tensor: torch.Tensor) -> None:
    tensor.set_(torch.zeros(1000))


def _assign_and_write(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros(1000)
    tensor.add_(1)


@pytest.mark.parametrize("exchange", [_set, _assign_and_write])
def test_a_source_that_has_exchanged_its_storage(taped: Taped, exchange: Callable[[torch.Tensor], None]) -> None:
    """What the op has read is replayed, and described: the tensor counts writes to another storage."""
    source, weight = torch.randn(1000), torch.ones(1000, requires_grad=True)
    expected = source.exp().tanh()

    def step() -> torch.Tensor:
        return (source.exp().tanh() * weight).sum()

    def forward() -> torch.Tensor:
        recorded = [COMPUTES, COMPUTES, COMPUTES, Recorded(0)]
        return taped.follow(step, recorded, [4000], drops={0: [0]}, replays={})

    loss, values = forward(), source.clone()
    exchange(source)
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)
    assert taped.tape.take_counts()[0] == 2

    source.set_(values)
    loss = forward()
    exchange(source)
    taped.hand_over()
    name, _, size_bytes, version = taped.builder.described[0]
    assert (name, size_bytes, version) == ("resident", 4000, 0)
    del loss
