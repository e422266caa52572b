"""`decision_class="all"`: files of safetensors have the plain bytes, and what was saved may leave again."""

from __future__ import annotations

import contextlib
import gc
import json
import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from torchdelta import Config, MemoryBudget
from torchdelta.runtime.current import current_session

safetensors_torch = pytest.importorskip("safetensors.torch")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("needs_counter")

WIDTH, DEPTH = 512, 12  # parameters of 1 MiB
ROOM = 7 << 20


class Tied(nn.Module):
    """Two of its layers have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))
        self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all layers."""
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def _train(save: Callable[[nn.Module, str], None], budget: int | None, path: Path, **options: Any) -> list[bytes]:
    """Train, and save after two steps of three. Return the bytes of the files, and of the parameters at the end."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[bytes] = []

    def steps() -> None:
        for step in range(4):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in {1, 2}:
                save(model, str(path / "model.safetensors"))
                found.append(_content(path / "model.safetensors"))

    if budget is None:
        steps()
    else:
        with MemoryBudget(budget, Config(decision_class="all", planner=None, swap_dir=path, **options)) as scope:
            steps()
            session = current_session()
            assert session is not None
            persistents = session.room.persistents
            assert persistents is not None
            assert persistents.emptying.num_emptied
            assert not any(record.is_exported or record.num_writing for record in session.ledger.records.values())
        assert max(step.peak_bytes for step in scope.summary().steps[1:]) <= budget  # the first begins with all of them
    gc.collect()
    return [*found, *(parameter.detach().numpy().tobytes() for parameter in model.parameters())]


def _content(path: Path) -> bytes:
    """Return what a file has, with its entries sorted: safetensors writes metadata in any order."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.dumps(json.loads(content[8 : 8 + length]), sort_keys=True).encode() + content[8 + length :]


def _save_untied(model: nn.Module, path: str) -> None:
    states = model.state_dict()
    del states[f"layers.{DEPTH - 1}.weight"]
    safetensors_torch.save_file(states, path)


def _save_shards(model: nn.Module, path: str) -> None:
    hub = pytest.importorskip("huggingface_hub")
    hub.save_torch_model(model, path.rpartition("/")[0], max_shard_size="1TB")


SAVES = {"save_file": _save_untied, "save_model": safetensors_torch.save_model, "huggingface_hub": _save_shards}


@pytest.mark.parametrize("save", SAVES)
def test_files_have_the_plain_bytes(tmp_path: Path, save: str) -> None:
    """Also where the parameters alone exceed the budget: what is away is written from the tier."""
    expected = _train(SAVES[save], None, tmp_path)
    assert _train(SAVES[save], ROOM, tmp_path) == expected


def test_a_tier_in_memory_has_no_mappings(tmp_path: Path) -> None:
    """There what is saved stays until the file is written, and leaves later."""
    expected = _train(_save_untied, None, tmp_path)
    assert _train(_save_untied, 2 * DEPTH << 20, tmp_path, tier="memory") == expected


@pytest.mark.parametrize("share", [0.7, 1.5])
def test_pretrained_models_are_saved_as_without_a_budget(tmp_path: Path, share: float) -> None:
    """Transformers compares addresses to find tied weights, which it saves once."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=2000, n_positions=32, n_embd=256, n_layer=4, n_head=4)

    def save(budget: int | None) -> bytes:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        budget = budget and int(share * sum(parameter.nbytes for parameter in model.parameters()))
        scope = MemoryBudget(budget, Config(decision_class="all", planner=None)) if budget else contextlib.nullcontext()
        with scope:
            tokens = torch.randint(0, 2000, (2, 16))
            model(input_ids=tokens, labels=tokens).loss.backward()
            model.zero_grad()
            model.save_pretrained(tmp_path)
        return _content(tmp_path / "model.safetensors")

    expected = save(None)
    gc.collect()
    assert b"lm_head" not in expected
    assert save(1) == expected


class Labelled(torch.Tensor):
    """A subclass of the program."""


def test_what_is_read_while_a_file_is_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has got an address keeps it after the file; a tensor of another class is written whole."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]
    model = nn.Sequential(*layers)
    first, last = layers[0].weight, layers[-1].weight
    expected = [weight.detach().clone().numpy().tobytes() for weight in (first, last)]
    write = safetensors_torch.serialize_file

    def read_and_write(*args: Any, **kwargs: Any) -> Any:
        assert last.data_ptr()
        return write(*args, **kwargs)

    monkeypatch.setattr(safetensors_torch, "serialize_file", read_and_write)
    with MemoryBudget(ROOM, Config(decision_class="all", planner=None)):
        session = current_session()
        assert session is not None
        with torch.no_grad():
            model(torch.randn(4, WIDTH))
        last.sum()  # it is here, and the first one is away
        records = [session.ledger.find(tensor) for tensor in (first, last)]
        assert [record is not None and record.emptied is None for record in records] == [False, True]
        states = {"first": first.detach().as_subclass(Labelled), "last": last.detach()}
        safetensors_torch.save_file(states, str(tmp_path / "a.safetensors"))
        del states
        assert [record is not None and record.is_exported for record in records] == [False, True]
        assert not any(record.num_writing for record in session.ledger.records.values())
    assert (tmp_path / "a.safetensors").read_bytes().endswith(b"".join(expected))
