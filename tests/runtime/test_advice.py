"""The least budget that BudgetError names holds for the whole run, and the error says what takes it."""

from __future__ import annotations

import gc
import itertools
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.runtime.advice import Run, convolutional, follow, language_model, perceptron, recurrent
from tests.runtime.programs import mlp, running, same_bits
from tests.sampling import sample
from torchdelta import BudgetError, notices
from torchdelta.runtime.survey.first_step import foresee_first_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Model = tuple[nn.Module, Callable[[], torch.Tensor]]

TOO_SMALL_BYTES = 64 << 10
# Gradients that are freed between steps, the error cannot know of beforehand: at most so much larger is the named one.
LARGEST_EXCESS = 1.35


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _lists(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=True)


def _one_by_one(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, foreach=False, weight_decay=0.1)


def _fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def _adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters)


def _reentrant() -> Model:
    return language_model("reentrant")


def _not_reentrant() -> Model:
    return language_model("not reentrant")


def _check(make_model: Callable[[], Model], run: Run) -> None:
    """Check that the first named budget is enough, that it is not much too large, and that the bits are torch's."""
    torch.manual_seed(0)
    expected = run.train(*make_model())
    gc.collect()
    followed = follow(make_model, run, TOO_SMALL_BYTES)
    assert len(followed.named_bytes) == 1
    assert same_bits(expected, followed.result)
    assert followed.named_bytes[0] <= LARGEST_EXCESS * followed.peak_bytes


@pytest.mark.parametrize("make_optimizer", [_adam, _momentum, _lists, _one_by_one, _fused, _adagrad])
def test_first_named_budget_holds_for_the_run_with_any_optimizer(make_optimizer: Any) -> None:
    """States that the first step makes are named before it."""
    _check(perceptron, Run(make_optimizer=make_optimizer))


def _train_in_scope(budget_bytes: int, make_optimizer: Any) -> tuple[int, str]:
    """Make a model and its optimizer in the scope. Return the peak, or what BudgetError names, and which it was."""
    gc.collect()
    try:
        with running(budget_bytes) as (budget, _):
            Run(make_optimizer=make_optimizer).train(*perceptron())
        return budget.summary().peak_bytes, "peak"
    except BudgetError as error:
        return error.least_budget_bytes, "at least" if error.is_lower_bound else "named"


@pytest.mark.parametrize("make_optimizer", [_adam, _momentum, _fused])
def test_first_named_budget_holds_where_the_model_is_made_in_the_scope(make_optimizer: Any) -> None:
    """As under `torchdelta run`: where its parameters do not fit, the optimizer is made when nothing is computed."""
    torch.manual_seed(0)
    named_bytes, what = _train_in_scope(TOO_SMALL_BYTES, make_optimizer)
    assert what == "named"
    peak_bytes, what = _train_in_scope(named_bytes, make_optimizer)
    assert what == "peak"
    assert named_bytes <= LARGEST_EXCESS * peak_bytes


def _wide() -> Model:
    model, x = mlp(256, 4), torch.ones(8, 256)
    return model, lambda: model(x).square().mean()


