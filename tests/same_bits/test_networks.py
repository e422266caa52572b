"""Same bits on networks that keep state of their own or hold tensors in unusual places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

from tests.same_bits.judge import Scope, assert_same_bits, state_of
from tests.sampling import keep


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", keep([False, True], [True]), ids=["one-way", "two-way"])
def test_recurrent_layers(kind: type[nn.RNNBase], *, bidirectional: bool) -> None:
    """Two layers with dropout between them, on a padded and on a packed batch."""

    def step(scope: Scope) -> dict[str, Any]:
        model = kind(6, 8, 2, dropout=0.3, batch_first=True, bidirectional=bidirectional)
        x = torch.randn(3, 5, 6)
        with scope():
            output, _ = model(x * 2)
            packed = nn.utils.rnn.pack_padded_sequence(x.sin(), torch.tensor([5, 3, 2]), batch_first=True)
            again, _ = nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
            loss = (output * again).pow(2).sum()
            loss.backward()
        return state_of(model, loss=loss)

    assert_same_bits(step)


def test_recurrent_cells_in_a_python_loop() -> None:
    """Truncated backpropagation through time: the state is carried over, detached."""

    def step(scope: Scope) -> dict[str, Any]:
        cell, head = nn.LSTMCell(4, 8), nn.Linear(8, 1)
        state = (torch.zeros(2, 8), torch.zeros(2, 8))
        with scope():
            for _ in range(3):
                state = (state[0].detach(), state[1].detach())
                losses = []
                for _ in range(4):
                    state = cell(torch.randn(2, 4), state)
                    losses.append(head(state[0]).pow(2).mean())
                torch.stack(losses).mean().backward()
        return state_of(cell, head, state=state)

    assert_same_bits(step)


def test_normalisation_layers() -> None:
    """Every kind of statistics, called twice in a step, with a running average that counts batches."""

    def step(scope: Scope) -> dict[str, Any]:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.GroupNorm(2, 8),
            nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8, momentum=None), nn.MaxPool2d(2), nn.Flatten(), nn.LayerNorm(128), nn.RMSNorm(128),
        )  # fmt: skip
        x = torch.randn(4, 3, 12, 12)
        with scope():
            loss = model(x).pow(2).sum() + model(x * 2).sin().sum()
            loss.backward()
        return state_of(model, loss=loss)

    assert_same_bits(step)


def test_shared_batch_norm_in_both_modes() -> None:
    """One layer trains, evaluates and trains again within one graph; each replay needs the statistics of its moment."""

    def step(scope: Scope) -> dict[str, Any]:
        norm, linear, x = nn.BatchNorm1d(8), nn.Linear(8, 8), torch.randn(6, 8)
        with scope():
            hidden = norm(linear(x))
            norm.eval()
            hidden = norm(hidden.sin())
            norm.train()
            norm(hidden.exp()).pow(2).sum().backward()
        return state_of(norm, linear)

    assert_same_bits(step)


def test_frozen_and_stateless_batch_norm() -> None:
    """Layers without running statistics, without affine parameters, and with frozen ones."""

    def step(scope: Scope) -> dict[str, Any]:
        model = nn.Sequential(
            nn.Linear(8, 8),
            nn.BatchNorm1d(8, track_running_stats=False),
            nn.Linear(8, 8),
            nn.BatchNorm1d(8, affine=False),
            nn.Linear(8, 8),
            nn.BatchNorm1d(8).requires_grad_(requires_grad=False).eval(),
        )
        with scope():
            model(torch.randn(6, 8)).pow(3).sum().backward()
        return state_of(model)

    assert_same_bits(step)


class UNet(nn.Module):
    """A U-Net whose skip connections are held by a Python list."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in ((3, 8), (8, 16), (16, 16)))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in (8, 16, 16))
        self.up = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in ((32, 16), (32, 8), (16, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Go down, keeping every level, and up again beside them."""
        skips: list[torch.Tensor] = []
        for convolution, norm in zip(self.down, self.norms, strict=True):
            x = F.relu(norm(convolution(x)), inplace=True)
            skips.append(x)
            x = F.dropout(F.max_pool2d(x, 2), 0.1, self.training)
        for convolution in self.up:
            x = F.interpolate(x, scale_factor=2, mode="bilinear")
            x = F.gelu(convolution(torch.cat([x, skips.pop()], 1)))
        return x


def test_unet_with_skips_held_by_python() -> None:
    """Evicting what Python still holds frees nothing, and must not harm either."""

    def step(scope: Scope) -> dict[str, Any]:
        model = UNet()
        with scope():
            for _ in range(2):
                model(torch.randn(2, 3, 16, 16)).pow(2).mean().backward()
        return state_of(model)

    assert_same_bits(step)


@pytest.mark.parametrize("wrap", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_spectral_norm(wrap: Any) -> None:
    """Buffers that each forward writes in place, used twice in one graph."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = wrap(nn.Linear(8, 8)), torch.randn(4, 8)
        with scope():
            (model(x).sin() * model(x * 2).cos()).sum().backward()
        return state_of(model)

    assert_same_bits(step)


def test_weight_tying() -> None:
    """One parameter is embedding and output layer, another one a weight-normed twin."""

    def step(scope: Scope) -> dict[str, Any]:
        embedding, head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        head.weight = embedding.weight
        middle = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        tokens = torch.randint(0, 12, (4, 5))
        optimizer = torch.optim.SGD([*embedding.parameters(), *middle.parameters()], lr=0.1)
        with scope():
            for _ in range(2):
                F.cross_entropy(head(middle(embedding(tokens)).tanh()).flatten(0, 1), tokens.flatten()).backward()
                optimizer.step()
        return state_of(embedding, middle)

    assert_same_bits(step)


def test_sparse_embeddings() -> None:
    """Sparse gradients, their optimizer, and an embedding that renormalises its weight in forward."""

    def step(scope: Scope) -> dict[str, Any]:
        sparse = nn.Embedding(20, 6, sparse=True)
        bag = nn.EmbeddingBag(20, 6, sparse=True, mode="sum")
        bounded = nn.Embedding(20, 6, max_norm=1.0)
        optimizer = torch.optim.SparseAdam([*sparse.parameters(), *bag.parameters()], lr=0.01)
        with scope():
            for _ in range(2):
                tokens = torch.randint(0, 20, (4, 3))
                hidden = sparse(tokens).sum(1).sin() * bag(tokens) * bounded(tokens).mean(1)
                hidden.exp().sum().backward()
                optimizer.step()
        return state_of(sparse, bag, bounded)

    assert_same_bits(step)


def test_every_kind_of_dropout() -> None:
    """Random masks of all shapes, in place too, and a noise tensor that the op writes after it was saved."""

    def step(scope: Scope) -> dict[str, Any]:
        model = nn.Sequential(
            nn.Linear(8, 8), nn.Dropout(0.3), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Dropout(0.3, inplace=True),
            nn.RReLU(), nn.Unflatten(1, (4, 2)), nn.Dropout1d(0.5), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2),
        )  # fmt: skip
        with scope():
            model(torch.randn(4, 8)).pow(2).sum().backward()
        return state_of(model)

    assert_same_bits(step)


@pytest.mark.parametrize("need_weights", [False, True], ids=["fused", "weights"])
def test_attention(*, need_weights: bool) -> None:
    """Multi-head attention with masks and dropout, and the transformer layers around it."""

    def step(scope: Scope) -> dict[str, Any]:
        attention = nn.MultiheadAttention(16, 4, dropout=0.2, batch_first=True)
        layer = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.2, batch_first=True)
        x, mask = torch.randn(2, 5, 16), nn.Transformer.generate_square_subsequent_mask(5)
        with scope():
            hidden, weights = attention(x, x, x, attn_mask=mask, need_weights=need_weights)
            loss = layer(hidden, x.sin(), tgt_mask=mask).pow(2).mean()
            if weights is not None:
                loss = loss + weights.pow(2).sum()
            loss.backward()
        return state_of(attention, layer, loss=loss)

    assert_same_bits(step)


def test_sequence_and_metric_losses() -> None:
    """Losses that keep tables of their own, CTC among them."""

    def step(scope: Scope) -> dict[str, Any]:
        x = torch.randn(10, 3, 7, requires_grad=True)
        targets, lengths = torch.randint(1, 7, (3, 4)), torch.full((3,), 10)
        with scope():
            logits = (x * 1.5).log_softmax(-1)
            loss = F.ctc_loss(logits, targets, lengths, torch.tensor([4, 3, 2]))
            loss = loss + F.triplet_margin_loss(logits[0].sin(), logits[1].cos(), logits[2])
            loss = loss + F.multi_margin_loss(logits[3].exp(), targets[:, 0]) + F.huber_loss(logits[4], logits[5].sin())
            loss.backward()
        return {"loss": loss, "grad": x.grad}

    assert_same_bits(step)
