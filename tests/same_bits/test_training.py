"""Same bits over whole training loops: optimizers, accumulation, precision, several scopes, and what goes wrong."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

from tests.same_bits.judge import DEVICE, Scope, assert_same_bits, state_of
from tests.sampling import sample


def network() -> nn.Sequential:
    """Make a small net with everything that could differ: dropout, batch norm, an in-place activation."""
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(16, 16), nn.Tanh(),
        nn.Dropout(0.3), nn.Linear(16, 4),
    )  # fmt: skip


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Observe what an optimizer remembers."""
    return list(optimizer.state_dict()["state"].values())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
        lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
        lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=False),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
    ],
    ids=["sgd-momentum", "adamw", "adamw-foreach", "adam-fused", "amsgrad", "rmsprop", "adagrad"],
)
@pytest.mark.parametrize("set_to_none", sample([True, False], 1), ids=["to-none", "to-zero"])
def test_optimizer_steps(make: Any, *, set_to_none: bool) -> None:
    """Four steps with the usual optimizers, one scope around all of them."""

    def step(scope: Scope) -> dict[str, Any]:
        model, losses = network(), []
        optimizer = make(model.parameters())
        with scope():
            for _ in range(4):
                loss = F.cross_entropy(model(torch.randn(6, 8)), torch.randint(0, 4, (6,)))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
                losses.append(loss.item())
        return state_of(model, losses=losses, optimizer=optimizer_state(optimizer))

    assert_same_bits(step)


def test_closure_optimizer() -> None:
    """L-BFGS calls forward and backward several times within one step."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(6, 8)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        with scope():
            loss = optimizer.step(closure)
        return state_of(model, loss=loss)

    assert_same_bits(step)


def test_sgd_by_hand() -> None:
    """A loop without torch.optim: parameters are written under no_grad."""

    def step(scope: Scope) -> dict[str, Any]:
        model = network()
        with scope():
            for _ in range(4):
                model(torch.randn(6, 8)).pow(2).sum().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(0.01 * parameter.grad)
                        parameter.grad.zero_()
        return state_of(model)

    assert_same_bits(step)


def test_functional_sgd_replaces_parameters() -> None:
    """Parameters that are new tensors after each step, from torch.autograd.grad."""

    def step(scope: Scope) -> dict[str, Any]:
        weights = [torch.randn(8, 8, requires_grad=True), torch.randn(8, 1, requires_grad=True)]
        with scope():
            for _ in range(3):
                loss = ((torch.randn(6, 8) @ weights[0]).tanh() @ weights[1]).pow(2).mean()
                grads = torch.autograd.grad(loss, weights)
                pairs = zip(weights, grads, strict=True)
                weights = [(w - 0.1 * g).detach().requires_grad_() for w, g in pairs]
        return {"weights": weights, "loss": loss}

    assert_same_bits(step)


def test_optimizer_in_backward() -> None:
    """Each parameter is updated by a hook as soon as its gradient is there, while backward still runs."""

    def step(scope: Scope) -> dict[str, Any]:
        model = network()

        def update(parameter: torch.Tensor) -> None:
            with torch.no_grad():
                parameter.add_(parameter.grad, alpha=-0.01)
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        with scope():
            for _ in range(3):
                model(torch.randn(6, 8)).pow(2).sum().backward()
        return state_of(model)

    assert_same_bits(step)


def test_gradient_accumulation() -> None:
    """Several forwards and backwards before one optimizer step."""

    def step(scope: Scope) -> dict[str, Any]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with scope():
            for _ in range(2):
                for _ in range(3):
                    (model(torch.randn(6, 8)).pow(2).mean() / 3).backward()
                optimizer.step()
                optimizer.zero_grad()
        return state_of(model, optimizer=optimizer_state(optimizer))

    assert_same_bits(step)


def test_two_forwards_before_one_backward() -> None:
    """Micro-batches whose graphs are alive at once, summed into one loss."""

    def step(scope: Scope) -> dict[str, Any]:
        model = network()
        with scope():
            losses = [model(torch.randn(6, 8)).pow(2).mean() for _ in range(3)]
            torch.stack(losses).sum().backward()
        return state_of(model, losses=losses)

    assert_same_bits(step)


def test_adversarial_step_with_two_optimizers() -> None:
    """A GAN: one generator pass serves two losses and two optimizers."""

    def step(scope: Scope) -> dict[str, Any]:
        maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.3), nn.Linear(16, 1))
        maker_optimizer = torch.optim.Adam(maker.parameters(), lr=0.01)
        judge_optimizer = torch.optim.Adam(judge.parameters(), lr=0.01)
        ones, zeros = torch.ones(6, 1), torch.zeros(6, 1)
        with scope():
            for _ in range(3):
                fake = maker(torch.randn(6, 4))
                judge_optimizer.zero_grad()
                real_loss = F.binary_cross_entropy_with_logits(judge(torch.randn(6, 8)), ones)
                fake_loss = F.binary_cross_entropy_with_logits(judge(fake.detach()), zeros)
                (real_loss + fake_loss).backward()
                judge_optimizer.step()
                maker_optimizer.zero_grad()
                F.binary_cross_entropy_with_logits(judge(fake), ones).backward()
                maker_optimizer.step()
        return state_of(maker, judge)

    assert_same_bits(step)


@pytest.mark.parametrize("backward_inside", [False, True], ids=["backward-outside", "backward-inside"])
def test_bfloat16_autocast_with_a_scaler(*, backward_inside: bool) -> None:
    """Mixed precision: casts, weight-cast cache and the loss scale, with backward on either side of autocast's end."""

    def step(scope: Scope) -> dict[str, Any]:
        model = nn.Sequential(
            nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8), nn.Softmax(-1)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        with scope():
            for _ in range(3):
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(torch.randn(6, 8))
                    loss = scaler.scale((output @ model(torch.randn(6, 8)).t()).float().pow(2).sum())
                    if backward_inside:
                        loss.backward()
                if not backward_inside:
                    loss.backward()
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return state_of(model, loss=loss, norm=norm, scale=scaler.get_scale())

    assert_same_bits(step)


