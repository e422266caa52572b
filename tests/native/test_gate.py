"""The gate alone: which ops reach the mode, what differs, and what it leaves behind."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchdelta._torch.modes import num_modes
from torchdelta.errors import NativeError
from torchdelta.native.counting import LimitedCounter, counting_status, new_counter
from torchdelta.native.gate import Gate, load_gate, new_gate, new_sequence

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(not counting_status().is_on, reason="needs the native parts")


class Seen(TorchDispatchMode):
    """Lists the ops that it sees, and whether autocast is on where they were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Watched:
    """A gate, and what it asks."""

    def __init__(self) -> None:
        assert not isinstance(load_gate(), NativeError)
        self.mode = Seen()
        self.counter: LimitedCounter = new_counter()  # type: ignore[assignment]
        self.asked: list[tuple[str, int]] = []
        asked = (self.on_other, self.make_room, self.on_unseen)
        self.gate: Gate = new_gate(self.mode, torch.device("cpu"), self.counter, *asked)

    def on_other(self, position: int) -> None:
        """See no further op."""
        self.asked.append(("other", position))
        self.gate.end()

    def make_room(self, need_bytes: int) -> None:
        """Find that there is room."""
        self.asked.append(("room", need_bytes))

    def on_unseen(self, tensors: list[torch.Tensor]) -> Callable[[], None]:
        """Note how many tensors an op that no mode sees is about to write, and that it has."""
        self.asked.append(("unseen", len(tensors)))
        return lambda: self.asked.append(("written", len(tensors)))

    def learn(self, step: Any) -> list[int]:
        """Return the hashes of the ops of a step."""
        self.gate.learn()
        step()
        hashes = self.gate.learned()
        self.gate.close()
        return hashes

    def follow(self, hashes: list[int], step: Any, recorded: set[int] = frozenset()) -> bool:  # type: ignore[assignment]
        """Follow a step. Return whether it was complete."""
        self.mode.names.clear()
        self.asked.clear()
        sequence = new_sequence(hashes, [0] * len(hashes), [index in recorded for index in range(len(hashes))])
        self.gate.follow(sequence, 1 << 40)
        try:
            step()
            return self.gate.is_complete()
        finally:
            self.gate.close()


def _included_keys() -> str:
    return str(torch._C._dispatch_tls_local_include_set())  # noqa: SLF001 - there is no public way


@pytest.fixture
def watched() -> Any:
    """Return a gate that is closed at the end."""
    made = Watched()
    yield made
    made.gate.close()
    assert num_modes() == 0


def test_a_followed_step_shows_only_what_is_to_be_recorded(watched: Watched) -> None:
    """The other ops run as without a gate: same results, no Python."""
    x = torch.randn(4, 4)

    def step() -> torch.Tensor:
        return ((x + 1) * 2).exp()

    hashes = watched.learn(step)
    assert len(hashes) == len(set(hashes)) == 3
    assert watched.mode.names == ["add.Tensor", "mul.Tensor", "exp.default"]
    assert watched.follow(hashes, step, {1})
    assert watched.mode.names == ["mul.Tensor"]
    assert not watched.asked


