# ruff: noqa: ARG001, ARG005, S301, SLF001
# Some actions are about what torch keeps to itself.
# pyright: basic
"""Parameters, gradients and optimizer states that have left: whatever a program does with them is as in plain torch.

Every action runs in the middle of a training whose persistent tensors have all just left, and again while they leave
before each op. What it returns, and what the training ends with, equals the plain run's, bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    parameters_to_vector,
    vector_to_parameters,
)

from tests.following import following_drawn
from tests.runtime.parts import empty_everything, is_emptied, running_session
from tests.same_bits.judge import bits_of
from tests.sampling import sample
from torchdelta import Config, MemoryBudget
from torchdelta.runtime.memory.persistents import Persistents
from torchdelta.runtime.state.contents import WRAPPED_NUMBER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    Action = Callable[[torch.nn.Module, torch.optim.Optimizer], Any]

CANDIDATES = "torchdelta.runtime.memory.candidates"


@pytest.fixture(autouse=True)
def small_tensors_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of any size leave: the models here are small."""
    monkeypatch.setattr(f"{CANDIDATES}.LEAST_BYTES", WRAPPED_NUMBER_BYTES + 1)


@pytest.fixture
def harsh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everything leave before each op that is not an argument of it."""
    begin, lock = Persistents.begin, Persistents.lock

    def begin_harshly(self: Persistents, *arguments: Any, **options: Any) -> None:
        self.in_use.begin(arguments)
        self.evict(0)
        self.in_use.end()
        begin(self, *arguments, **options)

    def lock_harshly(self: Persistents, tensors: Any, **options: Any) -> None:
        found = list(tensors)
        self.in_use.lock(found)
        self.evict(0)
        lock(self, found, **options)

    monkeypatch.setattr(Persistents, "begin", begin_harshly)
    monkeypatch.setattr(Persistents, "lock", lock_harshly)


def scope() -> MemoryBudget:
    """Return a scope whose budget is no reason to evict anything."""
    return MemoryBudget("1TiB", Config(decision_class="all", tier="memory"))


class Net(torch.nn.Module):
    """A small language model: tied embeddings, a norm, dropout, and a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(40, 16)
        self.body = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.LayerNorm(24), torch.nn.GELU())
        self.back = torch.nn.Linear(24, 16)
        self.head = torch.nn.Linear(16, 40)
        self.head.weight = self.embedding.weight
        self.scale = torch.nn.Parameter(torch.ones(16))
        self.frozen = torch.nn.Parameter(torch.randn(16), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        hidden = self.embedding(ids) * self.scale + self.frozen
        return self.head(functional.dropout(self.back(self.body(hidden)), 0.1, self.training) * self.scale)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of most trainings."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(
    scope: contextlib.AbstractContextManager[Any],
    action: Action | None = None,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    net: Callable[[], torch.nn.Module] = Net,
    num_steps: int = 3,
    action_step: int = 1,
) -> Any:
    """Train, and run an action between a backward and its optimizer's step. Return all that there is."""
    torch.manual_seed(0)
    model = net()
    stepper = optimizer(model.parameters())
    observed: list[Any] = []
    with scope:
        for step in range(num_steps):
            ids = torch.randint(0, 40, (2, 5))
            loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            observed.append(loss.item())
            if action is not None and step == action_step:
                if isinstance(scope, MemoryBudget):
                    assert empty_everything() > 10
                observed.append(bits_of(action(model, stepper)))
                if isinstance(scope, MemoryBudget):
                    empty_everything()
            stepper.step()
            stepper.zero_grad()
        observed.append(bits_of(model.state_dict()))
    return observed, bits_of(model.state_dict()), bits_of(list(stepper.state_dict()["state"].values()))


