"""Networks and training loops drawn from a seed: branches, shared modules, views, in-place ops, and steps that differ.

A network is a list of drawn operations on a pool of tensors of equal shape, so that every result can meet every other.
A loop draws what each of its steps does: other batch sizes, several losses, kept graphs, accumulation, evaluation,
exceptions, steps without some layers. Both are the same for the same seed, whatever they run in.
"""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.same_bits.judge import bits_of

if TYPE_CHECKING:
    from collections.abc import Callable

    Operation = Callable[["DrawnNetwork", list[torch.Tensor], random.Random], None]


class Cubed(torch.autograd.Function):
    """A custom function that saves its input and its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the cube."""
        y = x * x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Use both."""
        x, y = ctx.saved_tensors
        return gradients[0] * (3 * x * x + 0 * y)


class StepError(Exception):
    """What a drawn step raises in its middle."""


class Raising(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Pass on."""
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        """Raise."""
        _ = ctx.saved_tensors
        raise StepError


class DrawnNetwork(nn.Module):
    """A network of `depth` drawn operations.

    Args:
        seed: Of the draw.
        width: Columns of every tensor.
        depth: Operations.
    """

    def __init__(self, seed: int, width: int, depth: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.width = width
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(3))  # fewer than uses: they are shared
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.BatchNorm1d(width)])
        self.lstm = nn.GRU(width, width, batch_first=True) if rng.random() < 0.2 else None
        self.operations = [(rng.choice(OPERATIONS), rng.randrange(2**30)) for _ in range(depth)]
        self.skipped: frozenset[int] = frozenset()
        self.raises_at = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the operations, and return the sum of what is left."""
        pool = [self.linears[0](x)]
        for index, (operation, seed) in enumerate(self.operations):
            if index == self.raises_at:
                raise StepError
            if index in self.skipped:
                continue
            operation(self, pool, random.Random(seed))
            del pool[:-4]
        return torch.stack(pool).mean(0)


def _pick(pool: list[torch.Tensor], rng: random.Random) -> torch.Tensor:
    return pool[rng.randrange(len(pool))]


def _linear(net: DrawnNetwork, pool: list[torch.Tensor], rng: random.Random) -> None:
    pool.append(net.linears[rng.randrange(3)](_pick(pool, rng)))


def _activate(net: DrawnNetwork, pool: list[torch.Tensor], rng: random.Random) -> None:
    del net
    function = rng.choice((functional.gelu, torch.tanh, torch.sigmoid, functional.silu, torch.sin, functional.softplus))
    pool.append(function(_pick(pool, rng)))


def _in_place(net: DrawnNetwork, pool: list[torch.Tensor], rng: random.Random) -> None:
    fresh = net.linears[rng.randrange(3)](_pick(pool, rng))
    kind = rng.randrange(5)
    if kind == 0:
        fresh.relu_()
    elif kind == 1:
        fresh.mul_(0.7).sigmoid_()
    elif kind == 2:
        fresh[:, : net.width // 2].tanh_()
    elif kind == 3:
        fresh.add_(_pick(pool, rng))
    else:
        functional.leaky_relu_(fresh, 0.1)
    pool.append(fresh)


def _views(net: DrawnNetwork, pool: list[torch.Tensor], rng: random.Random) -> None:
    x = _pick(pool, rng)
    kind = rng.randrange(4)
    half = net.width // 2
    if kind == 0:
        left, right = x.chunk(2, dim=1)
        pool.append(torch.cat([right * left, left.exp().clamp(max=3)], dim=1))
    elif kind == 1:
        pool.append(x.t().contiguous().cos().t())
    elif kind == 2:
        pool.append(x.view(-1, 2, half).flip(1).reshape(-1, net.width) * x)
    else:
        pool.append(torch.where(x > 0, x.roll(1, 1), x * 0.5))


def _dropout(net: DrawnNetwork, pool: list[torch.Tensor], rng: random.Random) -> None:
    pool.append(functional.dropout(_pick(pool, rng), rng.choice((0.1, 0.5)), net.training))


def _noise(net: DrawnNetwork, pool: list[torch.Tensor], rng: random.Random) -> None:
    del net
    x = _pick(pool, rng)
    pool.append(functional.rrelu(x, training=True) if rng.random() < 0.5 else x + 0.1 * torch.randn_like(x) * x)


def _norm(net: DrawnNetwork, pool: list[torch.Tensor], rng: random.Random) -> None:
    pool.append(net.norms[rng.randrange(2)](_pick(pool, rng)))


def _combine(net: DrawnNetwork, pool: list[torch.Tensor], rng: random.Random) -> None:
    del net
    a, b = _pick(pool, rng), _pick(pool, rng)
    kind = rng.randrange(4)
    if kind == 0:
        pool.append(a + b)
    elif kind == 1:
        pool.append(torch.addcmul(a, b, b, value=0.1))
    elif kind == 2:
        pool.append(a * torch.sigmoid(b))
    else:
        pool.append(functional.scaled_dot_product_attention(a[None], b[None], a[None])[0])


def _softmax(net: DrawnNetwork, pool: list[torch.Tensor], rng: random.Random) -> None:
    del net
    x = _pick(pool, rng)
    pool.append(x.softmax(-1) if rng.random() < 0.5 else functional.log_softmax(x, 0))


def _custom(net: DrawnNetwork, pool: list[torch.Tensor], rng: random.Random) -> None:
    del net
    pool.append(Cubed.apply(torch.tanh(_pick(pool, rng))))


def _checkpointed(net: DrawnNetwork, pool: list[torch.Tensor], rng: random.Random) -> None:
    linear = net.linears[rng.randrange(3)]

    def block(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(functional.gelu(linear(x)), 0.1, net.training)

    pool.append(checkpoint(block, _pick(pool, rng), use_reentrant=False))


def _user_hooks(net: DrawnNetwork, pool: list[torch.Tensor], rng: random.Random) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t,), lambda packed: packed[0]):
        pool.append(torch.tanh(net.linears[rng.randrange(3)](_pick(pool, rng))))


def _autocast(net: DrawnNetwork, pool: list[torch.Tensor], rng: random.Random) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        pool.append(functional.gelu(net.linears[rng.randrange(3)](_pick(pool, rng))).float())


def _recurrent(net: DrawnNetwork, pool: list[torch.Tensor], rng: random.Random) -> None:
    if net.lstm is not None:
        pool.append(net.lstm(_pick(pool, rng)[None])[0][0])


def _gather(net: DrawnNetwork, pool: list[torch.Tensor], rng: random.Random) -> None:
    x = _pick(pool, rng)
    index = torch.arange(x.shape[1] - 1, -1, -1).expand(x.shape[0], -1)
    pool.append(x.gather(1, index) if rng.random() < 0.5 else x.masked_fill(x > 1, 0.0).cumsum(1) / net.width)


def _reuse(net: DrawnNetwork, pool: list[torch.Tensor], rng: random.Random) -> None:
    """Overwrite a tensor of no graph that ops have read: a scratch buffer that is used twice."""
    x = _pick(pool, rng)
    scratch = torch.rand(x.shape)
    y = x + scratch
    scratch.fill_(0.3)
    pool.append(torch.tanh(y * scratch) * torch.linspace(0, 1, net.width))


OPERATIONS: tuple[Operation, ...] = (
    _linear,
    _linear,
    _activate,
    _activate,
    _in_place,
    _in_place,
    _views,
    _dropout,
    _noise,
    _norm,
    _combine,
    _combine,
    _softmax,
    _custom,
    _checkpointed,
    _user_hooks,
    _autocast,
    _recurrent,
    _gather,
    _reuse,
)

STEPS = (
    "plain",
    "plain",
    "plain",
    "short batch",
    "long batch",
    "skipped layers",
    "evaluation",
    "fault in forward",
    "fault in backward",
    "lost graph",
    "kept graph",
    "two losses",
    "accumulated",
    "penalty",
    "partial",
    "written parameter",
    "exchanged data",
    "held output",
)
NUM_SAME_STEPS = 4


def train(
    seed: int,
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    *,
    width: int = 32,
    rows: int = 192,
    depth: int = 14,
    num_steps: int = 12,
    only_plain: bool = False,
) -> list[Any]:
    """Train a drawn network for drawn steps; the first four are plain ones. Return all that can be observed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    net = DrawnNetwork(seed, width, depth)
    optimizer: torch.optim.Optimizer = rng.choice(
        (
            lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
            lambda p: torch.optim.AdamW(p, lr=1e-3),
            lambda p: torch.optim.SGD(p, lr=0.01),
        )
    )(list(net.parameters()))
    observed: list[Any] = []
    held: list[torch.Tensor] = []
    with scope():
        for index in range(num_steps):
            kind = "plain" if index < NUM_SAME_STEPS or only_plain else rng.choice(STEPS)
            # What a step lets live is over before its result is looked at.
            observed += [kind, _step(kind, net, optimizer, rng, rows, held)]
    return [*observed, bits_of(net.state_dict()), bits_of(torch.get_rng_state())]


