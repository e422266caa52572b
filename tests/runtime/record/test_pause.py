"""Steps that are known to fit are not recorded, and everything holds as in steps that are."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.runtime.parts import running_session, set_pause_limit
from tests.runtime.record.pausing import CONFIG, WIDTH, is_recording, make_model, peak_of, train
from torchdelta import BudgetError, MemoryBudget
from torchdelta.native.counting import counting_status

pytestmark = pytest.mark.skipif(not counting_status().is_on, reason="needs the native parts")


def test_recording_pauses_after_three_steps_that_fit() -> None:
    """The first step makes the optimizer's states, the next two are alike."""
    model, optimizer = make_model()
    with MemoryBudget("1TiB", CONFIG) as budget:
        seen = []
        for _ in range(5):
            seen.append(is_recording())
            train(model, optimizer, [8])
        summary = budget.summary()
    assert seen == [True, True, True, False, False]
    assert summary.num_steps == 5
    assert summary.num_unrecorded_steps == 2
    assert "2 steps were not recorded" in str(summary)


@pytest.mark.parametrize(("share", "pauses"), [(0.85, True), (0.95, False)])
def test_recording_pauses_where_a_tenth_of_the_budget_stays_free(share: float, *, pauses: bool) -> None:
    """The share is that of the steps' peak; nothing leaves in any of them."""
    budget_bytes = int(peak_of(1024) / share)
    gc.collect()
    with MemoryBudget(budget_bytes, CONFIG) as budget:
        train(*make_model(), [1024] * 6)
    summary = budget.summary()
    assert summary.swapped_out_bytes == summary.recomputed_bytes == 0
    assert (summary.num_unrecorded_steps > 0) == pauses


def test_steps_of_a_pause_have_peaks_times_and_the_same_bits() -> None:
    """What the summary says of them is measured, or that of the recorded steps."""
    expected = train(*make_model(), [64] * 8)
    with MemoryBudget("1TiB", CONFIG) as budget:
        assert train(*make_model(), [64] * 8) == expected
    steps = budget.summary().steps
    assert len(steps) == 8
    # A recorded step also keeps the states of random generators.
    assert all(0.9 * steps[2].peak_bytes < step.peak_bytes <= steps[2].peak_bytes for step in steps[3:])
    assert {step.kept_bytes for step in steps[3:]} == {steps[2].kept_bytes}
    assert all(0 < step.op_time_s <= step.time_s * 1.001 for step in steps)
    assert all(step.had_optimizer for step in steps)


@pytest.mark.parametrize("share", [0.6, 0.8, 0.95])
def test_a_larger_step_resumes_recording_and_holds_the_budget(share: float) -> None:
    """What was saved before recording resumed can leave, too: without that the larger step would not fit."""
    batches = [256] * 5 + [4096] * 2 + [256] * 4 + [4096]
    expected = train(*make_model(), batches)
    budget_bytes = int(peak_of(4096) * share)
    gc.collect()
    with MemoryBudget(budget_bytes, CONFIG) as budget:
        model, optimizer = make_model()
        losses = train(model, optimizer, batches[:5])
        assert not is_recording()
        losses += train(model, optimizer, batches[5:])
        assert is_recording()
    summary = budget.summary()
    assert losses == expected
    assert summary.peak_bytes <= budget_bytes
    assert summary.evicted
    assert summary.num_unrecorded_steps < 12


def test_a_slightly_larger_step_does_not_pass_the_budget() -> None:
    """Its forward stays under the limit of forwards only if its backward stays under that of steps."""
    for more in (8, 32, 64, 128):
        batches = [1024] * 5 + [1024 + more]
        budget_bytes = int(peak_of(1024) / 0.89)
        gc.collect()
        with MemoryBudget(budget_bytes, CONFIG) as budget:
            train(*make_model(), batches)
        assert budget.summary().peak_bytes <= budget_bytes


def test_lengths_that_vary_are_recorded_soon() -> None:
    """Each time that recording has to resume, more steps must be alike before the next pause."""
    batches = ([64] * 4 + [512]) * 8
    expected = train(*make_model(), batches)
    with MemoryBudget("1TiB", CONFIG) as budget:
        assert train(*make_model(), batches) == expected
        assert is_recording()
    assert budget.summary().num_unrecorded_steps < 4


@pytest.mark.parametrize("sizes", [(1024, 4096, 16384, 65536), (65536,)], ids=["growing", "at once"])
def test_an_evaluation_that_does_not_fit_is_refused(sizes: tuple[int, ...]) -> None:
    """It saves nothing, so nothing could leave: the budget is not passed, however large one op is."""
    model, optimizer = make_model()
    budget_bytes = peak_of(256) * 2
    gc.collect()

    def evaluate() -> None:
        with torch.no_grad():
            for size in sizes:
                model(torch.randn(size, WIDTH))

    with MemoryBudget(budget_bytes, CONFIG) as budget:
        train(model, optimizer, [256] * 5)
        assert not is_recording()
        with pytest.raises(torch.OutOfMemoryError):  # a BudgetError is one
            evaluate()
        assert is_recording()
        with pytest.raises(BudgetError):
            evaluate()
    assert budget.summary().peak_bytes <= budget_bytes


