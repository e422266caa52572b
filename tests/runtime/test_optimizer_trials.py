"""The first step of an optimizer is foreseen without a change of the program: of its draws, objects or memory."""

# ruff: noqa: NPY002 - programs draw so, and a trial must not

from __future__ import annotations

import contextlib
import random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from tests.same_bits.judge import bits_of
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta.runtime.survey.first_step import foresee_first_step

_num_global_steps = 0
_matrices: dict[int, torch.Tensor] = {}


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


class _CountsInAGlobal(_Custom):
    def scale(self) -> float:
        global _num_global_steps  # noqa: PLW0603 - as programs do
        _num_global_steps += 1
        return min(1.0, _num_global_steps / 10)


class _CountsInItsClass(_Custom):
    num_steps: ClassVar[int] = 0

    def scale(self) -> float:
        type(self).num_steps += 1
        return min(1.0, self.num_steps / 10)


class _KeepsTensorsInItsModule(_Custom):
    """By size, as optimizers do that multiply with the same matrices."""

    def noise(self, parameter: torch.Tensor) -> torch.Tensor:
        size = parameter.shape[0]
        if size not in _matrices:
            _matrices[size] = torch.eye(size, dtype=parameter.dtype, device=parameter.device)
        return _matrices[size] @ parameter


class _ReplacesAPartOfTorchsStep(torch.optim.SGD):
    """Replaces `_init_group`, and counts in a global."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01, momentum=0.9)

    def _init_group(self, group: Any, *args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        global _num_global_steps  # noqa: PLW0603
        _num_global_steps += 1
        group["lr"] = min(0.01, _num_global_steps / 1000)
        return super()._init_group(group, *args)  # pyright: ignore[reportAttributeAccessIssue]


class _HasTheGroupsOfAnother(torch.optim.SGD):
    """As wrappers have; the step is torch's."""

    def __init__(self, params: Any) -> None:
        self.inner: Any = None
        self.groups: Any = None
        params = list(params)
        super().__init__(params, lr=0.01)
        self.inner = torch.optim.SGD(params, lr=0.01)

    @property
    def param_groups(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of the other, as soon as there is one."""
        return self.groups if self.inner is None else self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.groups = groups


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
        _CountsInAGlobal,
        _CountsInItsClass,
        _KeepsTensorsInItsModule,
        _ReplacesAPartOfTorchsStep,
        _HasTheGroupsOfAnother,
        _StepsAnotherThroughAClosure,
        _WritesANumber,
    ],
)
@pytest.mark.parametrize("decision_class", ["saved", "all"])
def test_the_program_stays_as_it_is(kind: type[_Custom], decision_class: Any) -> None:
    """Steps give plain's bits, and generators, globals and objects are where plain leaves them."""

    def train(scope: contextlib.AbstractContextManager[Any]) -> Any:
        global _num_global_steps  # noqa: PLW0603
        _num_global_steps = 0
        _CountsInItsClass.num_steps = 0
        _matrices.clear()
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
        return bits_of(list(model.parameters())), drawn, history, _num_global_steps, _CountsInItsClass.num_steps

    plain = train(contextlib.nullcontext())
    assert train(MemoryBudget("64MiB", Config(tier="memory", decision_class=decision_class))) == plain


def test_the_step_of_somebody_else_is_estimated() -> None:
    """It is not run, and neither is an optimizer that it steps."""

    class Raising(_Custom):
        def scale(self) -> float:
            raise AssertionError

    parameter = nn.Parameter(torch.ones(64, 64))
    step = foresee_first_step(Raising([parameter]))
    assert (step.state_bytes, step.is_estimate) == (2 * parameter.nbytes, True)


def test_a_subclass_that_only_has_other_defaults_is_tried() -> None:
    """The code of its step is torch's. It may have further attributes."""

    class WithDefaults(torch.optim.AdamW):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=1e-4, weight_decay=0.1)
            self.params = list(params)

    parameter = nn.Parameter(torch.ones(64, 64))
    step = foresee_first_step(WithDefaults([parameter]))
    assert step.state_bytes >= 2 * parameter.nbytes
    assert not step.is_estimate


def test_a_step_that_draws_tensors_stays_in_its_budget() -> None:
    """Each of the tensors takes as much as its parameter, beside a forward that waits for a second backward."""
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