def every_tensor(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters, their gradients, and the states."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*parameters, *gradients, *states]


def each(read: Callable[[torch.Tensor], Any]) -> Action:
    """Return the action that reads every tensor."""
    return lambda model, optimizer: [read(tensor) for tensor in every_tensor(model, optimizer)]


def _saved(thing: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file, **options)
    return file.getvalue()


class _Exporting(torch.nn.Module):
    """A module whose pickled state has its parameters once more, read in every way that needs no op, and by an op."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def __getstate__(self) -> dict[str, Any]:
        tensors = [parameter.detach() for parameter in self.model.parameters()]
        reads = [lambda t: t.numpy().tobytes(), torch.Tensor.tolist, lambda t: np.asarray(t).tobytes()]
        reads += [lambda t: torch.utils.dlpack.from_dlpack(t).clone(), lambda t: bool(t.data_ptr()), lambda t: t * 2]
        reads += [lambda t: t.untyped_storage()[0]]
        return {"read": [reads[index % len(reads)](tensor) for index, tensor in enumerate(tensors)]} | self.__dict__


def _save_what_reads_itself(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Save a module whose own code reads what has left, and go on training with all that it has exported."""
    del optimizer
    loaded = _loaded(_saved(_Exporting(model)))
    return [loaded.read, [parameter.detach().clone() for parameter in loaded.model.parameters()]]


def _loaded(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)


def _unsafe_zero_copy(tensor: torch.Tensor) -> Any:
    """Write through an array that shares the tensor's memory, and read it after everything else has left."""
    array = tensor.detach().numpy()
    if MemoryBudget.current() is not None:
        empty_everything()
        assert not is_emptied(tensor)
    array += 1
    return array.tobytes()


def _read_storage(storage: torch.UntypedStorage) -> bytes:
    """Read every byte of a small storage, both ends of a large one: each byte is a read of its own, and slow."""
    return bytes(storage.tolist() if storage.nbytes() <= 128 else [storage[0], storage[-1]])


def _write_storage(tensor: torch.Tensor) -> Any:
    storage = tensor.untyped_storage()
    if MemoryBudget.current() is not None:
        empty_everything()
        assert not is_emptied(tensor)
    storage[0] = 3
    return [storage.nbytes(), _read_storage(storage)]


def _hold_slice(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    del optimizer
    part = model.scale.untyped_storage()[4:8]
    if MemoryBudget.current() is not None:
        empty_everything()
        assert not is_emptied(model.scale)
    return bytes(part.tolist())


def _exchange(tensor: torch.Tensor) -> Any:
    detached = tensor.detach()
    alias = tensor.data
    alias.mul_(2)
    return [detached, alias, tensor]


def _views(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().reshape(-1)
    return [flat[1:], flat[:1], flat.unsqueeze(0).expand(3, -1), flat.as_strided((1,), (1,), 0), flat.unsqueeze(0).T]


def _ema(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        averaged.update_parameters(model)
        if MemoryBudget.current() is not None:
            empty_everything()
    return averaged.state_dict()


def _reload(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    content = _saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    checkpoint = _loaded(content)
    if MemoryBudget.current() is not None:
        empty_everything()
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return [model.state_dict(), optimizer.state_dict()["state"]]


def _reload_by_assignment(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    del optimizer
    state = copy.deepcopy(model.state_dict())
    return [str(model.load_state_dict(state, assign=True)), model.state_dict()]


def _set_data(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    del optimizer
    first, second = model.scale, model.frozen
    first.data, second.data = second.data, first.data
    return [first, second]


def _set(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    del optimizer
    with torch.no_grad():
        model.frozen.set_(model.scale.detach())
    return [model.frozen, model.scale]


def _cast_and_back(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    del optimizer
    model.double()
    model.float()
    return model.state_dict()


def _freeze(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    del optimizer
    model.scale.requires_grad_(False)
    model.frozen.requires_grad_(True)
    return [p.requires_grad for p in model.parameters()]


def _swap(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    del optimizer
    torch.utils.swap_tensors(model.back.bias, torch.nn.Parameter(torch.arange(16.0)))
    return model.state_dict()


def _dlpack(tensor: torch.Tensor) -> Any:
    shared = torch.from_dlpack(tensor.detach())
    if MemoryBudget.current() is not None:
        empty_everything()
        assert not is_emptied(tensor)
    return [shared.clone(), torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor.detach())).clone()]


def _share(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    del optimizer
    model.share_memory()
    if MemoryBudget.current() is not None:
        empty_everything()
        assert not any(map(is_emptied, model.parameters()))
    return model.state_dict()


def _script(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    del optimizer
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(model.eval(), torch.zeros(1, 3, dtype=torch.int64), check_trace=False), file)
    model.train()
    file.seek(0)
    return torch.jit.load(file).state_dict()


def _map(tensor: torch.Tensor) -> Any:
    target = tensor.detach().clone()
    target.map_(tensor.detach(), lambda a, b: a + 2 * b)
    return [target, tensor.detach().apply_(lambda a: a * 2)]


def _zero(set_to_none: bool) -> Action:
    def zero(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        optimizer.zero_grad(set_to_none=set_to_none)
        if MemoryBudget.current() is not None:
            empty_everything()
        ids = torch.arange(10).reshape(2, 5)
        model(ids).square().mean().backward()
        return [p.grad for p in model.parameters()]

    return zero


def _gradients_of_gradients(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    del optimizer
    loss = model(torch.arange(10).reshape(2, 5)).square().mean()
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, trained, create_graph=True)
    sum(g.square().sum() for g in gradients).backward()
    return [p.grad for p in trained]


def _functional(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    del optimizer
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    ids = torch.arange(10).reshape(2, 5)
    model.eval()
    out = torch.func.grad(lambda ps: torch.func.functional_call(model, ps, (ids,)).square().mean())(parameters)
    model.train()
    return out


def _to_vector(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    del optimizer
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector * 2, model.parameters())
    return [vector, model.state_dict()]


ACTIONS: dict[str, Action] = {
    "state_dict": lambda m, o: [m.state_dict(), list(o.state_dict()["state"].values())],
    "save": lambda m, o: _saved({"model": m.state_dict(), "optimizer": o.state_dict()}),
    "save as before": lambda m, o: _loaded(_saved(m.state_dict(), _use_new_zipfile_serialization=False)),
    "save and load": _reload,
    "save a module": lambda m, o: _loaded(_saved(m)).state_dict(),
    "save what reads itself": _save_what_reads_itself,
    "load by assignment": _reload_by_assignment,
    "pickle": each(lambda t: pickle.loads(pickle.dumps(t))),
    "deepcopy of the model": lambda m, o: copy.deepcopy(m).state_dict(),
    "deepcopy of the optimizer": lambda m, o: list(copy.deepcopy(o.state_dict())["state"].values()),
    "deepcopy": each(lambda t: copy.deepcopy(t.detach())),
    "averaging": _ema,
    "data": each(_exchange),
    "views": each(_views),
    "numpy": each(lambda t: t.detach().numpy().copy().tobytes()),
    "array": each(lambda t: np.asarray(t.detach()).tobytes()),
    "shared array": each(_unsafe_zero_copy),
    "tolist": each(lambda t: t.tolist()),
    "item": each(lambda t: t.detach().reshape(-1)[0].item()),
    "float": each(lambda t: float(t.detach().sum())),
    "iteration": each(lambda t: [x.clone() for x in t.detach().reshape(-1)[:3]]),
    "data_ptr": each(lambda t: t.data_ptr() != 0),
    "storage": each(lambda t: _read_storage(t.untyped_storage())),
    "typed storage": each(lambda t: _read_storage(t._typed_storage()._untyped_storage)),
    "held storage": each(_write_storage),
    "slice of a storage": _hold_slice,
    "dlpack": each(_dlpack),
    "share_memory_": _share,
    "print": each(str),
    "repr of the model": lambda m, o: repr(list(m.parameters())),
    "format": each(lambda t: f"{t.detach().sum():.9f} {t}"),
    "map_ and apply_": each(_map),
    "torch.tensor": each(lambda t: torch.tensor(t.detach().reshape(-1)[:1].numpy())),
    "as_tensor": each(lambda t: torch.as_tensor(t.detach(), dtype=torch.float64)),
    "norms": each(lambda t: t.detach().norm()),
    "norms of lists": lambda m, o: torch._foreach_norm([p.detach() for p in m.parameters()]),
    "clip norm": lambda m, o: clip_grad_norm_(m.parameters(), 0.1),
    "clip norm by lists": lambda m, o: clip_grad_norm_(m.parameters(), 0.1, foreach=True),
    "clip values": lambda m, o: clip_grad_value_(m.parameters(), 0.01),
    "zero_grad to None": _zero(set_to_none=True),
    "zero_grad to zeros": _zero(set_to_none=False),
    "accumulation": lambda m, o: m(torch.arange(10).reshape(2, 5)).square().mean().backward(),
    "double backward": _gradients_of_gradients,
    "functional": _functional,
    "data of another": _set_data,
    "set_": _set,
    "swap_tensors": _swap,
    "cast": _cast_and_back,
    "requires_grad_": _freeze,
    "to a vector": _to_vector,
    "jit": _script,
    "equal": each(lambda t: torch.equal(t, t.detach().clone())),
    "hash": each(lambda t: len({t, t})),
    "evaluation": lambda m, o: torch.no_grad()(m.eval())(torch.arange(10).reshape(2, 5)).sum() + bool(m.train()),
}


@pytest.mark.parametrize("name", sample(list(ACTIONS), 8))
def test_actions_after_everything_has_left(name: str) -> None:
    """An action that meets emptied tensors gives what it gives in plain torch, and so does the training around it."""
    plain = train(contextlib.nullcontext(), ACTIONS[name])
    assert train(scope(), ACTIONS[name]) == plain


@pytest.mark.usefixtures("harsh")
@pytest.mark.parametrize("name", sample(ACTIONS, 0, 18))
def test_actions_while_everything_leaves(name: str) -> None:
    """The same where everything leaves again before each op."""
    plain = train(contextlib.nullcontext(), ACTIONS[name])
    assert train(scope(), ACTIONS[name]) == plain


@pytest.mark.parametrize("name", sample(ACTIONS, 6, 40))
def test_actions_while_a_plan_is_followed(name: str) -> None:
    """The same while a drawn plan moves everything in the middle of each step."""
    length = {"num_steps": 7, "action_step": 4}
    plain = train(contextlib.nullcontext(), ACTIONS[name], **length)
    for seed in (0, 1):
        with following_drawn(seed, decision_class="all") as budget:
            assert train(contextlib.nullcontext(), ACTIONS[name], **length) == plain
            assert running_session().room.persistents.emptying.num_emptied > 0
        assert budget.summary().follow.num_followed_steps >= 2


def test_a_gradient_that_was_added_to_while_nothing_was_away_is_copied_anew() -> None:
    """The copy from which it came back is not used once the engine may have added to it, which no op shows."""
    first, second = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))
    optimizer = torch.optim.SGD([first.weight, second.weight], lr=0.1)
    x = torch.ones(2, 8)

    def backward(layer: torch.nn.Module) -> None:
        layer(x).square().sum().backward()

    for _ in range(2):
        backward(first)
    expected = first.weight.grad.clone()
    first.weight.grad = None
    with scope():
        backward(first)
        first.weight.grad.mul_(1.0)
        empty_everything()
        assert is_emptied(first.weight.grad)
        first.weight.grad.sum()  # brings it back
        for _ in range(3):
            backward(second)
        backward(first)
        empty_everything()
        assert torch.equal(first.weight.grad, expected)
    assert optimizer.param_groups