def test_one_op_of_a_larger_step_cannot_pass_the_budget() -> None:
    """The largest tensor comes last: recording has resumed long before, at the first tensor that was larger."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)), nn.Linear(WIDTH, 32 * WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(size: int) -> str:
        loss = torch.log_softmax(model(torch.randn(size, WIDTH)), -1)[:, 0].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()).hex()

    gc.collect()
    with MemoryBudget("1TiB", CONFIG) as budget:
        step(128)
        step(128)
    budget_bytes = int(budget.summary().peak_bytes / 0.88)
    gc.collect()
    with MemoryBudget(budget_bytes, CONFIG) as budget:
        for _ in range(4):
            step(128)
        assert not is_recording()
        for size in (132, 136, 140):
            step(size)
        assert is_recording()
    assert budget.summary().peak_bytes <= budget_bytes


def test_a_saved_tensor_that_was_written_raises_eagers_error() -> None:
    """Before recording resumes, and after."""
    for resumes in (False, True):
        model, optimizer = make_model()
        with MemoryBudget("1TiB", CONFIG):
            train(model, optimizer, [8] * 4)
            x = torch.randn(8, WIDTH, requires_grad=True)
            y = x.exp()
            y.add_(1)
            if resumes:
                running_session().pause.end()
            with pytest.raises(RuntimeError, match=r"\[torch.float32 \[8, 64\]\] is at version 1; expected version 0"):
                y.sum().backward()


def test_resuming_at_any_moment_keeps_the_bits() -> None:
    """In forward, in backward, in the optimizer's step and between them."""
    expected = train(*make_model(), [32] * 6)

    def resume(*_: Any) -> None:
        running_session().pause.on_limit()

    for moment in range(4):
        model, optimizer = make_model()
        with MemoryBudget("1TiB", CONFIG):
            losses = train(model, optimizer, [32] * 4)
            assert not is_recording()
            hooks: list[Any] = []
            if moment == 0:
                hooks = [model[4].register_forward_hook(resume)]
            elif moment == 1:
                hooks = [model[4].register_full_backward_hook(resume)]
            elif moment == 2:
                hooks = [optimizer.register_step_pre_hook(resume)]
            else:
                resume()
            losses += train(model, optimizer, [32])
            assert is_recording()
            for hook in hooks:
                hook.remove()
            losses += train(model, optimizer, [32])
        assert losses == expected


def test_what_a_pause_saved_dies_with_its_graph() -> None:
    """A node that saves its own output holds no cycle, adopted or not."""
    for resumes in (False, True):
        model, optimizer = make_model()
        with MemoryBudget("1TiB", CONFIG):
            train(model, optimizer, [8] * 4)
            x = torch.randn(8, WIDTH, requires_grad=True)
            y = x.exp().tanh()
            if resumes:
                running_session().pause.end()
            gone = weakref.ref(y)
            gc.disable()
            del y
            assert gone() is None
            gc.enable()


def test_second_derivatives_and_kept_graphs() -> None:
    """A penalty on gradients, a graph that has two backwards, and the step after them."""

    def penalized(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
        losses = train(model, optimizer, [16] * 4)
        x = torch.randn(16, WIDTH, requires_grad=True)
        loss = model(x).square().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [*losses, loss.item().hex(), *train(model, optimizer, [16] * 3)]

    expected = penalized(*make_model())
    with MemoryBudget("1TiB", CONFIG):
        assert penalized(*make_model()) == expected


def test_a_graph_outlives_the_scope() -> None:
    """Saved tensors of a pause are there for a backward after the stop."""
    model, optimizer = make_model()
    train(model, optimizer, [16] * 4)
    loss = model(torch.randn(16, WIDTH)).square().mean()
    loss.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model, optimizer = make_model()
    with MemoryBudget("1TiB", CONFIG):
        train(model, optimizer, [16] * 4)
        assert not is_recording()
        loss = model(torch.randn(16, WIDTH)).square().mean()
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True) if p.grad is not None)


def test_an_optimizer_that_is_new_in_a_pause_is_foreseen() -> None:
    """Its first step makes states: recording resumes before it."""
    model, optimizer = make_model()
    with MemoryBudget("1TiB", CONFIG):
        train(model, optimizer, [16] * 4)
        assert not is_recording()
        other = torch.optim.Adam(model.parameters())
        train(model, other, [16])
        assert is_recording()


