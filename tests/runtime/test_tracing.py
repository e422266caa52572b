"""The trace of the first step: that of the plain step, whatever the budget does meanwhile."""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from benchmarks.models import build_optimizer, seed_everything
from benchmarks.resnet import Bottleneck
from tests.runtime.programs import Attention, mlp, running
from torchdelta import Config, MemoryBudget
from torchdelta.cli.allocator_peak import AllocatorPeak
from torchdelta.errors import ScopeError
from torchdelta.runtime import tracing
from torchdelta.runtime.drafting import Draft
from torchdelta.trace.file import read_trace, write_trace
from torchdelta.trace.model import Buffer, Op, Trace, counts, load_curve, peak
from torchdelta.trace.validate import validate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SEQUENCE, VOCABULARY = 64, 300


def _language_model(kind: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    if kind == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": SEQUENCE}
        model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))
    else:
        sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 2}
        model = BertForMaskedLM(BertConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE))
    tokens = torch.randint(VOCABULARY, (4, SEQUENCE))
    return model.train(), lambda model: model(input_ids=tokens, labels=tokens).loss


def _resnet() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    blocks = [Bottleneck(16, 16, 1), Bottleneck(64, 16, 1), Bottleneck(64, 16, 2), Bottleneck(64, 16, 2)]
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    pictures, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    return model.train(), lambda model: nn.functional.cross_entropy(model(pictures), labels)


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]]] = {
    "gpt2": lambda: _language_model("gpt2"),
    "bert": lambda: _language_model("bert"),
    "resnet": _resnet,
}


class Program:
    """A model with its batch and its optimizer, always made alike."""

    def __init__(self, model_name: str, optimizer_name: str) -> None:
        seed_everything(0)
        self.model, self.loss = MODELS[model_name]()
        self.optimizer = build_optimizer(optimizer_name, self.model)

    def step(self) -> None:
        """Train once."""
        self.loss(self.model).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def trace_of(run: Callable[[], Any], budget: int | str = "1TiB", **options: Any) -> Trace:
    """Return the trace of a step run inside a budget."""
    with running(budget, **options) as (memory_budget, _):
        run()
        return memory_budget.trace()


def own_buffers(trace: Trace) -> list[Buffer]:
    """Return the buffers that ops read or write, in the order in which they first do: ids follow the collector's order."""
    ids = dict.fromkeys(id_ for op in trace.ops for id_ in (*op.reads, *op.writes))
    return [trace.buffers[id_] for id_ in ids]


def structure(trace: Trace) -> dict[str, Any]:
    """Return all of a trace but its times, the ids of its storages, and what was there before the step and no op uses."""
    buffers = own_buffers(trace)
    place = {buffer.id: place for place, buffer in enumerate(buffers)}
    load = [0] * len(trace.ops)
    for buffer in buffers:
        for op in range(max(buffer.birth_op, 0), buffer.death_op):
            load[op] += buffer.size_bytes
    return {
        "ops": [
            (op.name, op.phase, op.module, op.node, [place[i] for i in op.reads], [place[i] for i in op.writes])
            for op in trace.ops
        ],
        "buffers": [(b.size_bytes, b.kind, b.birth_op, b.death_op, b.saved) for b in buffers],
        "saved": [(s.op, place.get(s.buffer_id), s.shape, s.stride, s.offset, s.dtype) for s in trace.saved_tensors],
        "load": load,
    }


def ops_named(trace: Trace, name: str) -> list[Op]:
    """Return the ops of a name."""
    return [op for op in trace.ops if op.name == name]


def sizes(trace: Trace, ids: tuple[int, ...]) -> list[int]:
    """Return the bytes of buffers."""
    return [trace.buffers[id_].size_bytes for id_ in ids]


def bytes_before(trace: Trace, op: int) -> int:
    """Return what is alive between an op and the one before it."""
    fresh_bytes = sum(
        trace.buffers[id_].size_bytes
        for id_ in trace.ops[op].writes
        if all(b.death_op != op for b in trace.buffers if b.storage_id == trace.buffers[id_].storage_id)
    )
    return load_curve(trace)[op] - fresh_bytes


