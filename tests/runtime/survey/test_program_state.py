"""After a BudgetError the program has what it had at the op that did not fit, whatever it reassigned since."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.runtime.programs import running
from tests.sampling import sample
from torchdelta import BudgetError
from torchdelta._torch.fake import FakeTensor
from torchdelta.runtime.survey.survey import Survey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH = 64
FEW_ROWS, MANY_ROWS = 16, 2048
# Above what the program has. The op that does not fit is in the forward with little room, in the backward with more.
ROOM_KIB = [600, 700, 800, 900, 1000, 1050, 1100, 1150, 1200, 1250, 1300, 1400, 1450, 1500]


class Program(nn.Module):
    """A perceptron. Its subclasses reassign something in each step."""

    hook: Callable[[Any, torch.Tensor], None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.shadow = nn.ParameterList(p.detach().clone() for p in self.layers.parameters())
        self.shadow.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.plain_mean = torch.zeros(WIDTH)
        self.means = [torch.zeros(WIDTH)]
        self.nested = {"inner": ([torch.zeros(WIDTH)],)}
        self.last = None

    def attach(self) -> Program:
        """Make what a deep copy does not contain."""
        self.shadow_of = dict(zip(self.layers.parameters(), self.shadow, strict=True))
        self.optimizer = torch.optim.SGD(self.layers.parameters(), 0.01, momentum=0.9)
        if self.hook is not None:
            for parameter in self.layers.parameters():
                parameter.register_post_accumulate_grad_hook(self.hook)
        return self

    def saved(self) -> io.BytesIO:
        """Return a file with all of the state: it needs no memory of the budget."""
        state = {name: getattr(self, name) for name in ("plain_mean", "means", "nested", "last")}
        gradients = [parameter.grad for parameter in self.parameters()]
        file = io.BytesIO()
        torch.save((self.state_dict(), state, gradients, self.optimizer.state_dict()), file)
        file.seek(0)
        return file

    @classmethod
    def loaded(cls, file: io.BytesIO) -> Program:
        """Return a new program in a saved state."""
        tensors, state, gradients, optimizer_state = torch.load(file)
        program = cls()
        program.load_state_dict(tensors)
        vars(program).update(state)
        for parameter, gradient in zip(program.parameters(), gradients, strict=True):
            parameter.grad = gradient
        program.attach().optimizer.load_state_dict(optimizer_state)
        return program

    def bits(self) -> list[tuple[str, type, bytes]]:
        """Return all contents, and the classes of what has them."""
        found: dict[str, Any] = {**self.state_dict(keep_vars=True), "plain_mean": self.plain_mean, "last": self.last}
        found |= {f"means.{index}": mean for index, mean in enumerate(self.means)}
        found |= {f"nested.{index}": mean for index, mean in enumerate(self.nested["inner"][0])}
        found |= {f"{name}.grad": parameter.grad for name, parameter in self.named_parameters()}
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {f"state.{index}.{name}": value for name, value in state.items()}
        return [
            (name, type(value), b"" if value is None else value.detach().clone().numpy().tobytes())
            for name, value in found.items()
        ]

    def observe(self, mean: torch.Tensor) -> None:
        """Take the mean of a layer's output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        for layer in self.layers:
            x = layer(x).relu()
            self.observe(x.detach().mean(0))
        return x + self.mean

    def train_step(self, x: torch.Tensor) -> None:
        """Run one step."""
        loss = self(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Buffer(Program):
    """As the vector quantisers do."""

    def observe(self, mean: torch.Tensor) -> None:
        self.mean = self.mean * 0.9 + mean * 0.1


class Attribute(Program):
    """An attribute that is no registered buffer."""

    def observe(self, mean: torch.Tensor) -> None:
        self.plain_mean = self.plain_mean * 0.9 + mean * 0.1
        self.last = mean


class Lists(Program):
    """Lists are changed, also in a dict of tuples."""

    def observe(self, mean: torch.Tensor) -> None:
        self.means.append(self.means[-1] * 0.9 + mean)
        self.nested["inner"][0][0] = mean
        del self.means[:-3]


class NewContainers(Program):
    """Lists and dicts are made anew."""

    def observe(self, mean: torch.Tensor) -> None:
        self.means = [self.means[0] + mean]
        self.nested = {"inner": ([self.nested["inner"][0][0] + mean],)}


class DataOfBuffer(Program):
    """`.data` of tensors that are not trained."""

    def observe(self, mean: torch.Tensor) -> None:
        self.mean.data = self.mean * 0.9 + mean
        self.plain_mean.data = self.plain_mean + mean
        self.last = self.mean.data


class DataHook(Program):
    """A hook steps the parameter by its `.data`."""

    def hook(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.data = parameter.data - 0.01 * parameter.grad
        parameter.grad = None


class StateHook(Program):
    """A hook creates and updates the states of an optimizer."""

    def hook(self, parameter: torch.Tensor) -> None:
        state = self.optimizer.state[parameter]
        if not state:
            state["count"] = torch.zeros(1)
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["count"] = state["count"] + 1
        state["momentum_buffer"] = state["momentum_buffer"] * 0.9 + parameter.grad
        parameter.data = parameter.data - 0.01 * state["momentum_buffer"]
        parameter.grad = None


class OptimizerHook(Program):
    """A hook runs an optimizer, which ends the survey there."""

    def hook(self, parameter: torch.Tensor) -> None:
        torch.optim.SGD([parameter], 0.01).step()
        parameter.grad = None


class GradientHook(Program):
    """A hook exchanges a gradient or removes it."""

    def hook(self, parameter: torch.Tensor) -> None:
        parameter.grad = parameter.grad * 2 if parameter.dim() == 1 else None


class ExistingGradientHook(Program):
    """A hook sets a gradient to another real tensor."""

    def hook(self, parameter: torch.Tensor) -> None:
        parameter.grad = self.shadow_of[parameter].data


class Accumulating(Program):
    """Gradients stay between steps, and are set to None in the middle of every other one."""

    def train_step(self, x: torch.Tensor) -> None:
        loss = self(x).square().mean()
        if self.layers[0].weight.grad is not None:
            self.optimizer.zero_grad()
        loss.backward()


class AccumulatingInPlace(Program):
    """Gradients are never removed."""

    def train_step(self, x: torch.Tensor) -> None:
        self(x).square().mean().backward()


class CopiedAverage(Program):
    """Averages are written with `copy_`."""

    def hook(self, parameter: torch.Tensor) -> None:
        self.shadow_of[parameter].copy_(0.9 * self.shadow_of[parameter] + 0.1 * parameter.detach())


class SwappedAverage(Program):
    """Parameters and averages are exchanged."""

    def hook(self, parameter: torch.Tensor) -> None:
        shadow = self.shadow_of[parameter]
        parameter.data, shadow.data = shadow.data, parameter.data


class RotatedAverage(Program):
    """A new parameter, whose old value becomes the average."""

    def hook(self, parameter: torch.Tensor) -> None:
        shadow = self.shadow_of[parameter]
        parameter.data, shadow.data = 0.5 * (shadow.data + parameter.data), parameter.data


class SwappedForward(Program):
    """A `finally` of the forward undoes what the forward has exchanged, as it would after an OutOfMemoryError."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.swap()
            try:
                x = x + super().forward(x) * 0
            finally:
                self.swap()
        return super().forward(x)

    def swap(self) -> None:
        for parameter, shadow in self.shadow_of.items():
            parameter.data, shadow.data = shadow.data, parameter.data


PROGRAMS = [
    Buffer,
    Attribute,
    Lists,
    NewContainers,
    DataOfBuffer,
    DataHook,
    StateHook,
    OptimizerHook,
    GradientHook,
    ExistingGradientHook,
    Accumulating,
    AccumulatingInPlace,
    CopiedAverage,
    SwappedAverage,
    RotatedAverage,
]


@pytest.fixture
def at_begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Run a function when a survey begins, and collect what it returns. Its first item is the function."""
    calls: list[Any] = [None]
    begin = Survey.begin

    def observed_begin(self: Survey) -> None:
        if calls[0] is not None:
            calls.append(calls[0]())
        begin(self)

    monkeypatch.setattr(Survey, "begin", observed_begin)
    yield calls
    calls.clear()


def base_bytes() -> int:
    """Count what lives already, tensors of other tests included."""
    gc.collect()
    with running() as (_, session):
        return session.ledger.usage.total_bytes


@pytest.mark.parametrize("start", sample(range(4), 1, 1))
@pytest.mark.parametrize("kind", sample(PROGRAMS, 6))
def test_everything_is_as_it_was_at_the_op_that_did_not_fit(
    kind: type[Program], start: int, at_begin: list[Any]
) -> None:
    """The program can be saved, and trains on as a copy of it does without a budget."""
    few, many = torch.randn(FEW_ROWS, WIDTH), torch.randn(MANY_ROWS, WIDTH)
    for index, room_kib in enumerate(ROOM_KIB[start::4]):
        other_bytes = base_bytes() + 200 * 1024  # and the program
        torch.manual_seed(0)
        program = kind().attach()
        if index % 2:
            program.train_step(few)
        at_begin[:] = [program.bits]
        with running(other_bytes + room_kib * 1024, policy="recompute-only"):
            with pytest.raises(BudgetError):
                program.train_step(many)
            assert len(at_begin) == 2
            assert program.bits() == at_begin[-1]
            file = program.saved()
            program.train_step(few)
        copied = kind.loaded(file)
        copied.train_step(few)
        assert program.bits() == copied.bits()
        del program, copied
        at_begin[:] = [None]


def test_what_the_forward_exchanged_back_is_not_exchanged_again() -> None:
    """A forward exchanges weights and exchanges them back in a `finally`: so it ends, wherever the step fails."""
    many = torch.randn(MANY_ROWS, WIDTH)
    other_bytes = base_bytes() + 200 * 1024
    for room_kib in ROOM_KIB[::3]:
        torch.manual_seed(0)
        program = SwappedForward().attach()
        before = program.bits()
        with running(other_bytes + room_kib * 1024, policy="recompute-only"), pytest.raises(BudgetError):
            program.train_step(many)
        assert program.bits() == before
        del program


def test_a_tensor_of_a_failed_step_in_a_global_variable_is_a_clear_error() -> None:
    """It cannot be restored, so every later use says what it is: in the budget, in the next one, and outside."""
    torch.manual_seed(0)
    program, many, few = Program().attach(), torch.randn(MANY_ROWS, WIDTH), torch.randn(FEW_ROWS, WIDTH)
    kept = {"total": torch.zeros(())}

    def step(x: torch.Tensor) -> None:
        loss = program(x).square().mean()
        kept["total"] = kept["total"] + loss.detach()
        loss.backward()

    error = r"made in a step that did not fit the memory budget \(of .* no content"
    with running(base_bytes() + 1000 * 1024):
        with pytest.raises(BudgetError):
            step(many)
        assert isinstance(kept["total"], FakeTensor)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=error):
                step(few)
        with pytest.raises(RuntimeError, match=error):
            kept["total"].item()
    with pytest.raises(RuntimeError, match=error):
        step(few)
    for use in (lambda: kept["total"] * 2, lambda: pickle.dumps(kept), lambda: torch.save(kept, io.BytesIO())):
        with pytest.raises(RuntimeError, match=error):
            use()
    with running(), pytest.raises(RuntimeError, match=error):
        float(kept["total"])
    kept["total"] = torch.zeros(())
    step(few)
    assert kept["total"].item() > 0


def test_a_scaler_whose_first_step_did_not_fit_scales_the_next() -> None:
    """Its scale was created in the survey."""
    program, many, few = Program().attach(), torch.randn(MANY_ROWS, WIDTH), torch.randn(FEW_ROWS, WIDTH)
    scaler = torch.amp.GradScaler("cpu")
    with running(base_bytes() + 1000 * 1024):
        with pytest.raises(BudgetError):
            scaler.scale(program(many).square().mean()).backward()
        scaler.scale(program(few).square().mean()).backward()
        scaler.step(program.optimizer)
        scaler.update()
    assert scaler.get_scale() == 65536.0


def test_the_named_budget_does_not_count_what_the_program_has_replaced() -> None:
    """Gradients that are set to None before the backward are freed in a real step, and so in a survey."""
    torch.manual_seed(0)
    program, many = Accumulating().attach(), torch.randn(MANY_ROWS, WIDTH)
    program.train_step(torch.randn(FEW_ROWS, WIDTH))
    budget_bytes, named = base_bytes() + 1000 * 1024, []
    for has_gradients in (True, False):
        if not has_gradients:
            program.optimizer.zero_grad()
        with running(budget_bytes, policy="recompute-only"), pytest.raises(BudgetError) as caught:
            program.train_step(many)
        named.append(caught.value.least_budget_bytes)
    gradient_bytes = sum(parameter.nbytes for parameter in program.layers.parameters())
    assert named[0] - named[1] < gradient_bytes / 2


def test_a_transformers_model_trains_on_after_a_budget_error() -> None:
    """A convolutional one, whose batch norms keep statistics."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4
    )
    model = transformers.ResNetForImageClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        model(pixel_values=x).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    few, many = torch.randn(2, 3, 32, 32), torch.randn(256, 3, 32, 32)
    plain = copy.deepcopy(model)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), 1e-3)
    step(plain, plain_optimizer, few)
    with running(base_bytes() + 2000 * 1024):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(BudgetError):
            step(model, optimizer, many)
        assert not optimizer.state
        is_batch_norm = [name.endswith(("running_mean", "running_var", "num_batches_tracked")) for name in before]
        assert any(is_batch_norm)
        model.load_state_dict(before)  # the statistics of the layers that had run
        step(model, optimizer, few)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