def test_modes_of_the_program_keep_their_places() -> None:
    """A mode that was entered in a pause is above the recorder once recording resumes, and leaves as usual."""
    model, optimizer = make_model()
    with MemoryBudget("1TiB", CONFIG):
        train(model, optimizer, [16] * 4)
        assert not is_recording()
        with FlopCounterMode(display=False) as counter:
            model(torch.randn(16, WIDTH)).sum().backward()
            running_session().pause.end()
            model(torch.randn(16, WIDTH)).sum().backward()
        # Two forwards and backwards; the gradient of the first input is not computed.
        assert counter.get_total_flops() == 2 * (3 * 8 - 1) * 2 * 16 * WIDTH * WIDTH
        assert is_recording()
        train(model, optimizer, [16])


def test_an_exception_in_a_pause_leaves_a_working_scope() -> None:
    """In forward and in backward."""

    def fail(*_: Any) -> None:
        raise KeyError("a bug of the user's")

    model, optimizer = make_model()
    with MemoryBudget("1TiB", CONFIG) as budget:
        train(model, optimizer, [16] * 4)
        for register in (model[4].register_forward_hook, model[4].register_full_backward_hook):
            hook = register(fail)
            with pytest.raises(KeyError):
                train(model, optimizer, [16])
            hook.remove()
            optimizer.zero_grad()
        train(model, optimizer, [16] * 2)
    assert budget.summary().num_steps >= 6


def test_transforms_end_the_pause_for_good() -> None:
    """Inside `torch.func` ops are counted, which needs the recorder."""
    model, optimizer = make_model()
    with MemoryBudget("1TiB", CONFIG):
        train(model, optimizer, [16] * 4)
        assert not is_recording()
        torch.func.grad(lambda x: x.square().sum())(torch.randn(4))
        train(model, optimizer, [16] * 20)
        assert is_recording()


@pytest.mark.parametrize("limit_bytes", [None, 0])
def test_a_transform_inside_of_a_forward_that_is_not_recorded(limit_bytes: int | None) -> None:
    """What the forward has saved does not become a tensor of the transform, also if memory runs short inside of it."""

    def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = model(x).tanh()
        weights = torch.func.grad(lambda y: (y.exp() * torch.randn(16, WIDTH)).sum())(hidden.detach())
        rows = torch.vmap(lambda row: (row * 2).cumsum(0))(hidden)
        (hidden * weights + rows).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def run(*, paused: bool) -> list[torch.Tensor]:
        model, optimizer = make_model()
        train(model, optimizer, [16] * 4)
        if paused:
            assert not is_recording()
            if limit_bytes is not None:
                set_pause_limit(limit_bytes)
        return step(model, torch.randn(16, WIDTH))

    expected = run(paused=False)
    with MemoryBudget("1TiB", CONFIG):
        found = run(paused=True)
        assert is_recording()
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_another_thread_is_always_recorded() -> None:
    """The call that resumes recording runs on the main thread only."""
    seen: list[bool] = []

    def work() -> None:
        model, optimizer = make_model()
        with MemoryBudget("1TiB", CONFIG):
            train(model, optimizer, [16] * 6)
            seen.append(is_recording())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]


def test_a_forked_child_is_left_alone() -> None:
    """A worker that forks in a pause has no budget, and the parent keeps its own."""
    model, optimizer = make_model()
    with MemoryBudget("1TiB", CONFIG):
        train(model, optimizer, [16] * 4)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                loss = model(torch.randn(4096, WIDTH)).sum()
                loss.backward()
                status = 0 if MemoryBudget.current() is None else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert not is_recording()
        train(model, optimizer, [2048])
        assert is_recording()


def test_without_native_parts_every_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python hooks stay."""
    monkeypatch.setenv("TORCHDELTA_NATIVE", "0")
    model, optimizer = make_model()
    with MemoryBudget("1TiB", CONFIG):
        train(model, optimizer, [16] * 6)
        assert is_recording()


@pytest.mark.parametrize("every", [2, 3, 5])
def test_a_gradient_penalty_now_and_then_does_not_pass_the_budget(every: int) -> None:
    """Its first backward saves more tensors, and starts with no more bytes than that of another step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses: list[str] = []

    def step(index: int) -> None:
        x = torch.randn(512, 64, requires_grad=True)
        y = model(x)
        loss = y.square().mean()
        if index % every == every - 1:
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            loss = loss + (gradient.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())

    gc.collect()
    with MemoryBudget("1TiB", CONFIG) as unlimited:
        for index in range(every):
            step(index)
    budget_bytes = int(0.8 * unlimited.summary().peak_bytes)
    gc.collect()
    with MemoryBudget(budget_bytes, CONFIG) as budget:
        for index in range(4 * every):
            step(index)
    assert budget.summary().peak_bytes <= budget_bytes


def test_a_gradient_penalty_in_every_step_is_not_recorded_either() -> None:
    """Where recorded steps had one and fitted."""
    torch.manual_seed(0)
    model, optimizer = make_model()
    with MemoryBudget("1TiB", CONFIG) as budget:
        for _ in range(8):
            x = torch.randn(16, WIDTH, requires_grad=True)
            y = model(x)
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (y.square().mean() + gradient.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not is_recording()
    assert budget.summary().num_unrecorded_steps >= 4
