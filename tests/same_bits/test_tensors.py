"""Same bits under what programs do to tensors: in-place writes, views, storage tricks, generators, odd dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

from tests.same_bits.judge import Scope, Step, assert_same_bits

CASES: dict[str, Any] = {}


def case(function: Any) -> Any:
    """Register a body: it gets a leaf, computes a scalar inside the scope, and may return more to observe."""
    CASES[function.__name__] = function
    return function


@case
def in_place_chain(x: torch.Tensor) -> Any:
    """Write intermediates in place, whole and in part, before and after they were used."""
    y = x * 2
    y.add_(1)
    z = y.sin()
    other = x * 3
    other.mul_(3.0)
    other[0].zero_()
    result = other.cos() * 2
    result.relu_()
    return (result * z).sum()


@case
def in_place_on_views(x: torch.Tensor) -> Any:
    """Write through views of a buffer that other views read."""
    y = x * 2
    left, right = y[:, :4], y[:, 4:]
    z = (left * 1.5).tanh()
    right.mul_(z)
    y[1:3].add_(1)
    y.t()[0].copy_(z[:, 0])
    return (y.exp() * right.sum()).sum()


@case
def write_to_constants(x: torch.Tensor) -> Any:
    """Write a tensor from outside the graph, whose old content a replay still needs."""
    b = torch.randn(8, 8)
    hidden = b + 1
    y = x * hidden
    b.add_(5)
    z = (y * (b * 2)).sin()
    b.zero_()
    return z.sum(), b


@case
def running_buffer(x: torch.Tensor) -> Any:
    """Keep a moving average in a buffer that later ops read."""
    mean = torch.zeros(8)
    loss = x.sum() * 0
    for _ in range(3):
        mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        loss = loss + ((x - mean) * mean.cos()).sin().sum()
    return loss, mean


@case
def views_of_all_kinds(x: torch.Tensor) -> Any:
    """Read one buffer through chunks, transposes, expansions, unbinds and strides."""
    q, k, v = (x * 2).reshape(4, 4, 4).chunk(3, 1)[0], (x * 3).reshape(4, 4, 4), (x - 1).reshape(4, 4, 4)
    attended = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
    first, second, *_ = torch.unbind(attended.expand(4, *attended.shape[1:]), 0)
    values, _ = first.topk(2, -1)
    ordered, order = torch.sort(second, -1)
    strided = (x * 5).as_strided((4, 3), (9, 2), 1)
    return values.sum() + (ordered * torch.gather(second, -1, order)).sum() + strided.exp().sum()


@case
def wrapped_numbers(x: torch.Tensor) -> Any:
    """Mix scalars, zero-dimensional tensors and dtypes, whose promotion depends on a hidden flag."""
    scalar = x.mean()
    y = (scalar * 2.5) / 3
    z = (torch.arange(5) * 0.3).to(torch.float32) * y
    return z.pow(2).sum() * torch.tensor(2.0, dtype=torch.float64)


@case
def complex_numbers(x: torch.Tensor) -> Any:
    """Keep conjugate and negative bits through saving and restoring."""
    f = torch.fft.fft2(x.sin())
    y = (f * f.conj()).real + (f.conj() * 2).imag.exp().clamp(max=10)
    y = y + torch.view_as_real(f * 1j).sin().sum(-1) + torch.fft.irfft(torch.fft.rfft(x * 2), n=8).cos()
    return y.sum() + (f.mH @ f).abs().sum() + torch.polar(x.exp(), x * 2).imag.sum()


@case
def generators(x: torch.Tensor) -> Any:
    """Draw from generators of the program's own, in several ways."""
    generator = torch.Generator().manual_seed(5)
    noise = torch.empty(8, 8).normal_(generator=generator)
    z = (x * 2 * noise).sin() * torch.rand(8, 8, generator=generator)
    mask = torch.bernoulli(torch.full((8, 8), 0.5), generator=generator)
    picked = torch.multinomial(torch.ones(8), 4, generator=generator)
    shuffled = z[torch.randperm(8, generator=generator)]
    return (z * mask).exp().sum() + shuffled[picked].sum(), generator.get_state()