DIFFERENCES = {
    "another op": lambda x: (x + 1).exp(),
    "another shape": lambda x: (x[:2] + 1).sum(0),
    "another dtype": lambda x: (x.double() + 1).sum(0),
    "another integer": lambda x: (x + 1).sum(1),
    "a further op": lambda x: (x + 1).sum(0) + 1,
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_asked_about_before_the_op_runs(watched: Watched, name: str) -> None:
    """And the step goes on, unrecorded or recorded, whatever Python does there."""
    x = torch.randn(4, 4)
    hashes = watched.learn(lambda: (x + 1).sum(0))
    assert not watched.follow(hashes, lambda: DIFFERENCES[name](x))
    ((kind, position),) = watched.asked
    assert kind == "other"
    assert position <= len(hashes)


def test_a_write_is_not_recorded_for_the_sake_of_a_dead_storage(watched: Watched) -> None:
    """Whose address a new storage would have: the allocator gives it the place that became free last."""

    def step() -> None:
        for _ in range(64):
            torch.ones(8).mul_(2)

    known = [torch.ones(8) for _ in range(64)]
    hashes = watched.learn(step)
    for tensor in known:
        watched.gate.know(tensor)
    del known, tensor
    assert watched.follow(hashes, step)
    assert watched.mode.names == []


def test_known_storages_stay_known_among_thousands_of_dead_ones(watched: Watched) -> None:
    """The dead ones are forgotten from time to time."""
    kept = torch.ones(8)
    watched.gate.know(kept)
    for _ in range(5000):
        watched.gate.know(torch.ones(8))
    hashes = watched.learn(lambda: kept.mul_(2))
    assert watched.follow(hashes, lambda: kept.mul_(2))
    assert watched.mode.names == ["mul_.Tensor"]


def test_numbers_that_are_no_integers_may_differ(watched: Watched) -> None:
    """Such as a learning rate: they change no shape."""
    x = torch.randn(4)
    hashes = watched.learn(lambda: x * 0.5)
    assert watched.follow(hashes, lambda: x * 0.25)


def test_a_step_that_ends_early_is_not_complete(watched: Watched) -> None:
    """Whoever asks learns it."""
    x = torch.randn(4)
    hashes = watched.learn(lambda: torch.exp(x + 1))
    assert not watched.follow(hashes, lambda: x + 1)
    assert not watched.asked


def test_room_is_asked_for_before_the_op(watched: Watched) -> None:
    """Only where the live bytes and the need exceed the most."""
    x = torch.zeros(100)
    hashes = watched.learn(lambda: x + 1)
    for live_bytes, asked in ((0, []), (601, [("room", 400)])):
        watched.asked.clear()
        watched.counter.add(live_bytes)
        watched.gate.follow(new_sequence(hashes, [400], [False]), 1000)
        x + 1
        watched.gate.close()
        watched.counter.add(-live_bytes)
        assert watched.asked == asked


def test_an_exception_of_a_callback_arrives(watched: Watched) -> None:
    """As if the op had raised it; and nothing is left on."""

    def fail(_position: int) -> None:
        raise KeyboardInterrupt

    gate = new_gate(watched.mode, torch.device("cpu"), watched.counter, fail, fail, lambda _tensors: lambda: None)
    gate.follow(new_sequence([1], [0], [False]), 1000)
    with pytest.raises(KeyboardInterrupt):
        torch.zeros(1)
    gate.close()
    assert torch.zeros(1) + 1 == 1
    assert not watched.mode.names


def test_an_exception_of_the_mode_or_the_op_arrives(watched: Watched) -> None:
    """The mode leaves the stack again, and no key stays on."""
    keys = _included_keys()
    watched.gate.record()
    assert _included_keys() != keys
    with pytest.raises(RuntimeError, match="must match"):
        torch.zeros(3) + torch.zeros(4)
    assert num_modes() == 0
    watched.gate.close()
    assert _included_keys() == keys


def test_a_write_that_no_mode_sees_is_told_of(watched: Watched) -> None:
    """Before and after the op, even if it fails; only if the written tensor is known."""
    known, other = torch.zeros(4), torch.zeros(4)

    def step() -> None:
        known + 1
        with torch._C._DisableTorchDispatch():  # noqa: SLF001 - as in a subclass
            other.add_(1)
            known.exp()
            known.add_(1)
            torch._foreach_add_([other, known], 1)
            with pytest.raises(RuntimeError, match="must match"):
                known.add_(torch.zeros(5))

    hashes = watched.learn(step)
    assert len(hashes) == 1
    watched.asked.clear()
    assert watched.follow(hashes, step, {0})
    assert watched.asked == [
        ("unseen", 1),
        ("written", 1),
        ("unseen", 2),
        ("written", 2),
        ("unseen", 1),
        ("written", 1),
    ]
    assert torch.equal(known, torch.full((4,), 4.0))


@pytest.mark.filterwarnings("ignore:Sparse invariant")
def test_a_write_through_a_sparse_tensor_reaches_the_mode(watched: Watched) -> None:
    """It writes its values, which an op that is recorded has read."""
    known, other = torch.zeros(4), torch.zeros(4)
    sparse = [torch.sparse_coo_tensor(torch.arange(4)[None], each, (4,), is_coalesced=True) for each in (known, other)]

    def step() -> None:
        known + 1
        sparse[0].neg_()
        sparse[1].neg_()

    hashes = watched.learn(step)
    watched.mode.names.clear()
    watched.gate.forget()
    assert watched.follow(hashes, step, {0})
    assert watched.mode.names == ["add.Tensor", "neg_.default"]


def test_other_threads_are_not_watched(watched: Watched) -> None:
    """Nor do they move the position of this one."""
    x = torch.randn(4)
    hashes = watched.learn(lambda: x + 1)

    def step() -> None:
        thread = threading.Thread(target=lambda: x.exp().sum())
        thread.start()
        thread.join()
        x + 1

    assert watched.follow(hashes, step)
    assert not watched.asked


def test_parameters_can_be_made_while_ops_are_recorded(watched: Watched) -> None:
    """Torch makes them from an alias that must not have a Python object of another class."""
    watched.gate.record()
    layer = nn.Linear(3, 3)
    copy = nn.Parameter(layer.weight.detach())
    assert isinstance(copy, nn.Parameter)
    assert torch.equal(copy, layer.weight)


def test_modes_of_others_see_their_ops_first(watched: Watched) -> None:
    """A mode that comes onto the stack in the middle of a step sees what it sees without a gate."""
    x = torch.randn(4)
    hashes = watched.learn(lambda: torch.exp(x + 1))
    other = Seen()

    def step() -> None:
        y = x + 1
        with other:
            y.exp()

    assert watched.follow(hashes, step, {1})
    assert other.names == watched.mode.names == ["exp.default"]


def test_a_gate_dies_with_its_owner() -> None:
    """It is part of a circle with the mode: the collector finds it."""
    watched = Watched()
    watched.gate.record()
    torch.zeros(1)
    watched.gate.close()
    gone = weakref.ref(watched.mode)
    del watched
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("lists", [([1], [], [False]), ([1], [0], []), ([-1], [0], [False])])
def test_a_sequence_of_unequal_lists_is_refused(lists: tuple[list[int], list[int], list[bool]]) -> None:
    """With an error, not a crash."""
    assert not isinstance(load_gate(), NativeError)
    with pytest.raises((ValueError, OverflowError)):
        new_sequence(*lists)