def plain_observations(seed: int, *, num_steps: int = 12, only_plain: bool = False) -> list[Any] | None:
    """Return what plain training shows; None if it fails, or shows something else when it is repeated."""
    try:
        first, second = (train(seed, num_steps=num_steps, only_plain=only_plain) for _ in range(2))
    except RuntimeError as error:
        if "derivative for aten::_scaled_dot_product" in str(error):  # torch 2.14 has no second one of attention
            return None
        raise
    return first if first == second else None


def _step(
    kind: str,
    net: DrawnNetwork,
    optimizer: torch.optim.Optimizer,
    rng: random.Random,
    rows: int,
    held: list[torch.Tensor],
) -> list[Any]:
    draw = rng.randrange(2**30)
    num_rows = {"short batch": rows // 2, "long batch": rows + 8}.get(kind, rows)
    x = torch.randn(num_rows, net.width)
    drawn = random.Random(draw)
    net.skipped = frozenset(drawn.sample(range(len(net.operations)), 3)) if kind == "skipped layers" else frozenset()
    net.raises_at = drawn.randrange(len(net.operations)) if kind == "fault in forward" else -1
    losses: list[float] = []
    raised = ""
    if kind == "evaluation":
        net.eval()
        with torch.no_grad():
            losses.append(net(x).square().mean().item())
        net.train()
    elif kind == "lost graph":
        losses.append(net(x).square().mean().item())
    try:
        _backward(kind, net, x, losses, held)
        gradients = [bits_of(p.grad) for p in net.parameters()]
        if drawn.random() < 0.3:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    except StepError:
        raised = "fault"
        gradients = []
    optimizer.zero_grad(set_to_none=drawn.random() < 0.7)
    if kind == "written parameter":
        with torch.no_grad():
            net.linears[1].weight.mul_(0.9)  # pyright: ignore[reportCallIssue, reportArgumentType]
    elif kind == "exchanged data":
        weight: Any = net.linears[2].weight
        weight.data = weight.data.clone() * 0.9
    return [losses, raised, gradients]


def _backward(kind: str, net: DrawnNetwork, x: torch.Tensor, losses: list[float], held: list[torch.Tensor]) -> None:
    output = net(x)
    if kind == "fault in backward":
        output = Raising.apply(output)
    loss = output.square().mean()
    losses.append(loss.item())
    if kind == "kept graph":
        loss.backward(retain_graph=True)
        loss.backward()
    elif kind == "two losses":
        loss.backward(retain_graph=True)
        output.sum().mul(1e-3).backward()
    elif kind == "accumulated":
        loss.backward()
        net(x * 0.5).square().mean().backward()
    elif kind == "penalty":
        weight: Any = net.linears[0].weight
        (gradient,) = torch.autograd.grad(loss, [weight], create_graph=True)
        (loss + gradient.square().sum()).backward()
    elif kind == "partial":
        gradients = torch.autograd.grad(loss, list(net.linears[0].parameters()))
        for parameter, gradient in zip(net.linears[0].parameters(), gradients, strict=True):
            parameter.grad = gradient
    elif kind == "held output":
        held.append(output)
        loss.backward()
        held.clear()
    else:
        loss.backward()
