"""Steps that record, drop and replay on the native tape end with the bits of plain ones, whatever happens in them."""

from __future__ import annotations

import gc
import itertools
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.runtime.parts import running_session
from tests.runtime.record.partly import (
    CHANGES_AT,
    ROWS,
    WIDTH,
    drop_all,
    following,
    num_native_steps,
)
from tests.runtime.record.taped import (  # noqa: F401 - a fixture
    NUM_STEPS,
    Loop,
    budget_of_usual_steps,
    one_thread_and_the_tape,
    outcome,
    same_bits,
    usual,
)
from tests.same_bits.judge import bits_of, seed_everything
from torchdelta import Config, MemoryBudget
from torchdelta.errors import ReplayError
from torchdelta.native.gate import Recorded
from torchdelta.runtime.current import current_session
from torchdelta.runtime.follow import lane

if TYPE_CHECKING:
    Seen = list[Any]

pytestmark = [
    pytest.mark.usefixtures("one_thread_and_the_tape"),
]


def test_steps_that_are_alike_use_the_tape() -> None:
    """From the step on whose backward is known."""
    counts = same_bits(lambda loop, _index: usual(loop))
    assert counts[CHANGES_AT - 1] > 2
    assert counts[-1] == counts[CHANGES_AT - 1] + NUM_STEPS - CHANGES_AT


def test_what_the_tape_does_is_counted() -> None:
    """Like what Python does: the summary's figures do not depend on who replays."""
    with following(budget_of_usual_steps()):
        loop, counters = Loop(), running_session().counters
        done: list[tuple[int, ...]] = []
        while num_native_steps() < 2:
            before = counters.copy()
            usual(loop)
            now = counters.minus(before)
            recomputed = (now.num_recomputed_ops, now.recomputed_bytes)
            done.append((*recomputed, now.num_evictions, now.dropped_bytes, now.saved_bytes, now.left_bytes))
            assert len(done) < NUM_STEPS
    assert done[-1] == done[-2] == done[-3]  # the last of these ran in Python
    assert min(done[-1]) > 0


def test_accumulated_gradients() -> None:
    """The first backward makes the gradients and the second one adds to them: both become known."""

    def body(loop: Loop, index: int) -> None:
        loss = loop.forward()
        loss.backward()
        if index % 2:
            loop.update(loss)

    counts = same_bits(body, num_steps=30)
    assert counts[-1] - counts[-7] == 6, "the last steps, of both kinds, do not use the tape"