@case
def forked_generator(x: torch.Tensor) -> Any:
    """Fork, reseed and rewind the global generator between random ops."""
    with torch.random.fork_rng():
        torch.manual_seed(9)
        y = F.dropout(x * 2, 0.5)
    state = torch.get_rng_state()
    z = F.dropout(y.sin(), 0.3)
    torch.set_rng_state(state)
    return (F.dropout(z.exp(), 0.3) + F.gumbel_softmax(z, hard=True)).sum()


@case
def sampling_distributions(x: torch.Tensor) -> Any:
    """Reparametrised samples of several distributions."""
    normal = torch.distributions.Normal(x.sin(), x.exp())
    gamma = torch.distributions.Gamma(x.exp() + 0.5, torch.ones(8, 8))
    dirichlet = torch.distributions.Dirichlet(x.exp() + 0.5)
    sample = normal.rsample()
    return sample.sum() + normal.log_prob(sample * 2).sum() + gamma.rsample().sum() + dirichlet.rsample().pow(2).sum()


@case
def data_written_directly(x: torch.Tensor) -> Any:
    """Write through .data, which no version counter sees."""
    constant = torch.randn(8, 8)
    z = (x * 2) * (constant + 1)
    constant.data.add_(3)
    return (z.sin() * constant).sum()


@case
def data_of_a_saved_tensor(x: torch.Tensor) -> Any:
    """Write a saved tensor through .data: eager silently uses the new content, and so must we."""
    y = x * 2
    z = y.sin()
    y.data.add_(3)
    return z.sum()


@case
def out_variants_and_resize(x: torch.Tensor) -> Any:
    """Results written into given tensors, and storages that change size."""
    out = torch.empty(0)
    with torch.no_grad():
        torch.mul(x, 2, out=out)
    resized = torch.empty(2)
    resized.resize_(8, 8).fill_(2)
    both = torch.empty(16, 8)
    torch.cat([out, resized], out=both)
    return (x * out * resized).sin().sum() + (both[:8] * x).exp().sum()


@case
def foreach_ops(x: torch.Tensor) -> Any:
    """Multi-tensor kernels that write a list in place while its old contents are still needed."""
    constants = [torch.randn(8, 8) for _ in range(2)]
    hidden = constants[0] + constants[1]
    y = x * hidden
    torch._foreach_add_(constants, 2.0)
    z = (y * (constants[0] + 1)).sin()
    torch._foreach_mul_(constants, 0.5)
    sums = torch._foreach_add([z, y], [y, z])
    return sum(torch._foreach_norm(sums)), constants


@case
def set_storage(x: torch.Tensor) -> Any:
    """A tensor that is made to mean another storage."""
    y = x * 2
    target = torch.zeros(8, 8)
    with torch.no_grad():
        z = (target + 1) * y
        target.set_(torch.full((8, 8), 3.0))
    return (x * target * z.detach()).sin().sum()


@case
def indexing(x: torch.Tensor) -> Any:
    """Read and write by masks, integer lists and scatter, with repeated indices."""
    y = x * 2
    y[y > 1] = 0.5
    y[[0, 2, 0]] = x[[1, 1, 3]]
    index = torch.randint(0, 8, (8, 8))
    z = torch.zeros(8, 8).scatter_add(0, index, y.exp())
    z.index_add_(0, torch.tensor([1, 1]), y[:2] * 3)
    return (z.masked_fill(index > 5, 0.0) * torch.where(y > 0, y, x)).sum() + z.index_put((index[0],), y).sum()


@case
def linear_algebra(x: torch.Tensor) -> Any:
    """Decompositions, whose backward reads several outputs."""
    symmetric = x @ x.mT + 8 * torch.eye(8)
    values, vectors = torch.linalg.eigh(symmetric)
    q, r = torch.linalg.qr(x * 2)
    solved = torch.linalg.solve(symmetric, x.sin())
    chol = torch.linalg.cholesky(symmetric)
    return values.log().sum() + vectors.abs().sum() + (q * r).sum() + solved.sum() + chol.sum() + symmetric.logdet()


