"""The trial of an optimizer's first step changes nothing of the program: not its draws, objects or memory."""

# ruff: noqa: NPY002 - programs draw so, and a trial must not

from __future__ import annotations

import contextlib
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.same_bits.judge import bits_of
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta.runtime.survey.first_step import RealError, foresee_first_step, is_trial

MIB = 1 << 20


class _Custom(torch.optim.Optimizer):
    """Scales each gradient by what a subclass says, and adds its noise."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def scale(self) -> float:
        """Return the scale of this step."""
        return 1.0

    def noise(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the noise of one parameter."""
        return torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * self.scale())
                    parameter.add_(self.noise(parameter), alpha=group["lr"])


class _DrawsNumbers(_Custom):
    def scale(self) -> float:
        return float(torch.rand(()))


class _DrawsInPython(_Custom):
    def scale(self) -> float:
        return random.random() + float(np.random.rand())


class _DrawsTensors(_Custom):
    def noise(self, parameter: torch.Tensor) -> torch.Tensor:
        return torch.randn(parameter.shape)


class _DrawsLikeTensors(_Custom):
    def noise(self, parameter: torch.Tensor) -> torch.Tensor:
        return torch.randn_like(parameter)


class _HasItsOwnGenerator(_Custom):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(3)

    def scale(self) -> float:
        return float(torch.rand((), generator=self.generator))


class _Schedule:
    def __init__(self) -> None:
        self.num_steps = 0
        self.history: list[float] = []

    def advance(self) -> float:
        """Return the next scale."""
        self.num_steps += 1
        self.history.append(min(1.0, self.num_steps / 10))
        return self.history[-1]


class _AdvancesAnObject(_Custom):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.schedule = _Schedule()
        self.scale = self.schedule.advance  # type: ignore[method-assign]


class _Closing:
    """Closes what it has when it dies."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def __del__(self) -> None:
        self.events.append("closed")


class _AppendsThroughAMethod(_Custom):
    """Of a list of C, which has no attributes; and through the default of a function."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.seen: list[int] = []
        self.append = self.seen.append

        def count(seen: list[int] = self.seen) -> int:
            seen.append(1)
            return len(seen)

        self.count = count

    def scale(self) -> float:
        self.append(1)
        return 1.0 / self.count()


class _HasAnObjectWithADestructor(_Custom):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.events: list[str] = []
        self.closing = _Closing(self.events)

    def scale(self) -> float:
        assert self.events == []
        return 1.0


class _StepsAnotherThroughAClosure(_Custom):
    """As Accelerate's wrapper does with a GradScaler."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        inner = torch.optim.Adam(params, lr=0.01)
        self.call = lambda: inner.step()  # noqa: PLW0108 - a closure

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step the other."""
        del closure
        self.call()


class _WritesANumber(_Custom):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.holder = [torch.zeros(())]

    def scale(self) -> float:
        torch.add(self.holder[0], 1.0, out=self.holder[0])
        return float(self.holder[0])


@pytest.mark.parametrize(
    "kind",
    [
        _DrawsNumbers,
        _DrawsInPython,
        _DrawsTensors,
        _DrawsLikeTensors,
        _HasItsOwnGenerator,
        _AdvancesAnObject,
        _AppendsThroughAMethod,
        _HasAnObjectWithADestructor,
        _StepsAnotherThroughAClosure,
        _WritesANumber,
    ],
)
def test_a_trial_leaves_the_program_as_it_is(kind: type[_Custom]) -> None:
    """Steps give plain's bits, and generators and objects are where plain leaves them."""

    def train(scope: contextlib.AbstractContextManager[Any]) -> Any:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = nn.Linear(64, 64)
        optimizer = kind(model.parameters())
        x = torch.randn(4, 64)
        with scope:
            for _ in range(3):
                optimizer.zero_grad()
                model(x).pow(2).sum().backward()
                optimizer.step()
        schedule = getattr(optimizer, "schedule", None)
        drawn = (random.random(), float(np.random.rand()), bits_of(torch.get_rng_state()))
        history = None if schedule is None else (schedule.num_steps, schedule.history)
        return bits_of(list(model.parameters())), drawn, history

    plain = train(contextlib.nullcontext())
    assert train(MemoryBudget("64MiB", Config(tier="memory"))) == plain


def test_states_on_the_device_of_their_parameters_are_foreseen() -> None:
    """A trial makes them on the meta device, and steps no real optimizer."""

    class FourStates(_Custom):
        def noise(self, parameter: torch.Tensor) -> torch.Tensor:
            state = self.state[parameter]
            for name in "abcd":
                state[name] = torch.zeros(parameter.shape, device=parameter.device)
            return state["a"]

    parameter = nn.Parameter(torch.ones(64, 64))
    step = foresee_first_step(FourStates([parameter]))
    assert (step.state_bytes, step.is_estimate) == (4 * parameter.nbytes, False)
    inner = torch.optim.Adam([parameter])
    outer = _Custom([parameter])
    outer.scale = lambda: inner.step() or 1.0  # type: ignore[method-assign]
    assert not foresee_first_step(outer).is_estimate
    assert not inner.state


def test_a_trial_on_one_thread_does_not_concern_another() -> None:
    """There, a real optimizer may step meanwhile."""
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    answers: list[bool] = []

    class Asking(_Custom):
        def scale(self) -> float:
            with pytest.raises(RealError):
                is_trial(other)
            thread = threading.Thread(target=lambda: answers.append(is_trial(other)))
            thread.start()
            thread.join()
            return 1.0

    assert not foresee_first_step(Asking([nn.Parameter(torch.ones(2))])).is_estimate
    assert answers == [False]
    assert not is_trial(other)


def test_a_trial_takes_no_memory() -> None:
    """An op that would make a real tensor ends it: in a tight budget there is no room for one."""
    weight = nn.Parameter(torch.randn(512, 512))
    x = torch.randn(512, 512, requires_grad=True)

    def run(budget: int | str, optimizer: torch.optim.Optimizer) -> MemoryBudget:
        weight.grad = x.grad = None
        with MemoryBudget(budget, Config(tier="memory", planner=None)) as memory_budget:
            hidden = x
            for _ in range(16):
                hidden = torch.tanh(hidden)
            loss = (hidden @ weight).sum()
            loss.backward(retain_graph=True)
            optimizer.step()
            del hidden, loss
        return memory_budget

    peak_bytes = run("1TiB", _DrawsTensors([weight])).summary().peak_bytes
    for share in (0.9, 0.7, 0.6, 0.5):
        budget_bytes = int(share * peak_bytes)
        with contextlib.suppress(BudgetError):
            assert run(budget_bytes, _DrawsTensors([weight])).summary().peak_bytes <= budget_bytes