@pytest.mark.parametrize("optimizer_name", ["sgd", "adamw"])
@pytest.mark.parametrize("model_name", MODELS)
def test_load_is_the_allocators_in_the_plain_step(model_name: str, optimizer_name: str) -> None:
    """The load between the phases is what the allocator saw in a plain run, and the peak within one percent."""
    Program(model_name, optimizer_name).step()  # what libraries make once
    gc.collect()
    meter = AllocatorPeak()
    with meter:
        program = Program(model_name, optimizer_name)
    own_bytes = meter.live_bytes
    with meter:
        loss = program.loss(program.model)
    with meter:
        loss.backward()
    with meter:
        torch.empty(1)  # the meter takes an empty segment for a broken one, and plain SGD allocates nothing
        program.optimizer.step()
    after_forward_bytes, after_backward_bytes, after_step_bytes = (s.live_bytes for s in meter.segments[1:])
    plain_peak_bytes = max(segment.peak_bytes for segment in meter.segments[1:])
    del program, loss
    gc.collect()
    program = Program(model_name, optimizer_name)

    with running() as (budget, _):
        loss = program.loss(program.model)
        loss.backward()
        program.optimizer.step()
    trace = budget.trace()
    validate(trace)
    foreign_bytes = counts(trace).before_step_bytes - own_bytes
    phases = [op.phase for op in trace.ops]
    end_bytes = sum(buffer.size_bytes for buffer in trace.buffers if buffer.death_op == len(trace.ops))
    # Numbers that C++ wraps into tensors are not seen: a few bytes each.
    assert bytes_before(trace, phases.index("backward")) - foreign_bytes == pytest.approx(after_forward_bytes, abs=512)
    assert bytes_before(trace, phases.index("optimizer")) - foreign_bytes == pytest.approx(after_backward_bytes, abs=512)
    assert end_bytes - foreign_bytes == pytest.approx(after_step_bytes, abs=512)
    # Convolutions of this size allocate much inside themselves, which no recorder sees.
    tolerance = 0.2 if model_name == "resnet" else 0.01
    assert peak(trace).size_bytes - foreign_bytes == pytest.approx(plain_peak_bytes, rel=tolerance)


@pytest.mark.parametrize("model_name", MODELS)
def test_trace_is_that_of_the_plain_step_while_buffers_leave(model_name: str) -> None:
    """Half of the memory, or forced decisions, change nothing in ops, buffers, lives and load."""
    program = Program(model_name, "adamw")
    free = trace_of(program.step)
    expected = structure(free)
    before_bytes, peak_bytes = counts(free).before_step_bytes, peak(free).size_bytes
    options: list[tuple[int | str, dict[str, Any]]] = [
        (before_bytes + (peak_bytes - before_bytes) * 6 // 10, {}),
        ("1TiB", {"decisions": "recompute"}),
        ("1TiB", {"decisions": "swap", "tier": "disk"}),
    ]
    del program
    for budget, config in options:
        program = Program(model_name, "adamw")
        gc.collect()
        with running(budget, **config) as (memory_budget, session):
            program.step()
            trace = memory_budget.trace()
        summary = memory_budget.summary()
        assert summary.swapped_out_bytes + session.counters.dropped_bytes > 0.1 * (peak_bytes - before_bytes)
        found = structure(trace)
        for key, value in expected.items():
            assert found[key] == value, (budget, config, key)


def test_evicting_runs_are_other_runs() -> None:
    """The comparison can fail: without the mapping of returned storages the trace is another."""
    program = Program("gpt2", "sgd")
    expected = structure(trace_of(program.step))
    program = Program("gpt2", "sgd")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draft, "returned", lambda *_: None)
        found = structure(trace_of(program.step, decisions="swap"))
    assert found != expected


def test_step_of_the_documentation() -> None:
    """The recorder writes the example of docs/trace-format.md (but for one life, which is longer in truth)."""
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(inplace=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    x = torch.randn(4, 2)
    kept: list[torch.Tensor] = []

    def step() -> None:
        kept.append(model(x).sum())
        kept[0].backward()
        optimizer.step()

    trace = trace_of(step)
    assert [(op.name, op.phase, op.module, op.node) for op in trace.ops] == [
        ("aten.mm.default", "forward", "0", ""),
        ("aten.relu_.default", "forward", "1", ""),
        ("aten.sum.default", "forward", "", ""),
        ("aten.ones_like.default", "backward", "", ""),
        ("aten.threshold_backward.default", "backward", "", "ReluBackward0"),
        ("aten.mm.default", "backward", "", "MmBackward0"),
        ("aten.add_.Tensor", "optimizer", "", ""),
    ]
    lives = [(b.size_bytes, b.kind, b.birth_op, b.death_op) for b in own_buffers(trace)]
    assert sorted(lives) == sorted(
        [
            (24, "parameter", -1, 6),
            (32, "input", -1, 7),
            (48, "activation", 0, 1),
            (48, "activation", 1, 5),
            (4, "activation", 2, 7),
            (4, "temporary", 3, 6),  # `backward()` itself holds it to its end
            (48, "temporary", 4, 6),
            (24, "gradient", 5, 7),
            (24, "parameter", 6, 7),
        ]
    )