@case
def sparse_products(x: torch.Tensor) -> Any:
    """Sparse operands, which own no ordinary storage."""
    sparse = torch.randn(8, 8).relu().to_sparse()
    compressed = torch.randn(8, 8).relu().to_sparse_csr()
    product = torch.sparse.mm(sparse, x.sin()) + compressed.matmul(x * 2)
    return product.exp().clamp(max=50).sum() + (x * 3).to_sparse().to_dense().cos().sum()


@case
def memory_formats(x: torch.Tensor) -> Any:
    """Channels-last convolutions, pooling with indices, and contiguous copies of permuted tensors."""
    image = (x * 2).reshape(1, 4, 4, 4).to(memory_format=torch.channels_last)
    convolved = F.conv2d(image, torch.ones(6, 4, 2, 2), padding=1)
    pooled, indices = F.max_pool2d(convolved, 2, return_indices=True)
    unpooled = F.max_unpool2d(pooled, indices, 2, output_size=convolved.shape[-2:])
    return (unpooled.permute(0, 2, 3, 1).contiguous().sin() * convolved.permute(0, 2, 3, 1)).sum()


@case
def integers_and_masks(x: torch.Tensor) -> Any:
    """Results that are not differentiable but are saved: comparisons, arg-reductions, one-hot codes, bit tricks."""
    codes = F.one_hot((x * 4).argmax(-1), 8)
    mask = ((x * 2).abs() > 0.5) & ~(codes.bool())
    return (x.exp() * mask).sum() + (x.sin() * codes).sum() + x.cumsum(0)[mask].prod() + x.logcumsumexp(1).sum()


@case
def extreme_values(x: torch.Tensor) -> Any:
    """Infinities and NaN travel through replay unchanged."""
    y = (x * 1e20).exp() - (x * 1e20).exp().sqrt()
    return (y / y.sum()).nan_to_num(posinf=3.0).mul(x).sum() + (x * 0).log().clamp(min=-5).sum()


@case
def empty_tensors(x: torch.Tensor) -> Any:
    """Tensors without elements take part in everything."""
    nothing = x[:0] * 2
    return torch.cat([nothing, x.sin()]).sum() + (nothing @ x).exp().sum() + nothing.new_empty(0, 8).sum()


@case
def long_chain(x: torch.Tensor) -> Any:
    """Recompute through three hundred ops without recursion."""
    y = x * 1.0
    for _ in range(100):
        y = (y.sin() + x).cos()
    return y.sum()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_tensor_programs(name: str) -> None:
    """A small program of one theme leaves the same bits."""
    assert_same_bits(make_step(CASES[name]))


def make_step(body: Any) -> Step:
    """Make a training step of a registered body."""

    def step(scope: Scope) -> dict[str, Any]:
        x = torch.randn(8, 8, requires_grad=True)
        with scope():
            result = body(x)
            loss, *others = result if isinstance(result, tuple) else (result,)
            loss.backward()
        return {"loss": loss, "grad": x.grad, "others": others}

    return step


def test_parameter_data_replaced_between_forward_and_backward() -> None:
    """After `p.data = new` the parameter no longer means the storage that the recorded ops read."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = nn.Linear(8, 8), torch.randn(4, 8)
        with scope():
            hidden = model(x).sin()
            model.bias.data = torch.zeros(8)
            model(hidden).cos().sum().backward()
        return {"grads": [parameter.grad for parameter in model.parameters()]}

    assert_same_bits(step)


def test_numpy_write_before_saving() -> None:
    """Memory written through numpy is right when it is swapped; a replay could not know of it."""

    def step(scope: Scope) -> dict[str, Any]:
        x = torch.randn(8, 8, requires_grad=True)
        with scope():
            y = x * 2
            y.detach().numpy()[0] = 7
            (y.sin() * y).sum().backward()
        return {"grad": x.grad}

    assert_same_bits(step, "swap")