def test_states_that_do_not_fit_are_counted_once() -> None:
    """Where the pass fits, and the optimizer's first step does not, its need is not added to itself."""
    stateless = Run(make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    pass_bytes = follow(_wide, stateless, 1 << 30).peak_bytes
    followed = follow(_wide, Run(make_optimizer=_adam), pass_bytes + (64 << 10))
    assert len(followed.named_bytes) == 1
    assert followed.named_bytes[0] <= LARGEST_EXCESS * followed.peak_bytes


@pytest.mark.parametrize("sets_to_none", [True, False])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_first_named_budget_holds_with_gradients_that_stay(num_micro_batches: int, sets_to_none: bool) -> None:
    """Gradients of an earlier micro-batch, or zeroed ones, stay beside the next forward and backward."""
    run = Run(make_optimizer=_adam, num_micro_batches=num_micro_batches, sets_to_none=sets_to_none, clips=True)
    _check(perceptron, run)


@pytest.mark.parametrize(
    ("num_micro_batches", "make_model"),
    sample(itertools.product([1, 2], [recurrent, convolutional, language_model, _reentrant, _not_reentrant]), 4),
)
def test_first_named_budget_holds_for_any_model(make_model: Callable[[], Model], num_micro_batches: int) -> None:
    """Workspaces, batch statistics, the states of dropouts and nested backwards are within it."""
    run = Run(make_optimizer=_adam, num_steps=2, num_micro_batches=num_micro_batches, sets_to_none=False)
    _check(make_model, run)


def _train_adversaries() -> list[torch.Tensor]:
    torch.manual_seed(0)
    maker, judge, noise = mlp(64, 3), mlp(64, 3), torch.randn(48, 64)
    optimizers = [torch.optim.Adam(model.parameters()) for model in (judge, maker)]
    for _ in range(2):
        (judge(noise).square().mean() - judge(maker(noise).detach()).mean()).backward()
        optimizers[0].step()
        judge.zero_grad()
        judge(maker(noise)).mean().backward()
        optimizers[1].step()
        maker.zero_grad()
    return [parameter.detach() for model in (maker, judge) for parameter in model.parameters()]


def test_first_named_budget_holds_with_two_optimizers() -> None:
    """The second optimizer's states are named by the first one's step."""
    expected = _train_adversaries()
    gc.collect()
    with pytest.raises(BudgetError) as caught, running(300 << 10):
        _train_adversaries()
    named_bytes = caught.value.least_budget_bytes
    del caught
    gc.collect()
    with running(named_bytes):
        assert same_bits(expected, _train_adversaries())


def _train_by_three_losses() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = mlp(64, 3)
    optimizer = torch.optim.RMSprop(model.parameters(), momentum=0.9)
    for _ in range(3):
        z = model(torch.randn(64, 64))
        losses = z.square().mean(), z.abs().mean(), z.sin().mean()
        for loss in losses:
            loss.backward(retain_graph=loss is not losses[-1])
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return [parameter.detach() for parameter in model.parameters()]


def _train_averaged() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = mlp(64, 3)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(3):
        model(torch.randn(64, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return [parameter.detach() for parameter in average.parameters()]


def _train_beside_out_buffer() -> list[torch.Tensor]:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 64))
    for _ in range(3):
        h = (torch.randn(256, 64) @ weight).relu()
        with torch.no_grad():
            buffer = torch.empty(1024, 64)
            torch.cat([h] * 4, out=buffer)
            total = buffer.sum()
            del buffer
        h.square().mean().backward()
    assert weight.grad is not None
    return [weight.grad, total]


@pytest.mark.parametrize(
    ("train", "share"),
    [
        *[(_train_averaged, share) for share in (0.5, 0.7, 0.9)],
        *[(_train_beside_out_buffer, share) for share in (0.5, 0.7, 0.9)],
        *[(_train_by_three_losses, share) for share in (0.5, 0.7, 0.9)],
    ],
)
def test_first_named_budget_holds_from_a_later_moment(train: Callable[[], list[torch.Tensor]], share: float) -> None:
    """A budget that fails in the middle of a step, or in its optimizer, names what the whole run needs."""
    with running() as (budget, _):
        expected = train()
    budget_bytes = int(budget.summary().peak_bytes * share)
    gc.collect()
    try:
        with running(budget_bytes):
            train()
    except BudgetError as error:
        budget_bytes = error.least_budget_bytes
    gc.collect()
    with running(budget_bytes):
        assert same_bits(expected, train())


def test_shortage_in_a_later_micro_batch_names_the_states_too() -> None:
    """The gradients of the first micro-batch are there, and the optimizer has not stepped yet."""
    torch.manual_seed(0)
    model, loss_of = perceptron()
    optimizer = _adam(model.parameters())
    with running() as (budget, _):
        loss_of().backward()
    gc.collect()
    states_bytes = 2 * sum(parameter.nbytes for parameter in model.parameters())
    with pytest.raises(BudgetError) as caught, running(budget.summary().peak_bytes // 2):
        loss_of().backward()
    assert caught.value.groups["optimizer states"] >= states_bytes
    assert optimizer.state == {}


# -- what it says


def test_error_tells_groups_and_names() -> None:
    """The groups add up to the named budget, and the largest tensors have the names that a user knows."""
    model, loss_of = language_model()
    optimizer = _adam(model.parameters())
    with pytest.raises(BudgetError) as caught, running(700 << 10):
        loss_of().backward()
    error = caught.value
    assert sum(error.groups.values()) == error.least_budget_bytes
    assert error.groups["parameters"] == sum(parameter.nbytes for parameter in model.parameters())
    assert error.groups["gradients"] == error.groups["parameters"]
    assert error.groups["optimizer states"] > 2 * error.groups["parameters"] - 1
    assert len(error.args) == 1
    first, *others = str(error).splitlines()
    assert " out of memory." in first
    assert str(error.least_budget_bytes) in first
    assert [line.strip().split(":")[0] for line in others[1:4]] == [
        "in use there",
        "largest tensors there",
        "everything that can be evicted was",
    ]
    assert error.least_freeing_gradients_bytes < error.least_budget_bytes
    del optimizer


def test_error_names_modules_and_parameters() -> None:
    """An activation is named by the module and the op that made it, a parameter by its path."""
    _model, loss_of = recurrent()
    with pytest.raises(BudgetError) as caught, running(TOO_SMALL_BYTES):
        loss_of().backward()
    names = {name for name, _ in caught.value.largest}
    assert "lstm: aten.mkldnn_rnn_layer.default" in names
    assert "lstm.weight_hh_l0 (parameter)" in names


def test_shortage_without_gradients_is_a_lower_bound() -> None:
    """What comes after an evaluation is not known."""
    with pytest.raises(BudgetError, match="needs at least") as caught, running(100_000), torch.no_grad():
        torch.ones(100_000).mul(2)
    assert caught.value.is_lower_bound


# -- optimizers that are not tried


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer, and keeps a copy of each parameter, as Lookahead does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__([torch.zeros(1)], {})
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step the other one, and copy."""
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.clone()
        return loss


class Asking(torch.optim.SGD):
    """Asks for the value of a gradient, which shapes alone cannot answer. Its step is not tried."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step where the gradient is positive."""
        if self.param_groups[0]["params"][0].grad.sum().item() > 0:
            return super().step(closure)
        return None


@pytest.fixture(name="_notices_are_new")
def _make_notices_new() -> Iterator[None]:
    notices.warn_once.cache_clear()
    yield
    notices.warn_once.cache_clear()


def test_states_of_a_wrapped_optimizer_are_counted() -> None:
    """The inner optimizer's states count, and the inner optimizer does not step. What the wrapper adds is not known."""
    model = mlp(32, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(inner, 1)  # replaces `inner.step`
    foreseen = foresee_first_step(Wrapper(inner))
    assert foreseen.is_estimate
    assert foreseen.state_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert not inner.state


def test_states_that_a_wrapped_optimizer_has_already_are_counted_once() -> None:
    """The wrapper itself has none yet."""

    def named_bytes(*, is_wrapped: bool) -> int:
        model, x = mlp(256, 8), torch.randn(1024, 256)
        inner = torch.optim.AdamW(model.parameters())
        model(x).square().mean().backward()
        inner.step()
        inner.zero_grad()
        wrapper = Wrapper(inner) if is_wrapped else None
        with pytest.raises(BudgetError) as raised, running(12 << 20):
            model(x).square().mean().backward()
        del wrapper
        return raised.value.least_budget_bytes

    gc.collect()
    bare_bytes = named_bytes(is_wrapped=False)
    gc.collect()
    assert abs(named_bytes(is_wrapped=True) - bare_bytes) <= 64 << 10


@pytest.mark.usefixtures("_notices_are_new")
def test_untried_optimizer_is_estimated_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Where no trial is possible, two states a parameter are named, and nothing that fits is refused."""
    model = mlp(32, 2)
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = Asking(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, logger="torchdelta"):
        foreseen = [foresee_first_step(optimizer) for _ in range(2)]
    assert foreseen[0].is_estimate
    assert foreseen[0].state_bytes == 2 * size_bytes
    messages = [record.getMessage() for record in caplog.records]
    assert len([message for message in messages if message.startswith("the memory for the first step of Asking")]) == 1
    x = torch.randn(8, 32)
    with running() as (budget, _):
        model(x).sum().backward()
    model.zero_grad()
    with running(budget.summary().peak_bytes + 4096):
        model(x).sum().backward()
        optimizer.step()