def _dropped_out(_loop: Loop, _layer: int, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(nn.functional.relu_(nn.functional.dropout(x, 0.1)), 0.2)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_ops_that_draw_numbers_or_write_in_place(is_interrupted: bool) -> None:
    """Their replays draw the same numbers and write copies, on the tape and after a handover in the middle."""

    def body(loop: Loop, index: int) -> None:
        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            if is_interrupted and index == CHANGES_AT:
                x = _resume_and_evict(loop, layer, x)
            return _dropped_out(loop, layer, x)

        loss = loop.forward(between)
        loss.backward()
        loop.update(loss)

    seen: set[Recorded] = set()

    def make_lane(*args: Any) -> lane.Lane | None:
        made = lane.make_lane(*args)
        seen.update(args[2][position].on_tape for position in (made.ops if made is not None else ()))
        return made

    with mock.patch("torchdelta.runtime.follow.learning.make_lane", make_lane):
        counts = same_bits(body)
    assert counts[CHANGES_AT - 1] > 0
    for how in (Recorded.IS_RANDOM, Recorded.WRITES, Recorded.OVERWRITES):
        assert any(how in recorded for recorded in seen), f"the test says nothing: no op on the tape is {how!r}"


def _resize_a_source(loop: Loop, layer: int, x: torch.Tensor) -> torch.Tensor:
    if layer == 3:
        storage, kept = loop.read.untyped_storage(), loop.read.clone()
        storage.resize_(0)
        storage.resize_(kept.nbytes)
        storage.copy_((kept * 2).untyped_storage())
    return x


def _write_a_source(loop: Loop, _layer: int, x: torch.Tensor) -> torch.Tensor:
    loop.read.add_(x.detach())
    return x


def _write_a_saved_content(_loop: Loop, layer: int, x: torch.Tensor) -> torch.Tensor:
    y = x.tanh()  # saves its result
    if layer == 3:
        y.data.mul_(0.5)  # unseen by autograd: backward reads the new content
    return y


def _write_below_autograd(loop: Loop, layer: int, x: torch.Tensor) -> torch.Tensor:
    if layer == 2:
        with torch.no_grad():
            loop.stack.layers[0].bias.data.add_(0.0)
    return x


def _diverge(_loop: Loop, layer: int, x: torch.Tensor) -> torch.Tensor:
    if layer == 3:
        x = x + x.cos()
        drop_all()
    return x


def _diverge_early(_loop: Loop, layer: int, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if layer == 0 else x


def _resume_and_evict(_loop: Loop, layer: int, x: torch.Tensor) -> torch.Tensor:
    if layer == 3 and (session := current_session()) is not None:
        session.partial.find_more()
        drop_all()
    return x


@pytest.mark.parametrize(
    "between",
    [
        _resize_a_source,
        _write_a_source,
        _write_a_saved_content,
        _write_below_autograd,
        _diverge,
        _diverge_early,
        _resume_and_evict,
    ],
)
def test_something_else_happens_in_forward(between: Any) -> None:
    """In one step, after others have used the tape, and afterwards they do so again."""

    def body(loop: Loop, index: int) -> None:
        if index == CHANGES_AT:
            loss = loop.forward(lambda layer, x: between(loop, layer, x))
            loss.backward()
            loop.update(loss)
        else:
            usual(loop)

    counts = same_bits(body)
    assert counts[CHANGES_AT - 1] > 0


def _backward_twice(loop: Loop) -> None:
    loss = loop.forward()
    loss.backward(retain_graph=True)
    loss.backward()
    loop.update(loss)


def _only_some_gradients(loop: Loop) -> None:
    loss = loop.forward()
    parameters = list(loop.stack.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    loop.update(loss)


def _hook_in_backward(loop: Loop) -> None:
    loss = loop.forward()
    handle = loop.stack.layers[1].weight.register_hook(lambda gradient: gradient * 2)
    loss.backward()
    handle.remove()
    loop.update(loss)


def _step_in_backward(loop: Loop) -> None:
    loss = loop.forward()

    def halve(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.mul_(0.5)

    handles = [layer.weight.register_post_accumulate_grad_hook(halve) for layer in list(loop.stack.layers)[2:]]
    loss.backward()
    for handle in handles:
        handle.remove()
    loop.update(loss)


def _graph_outlives_the_step(loop: Loop) -> None:
    kept = loop.forward()
    loss = loop.forward()
    loss.backward()
    loop.update(loss)
    with torch.no_grad():
        loop.seen.append(bits_of(kept))
    gc.collect()


def _other_settings(loop: Loop) -> None:
    loss = loop.forward()
    torch.use_deterministic_algorithms(mode=True)
    try:
        loss.backward()
    finally:
        torch.use_deterministic_algorithms(mode=False)
    loop.update(loss)


def _freed_until_after_the_backward(loop: Loop) -> None:
    loss = loop.forward()
    storage, kept = loop.read.untyped_storage(), loop.read.clone()
    storage.resize_(0)
    loss.backward()
    storage.resize_(kept.nbytes)
    storage.copy_(kept.untyped_storage())
    loop.update(loss)


def _abandoned(loop: Loop) -> None:
    loop.forward()
    usual(loop)


def _reads_a_saved_tensor(loop: Loop) -> None:
    outputs: list[torch.Tensor] = []
    loss = loop.forward(lambda _layer, x: outputs.append(x) or x)
    node: Any = outputs[-1].grad_fn
    gelu = node.next_functions[1][0]
    loop.seen.append(bits_of(getattr(gelu, "_saved_self")))  # noqa: B009 - torch's stubs do not have it
    loss.backward()
    loop.update(loss)


@pytest.mark.parametrize(
    "other",
    [
        _backward_twice,
        _only_some_gradients,
        _hook_in_backward,
        _step_in_backward,
        _graph_outlives_the_step,
        _other_settings,
        _freed_until_after_the_backward,
        _abandoned,
        _reads_a_saved_tensor,
    ],
)
def test_something_else_happens_in_backward(other: Any) -> None:
    """As in forward."""

    def body(loop: Loop, index: int) -> None:
        if index == CHANGES_AT:
            other(loop)
        else:
            usual(loop)

    counts = same_bits(body)
    assert counts[CHANGES_AT - 1] > 0


def test_an_exception_in_forward() -> None:
    """What the tape has recorded is forgotten with the graph."""

    def fail(layer: int, x: torch.Tensor) -> torch.Tensor:
        if layer == 3:
            raise KeyError(layer)
        return x

    def body(loop: Loop, index: int) -> None:
        if index == CHANGES_AT:
            with pytest.raises(KeyError):
                loop.forward(fail)
        usual(loop)

    same_bits(body)


def test_a_saved_tensor_that_was_written_raises() -> None:
    """Also one whose content was dropped on the tape: as in eager mode, or where a replay reads it."""
    dropped: list[bool] = []

    def body(loop: Loop, index: int) -> None:
        inner: list[torch.Tensor] = []

        def keep(_layer: int, x: torch.Tensor) -> torch.Tensor:
            inner.append(x.tanh())
            return inner[-1]

        loss = loop.forward(keep)
        if index < CHANGES_AT:
            inner.clear()
            loss.backward()
            loop.update(loss)
            return
        torch.autograd.graph.increment_version(inner[2])
        inner.clear()
        dropped.append(loop.is_on_tape())
        with pytest.raises((RuntimeError, ReplayError), match=r"modified by an inplace operation|changed in place"):
            loss.backward()

    for budget in (None, budget_of_usual_steps()):
        outcome(body, budget, CHANGES_AT + 1)
    assert dropped == [False, True]


def test_the_scope_ends_before_the_backward() -> None:
    """The graph is still there, and gives plain's gradients."""

    def gradients(budget: int | None) -> Seen:
        loop = Loop()
        if budget is None:
            for _ in range(CHANGES_AT):
                usual(loop)
            loss = loop.forward()
        else:
            with following(budget):
                for _ in range(CHANGES_AT):
                    usual(loop)
                assert num_native_steps()
                loss = loop.forward()
        loss.backward()
        return bits_of([parameter.grad for parameter in loop.stack.parameters()])

    assert gradients(budget_of_usual_steps()) == gradients(None)


@pytest.mark.parametrize("hands_over", [False, True], ids=["on the tape", "handed over"])
@pytest.mark.parametrize("is_saved", [False, True], ids=["only read", "saved"])
def test_a_source_that_other_code_has_changed(*, hands_over: bool, is_saved: bool) -> None:
    """It cannot be noticed before the replay: this is an error, not a wrong bit."""
    with following(budget_of_usual_steps()):
        loop, extra = Loop(), torch.randn(ROWS, WIDTH)

        def add(layer: int, x: torch.Tensor) -> torch.Tensor:
            return x + extra if layer == 3 else x

        for _ in range(CHANGES_AT):
            loss = loop.forward(add)
            loss.backward()
            loop.update(loss)
        assert num_native_steps()
        loss = loop.forward(add)
        torch.autograd.graph.increment_version(loop.stack.norms[2].weight if is_saved else extra)
        if hands_over:
            assert loop.is_on_tape()
            running_session().partial._hand_over("a test")  # noqa: SLF001
        with pytest.raises((ReplayError, RuntimeError), match=r"changed in place|modified by an inplace"):
            loss.backward()


class _Normed(nn.Module):
    """Convolutions with batch norms: replays must not count a batch twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(5))

    def forward(self, x: torch.Tensor, *, autocasts: bool) -> torch.Tensor:
        """Return the loss. What is made before the first saved tensor is not on the tape: no weight is cast there."""
        x = self.first(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            for conv, norm in zip(self.convs, self.norms, strict=True):
                x = x + nn.functional.relu_(norm(conv(x)))
        return x.float().square().mean()


@pytest.mark.parametrize("autocasts", [False, True])
def test_batch_norms_and_autocast(autocasts: bool) -> None:
    """Running statistics are those of plain training, and replays run in the precision of the first run."""

    def train(limit: bool) -> Seen:
        seed_everything()
        model = _Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in itertools.count():
            loss = model(torch.randn(4, 8, 16, 16), autocasts=autocasts)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == NUM_STEPS:
                break
        if limit:
            assert num_native_steps() > 2
        return [bits_of(loss), bits_of(model.state_dict())]

    plain = train(limit=False)
    with MemoryBudget("1TiB", Config(tier="memory")) as unlimited:
        train(limit=False)
    # Where half precision convolutions are unfolded, a backward after a forward on the tape needs 1.07 of this peak.
    with following(int(unlimited.summary().peak_bytes * 1.1)):
        seen = train(limit=True)
    assert seen == plain


def test_nothing_of_a_step_stays() -> None:
    """The bytes in use are the same after each step."""
    with following(budget_of_usual_steps()):
        loop, used = Loop(), set[int]()
        gc.collect()
        gc.disable()
        try:
            for index in range(40):
                usual(loop)
                loop.seen.clear()
                if index > CHANGES_AT:
                    usage = running_session().ledger.usage
                    usage.ask_counter(fresh=True)
                    used.add(usage.total_bytes)
            assert num_native_steps() > 20
        finally:
            gc.enable()
    assert len(used) == 1, used