def test_low_precision_model() -> None:
    """A model whose parameters are bfloat16 themselves."""

    def step(scope: Scope) -> dict[str, Any]:
        model = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.2, batch_first=True).to(torch.bfloat16)
        with scope():
            model(torch.randn(2, 5, 16, dtype=torch.bfloat16)).float().pow(2).mean().backward()
        return state_of(model)

    assert_same_bits(step)


def test_several_scopes_one_after_the_other() -> None:
    """Each step in a scope of its own, on the same model, with a plain step between them."""

    def step(scope: Scope) -> dict[str, Any]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for make_scope in (scope, scope, contextlib.nullcontext, scope):
            with make_scope():
                model(torch.randn(6, 8)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return state_of(model, optimizer=optimizer_state(optimizer))

    assert_same_bits(step)


def test_backward_after_the_scope_has_closed() -> None:
    """What was saved inside is still right outside."""

    def step(scope: Scope) -> dict[str, Any]:
        model = network()
        with scope():
            loss = model(torch.randn(6, 8)).pow(2).mean()
        torch.rand(3)
        loss.backward()
        return state_of(model, loss=loss)

    assert_same_bits(step)


def test_forward_before_the_scope_opens() -> None:
    """A graph from before the scope is simply plain."""

    def step(scope: Scope) -> dict[str, Any]:
        model = network()
        hidden = model[:4](torch.randn(6, 8))
        with scope():
            loss = model[4:](hidden).pow(2).mean()
            loss.backward()
        return state_of(model, loss=loss)

    assert_same_bits(step)


def test_shapes_that_change_from_step_to_step() -> None:
    """Batches and lengths of their own in each step, control flow that depends on data, an empty batch among them."""

    def step(scope: Scope) -> dict[str, Any]:
        model, head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 2)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        with scope():
            for batch_size, length in ((2, 3), (4, 7), (1, 2), (0, 2), (4, 7)):
                output, _ = model(torch.randn(batch_size, length, 4))
                logits = head(output)
                if logits.sum().item() > 0:
                    logits = logits.exp()
                logits.pow(2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return state_of(model, head)

    assert_same_bits(step)


def test_evaluation_between_steps() -> None:
    """No-grad and inference-mode forwards between training steps, with batch norm in evaluation mode."""

    def step(scope: Scope) -> dict[str, Any]:
        model, seen = network(), []
        with scope():
            for _ in range(2):
                model.train()(torch.randn(6, 8)).pow(2).mean().backward()
                model.eval()
                with torch.no_grad():
                    seen.append(model(torch.randn(6, 8)))
                with torch.inference_mode():
                    seen.append(model(torch.randn(6, 8)).sum().item())
        return state_of(model, seen=seen)

    assert_same_bits(step)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Rows that a worker process makes from its own generator."""

    def __len__(self) -> int:
        """Count the rows."""
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        """Make a noisy row."""
        return torch.full((8,), float(index)) + torch.rand(8)


@pytest.mark.skipif(DEVICE != "cpu", reason="a forked worker must not make its rows on a device")
@pytest.mark.filterwarnings("ignore")  # forking a process that has threads
def test_data_loader_with_workers() -> None:
    """Batches come from worker processes that were started inside the scope."""

    def step(scope: Scope) -> dict[str, Any]:
        model = network()
        with scope():
            loader = torch.utils.data.DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=1)
            for batch in loader:
                model(batch).pow(2).mean().backward()
        return state_of(model)

    assert_same_bits(step)


def test_training_on_after_an_exception_in_mid_step() -> None:
    """A step that fails between forward and backward leaves nothing behind, and the next step is right."""

    def step(scope: Scope) -> dict[str, Any]:
        model = network()
        with scope():
            for fails in (True, False, True, False):
                with contextlib.suppress(KeyError):
                    loss = model(torch.randn(6, 8)).pow(2).mean()
                    if fails:
                        raise KeyError
                    loss.backward()
        return state_of(model, loss=loss)

    assert_same_bits(step)


def test_training_on_after_an_exception_left_the_scope() -> None:
    """The scope closes cleanly on its way out, and plain training as well as a new scope go on."""

    def step(scope: Scope) -> dict[str, Any]:
        model = network()
        with contextlib.suppress(KeyError), scope():
            model(torch.randn(6, 8)).pow(2).mean()
            raise KeyError
        model(torch.randn(6, 8)).pow(2).mean().backward()
        with scope():
            model(torch.randn(6, 8)).pow(2).mean().backward()
        return state_of(model)

    assert_same_bits(step)


def test_training_on_after_an_exception_inside_backward() -> None:
    """A hook that fails in the middle of backward does not spoil the next backward."""

    def step(scope: Scope) -> dict[str, Any]:
        model = network()

        def fail(_grad: torch.Tensor) -> None:
            raise KeyError

        with scope():
            for fails in (False, True, False):
                hidden = model[:5](torch.randn(6, 8))
                if fails:
                    hidden.register_hook(fail)
                with contextlib.suppress(KeyError):
                    model[5:](hidden).pow(2).mean().backward()
                hidden = None
        return state_of(model)

    assert_same_bits(step)
