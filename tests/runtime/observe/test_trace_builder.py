"""The trace of the first step: that of the plain step, whatever the budget does meanwhile."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.runtime.observe.traced import MODELS, Program
from tests.runtime.programs import Attention, running
from tests.sampling import sample
from torchdelta.cli.allocator_peak import AllocatorPeak
from torchdelta.native.build import is_switched_off
from torchdelta.runtime.observe.draft import Draft
from torchdelta.trace.file import read_trace, write_trace
from torchdelta.trace.model import Buffer, Op, Trace, counts, load_curve, peak
from torchdelta.trace.validate import validate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def trace_of(run: Callable[[], Any], budget: int | str = "1TiB", **options: Any) -> Trace:
    """Return the trace of a step run inside a budget."""
    with running(budget, **options) as (memory_budget, _):
        run()
    return memory_budget.trace()


def own_buffers(trace: Trace) -> list[Buffer]:
    """Return the buffers that ops use, in the order in which they first do: ids follow the collector's order."""
    ids = dict.fromkeys(id_ for op in trace.ops for id_ in (*op.reads, *op.writes))
    return [trace.buffers[id_] for id_ in ids]


def structure(trace: Trace) -> dict[str, Any]:
    """Return all of a trace but its times, its ids, and what was there before the step and no op uses."""
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


@pytest.mark.parametrize(("model_name", "optimizer_name"), sample(itertools.product(MODELS, ["sgd", "adamw"]), 3))
def test_load_is_the_allocators_in_the_plain_step(model_name: str, optimizer_name: str) -> None:
    """Between the phases the load is what the allocator saw in a plain run; the peak is within one percent."""
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
    assert bytes_before(trace, phases.index("optimizer")) - foreign_bytes == pytest.approx(
        after_backward_bytes, abs=512
    )
    assert end_bytes - foreign_bytes == pytest.approx(after_step_bytes, abs=512)
    # Convolutions of this size allocate a quarter of the peak inside themselves, which is estimated.
    tolerance = 0.1 if model_name == "resnet" else 0.01
    with_workspace_bytes = peak(trace, with_workspace=True).size_bytes - foreign_bytes
    assert with_workspace_bytes == pytest.approx(plain_peak_bytes, rel=tolerance)
    assert peak(trace).size_bytes - foreign_bytes <= plain_peak_bytes


@pytest.mark.parametrize("model_name", sample(MODELS, 1))
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


def test_kinds_are_found_out() -> None:
    """Parameters, gradients, states, statistics and the batch are told apart, in the first step and later."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(2, 3, 8, 8)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()

    def kinds_of(trace: Trace) -> Counter[str]:
        return Counter({kind: size for kind, size in counts(trace).bytes_by_kind.items() if kind in expected})

    gc.collect()
    # A trace begins with all that lives in the process: other tests may have left models behind.
    alive = [found for found in gc.get_objects() if type(found) in (nn.Parameter, torch.Tensor) and found.is_leaf]
    all_bytes = sum(found.nbytes for found in alive if type(found) is nn.Parameter)
    gradient_bytes = sum(found.grad.nbytes for found in alive if found.requires_grad and found.grad is not None)
    del alive
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    expected = {
        "parameter": all_bytes,
        "gradient": gradient_bytes + parameter_bytes,
        "optimizer_state": parameter_bytes,
        "input": x.nbytes,
    }
    first = trace_of(step)
    assert kinds_of(first) == expected
    statistics = {buffer.id for buffer in own_buffers(first) if buffer.kind == "constant"}
    assert {size for id_ in statistics for size in sizes(first, (id_,))} == {4 * 4, 8}
    optimizer.zero_grad()
    assert kinds_of(trace_of(step)) == expected


def test_ops_carry_module_node_time_and_randomness() -> None:
    """Each op knows the innermost module or the autograd node that called it, its time, and whether it drew numbers."""
    model = nn.Sequential(Attention(), nn.Dropout(0.5))
    trace = trace_of(lambda: model(torch.randn(2, 8, 32)).sum().backward())
    forward = {op.module for op in trace.ops if op.phase == "forward"}
    assert forward == {"", "0", "0.norm", "0.qkv", "0.out", "1"}
    softmax = ops_named(trace, "aten._softmax.default")[0]
    assert (softmax.module, softmax.recomputable, softmax.random) == ("0", True, False)
    assert softmax.time_s > 0
    assert [op.module for op in trace.ops if op.random and op.module] == ["1"]
    backward = ops_named(trace, "aten._softmax_backward_data.default")[0]
    assert (backward.phase, backward.node, backward.module) == ("backward", "SoftmaxBackward0", "")


@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_this_device_does_not_replay_is_not_recomputable(num_threads: int) -> None:
    """Two threads of a CPU may add to one place in another order in a second run: no plan may count on it."""
    before, many = torch.get_num_threads(), 40_000
    x, places = torch.ones(8, requires_grad=True), (torch.zeros(many, dtype=torch.int64),)
    torch.set_num_threads(num_threads)
    try:
        trace = trace_of(lambda: (x * 2).index_put(places, torch.ones(many), accumulate=True).sin().sum().backward())
    finally:
        torch.set_num_threads(before)
    (op,) = ops_named(trace, "aten.index_put.default")
    assert op.recomputable == (num_threads == 1)


def test_recomputed_modules_are_named_in_backward() -> None:
    """`torch.utils.checkpoint` runs modules in backward, and its ops say so."""
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    trace = trace_of(lambda: checkpoint(model, torch.randn(4, 32), use_reentrant=False).sum().backward())
    assert [(op.name, op.module) for op in trace.ops if op.phase == "backward" and op.module] == [
        ("aten.addmm.default", "0"),
        ("aten.tanh.default", "1"),
    ]


def test_sums_of_the_engine_have_their_pseudo_op() -> None:
    """A parameter that is used twice gets the sum of two gradients, which no op makes."""
    weight, x = torch.randn(16, 16, requires_grad=True), torch.randn(8, 16)
    trace = trace_of(lambda: ((x @ weight).relu() + x @ weight).sum().backward())
    products = [op.writes[0] for op in ops_named(trace, "aten.mm.default") if op.phase == "backward"]
    (accumulation,) = ops_named(trace, "torchdelta.accumulate")
    assert sorted(accumulation.reads) == sorted(products)
    total = trace.buffers[accumulation.writes[0]]
    assert (total.kind, total.size_bytes, total.death_op) == ("gradient", weight.nbytes, len(trace.ops))
    is_in_place = total.storage_id == trace.buffers[products[0]].storage_id
    # Without native parts the runtime watches storage objects, and then the engine takes a new storage for the sum.
    assert is_in_place is not is_switched_off()


def test_sum_into_a_new_storage_counts_beside_its_sources() -> None:
    """Where the engine cannot add in place, both gradients and their sum are there at once."""
    x, w = torch.randn(8, 16), torch.randn(16, 16, requires_grad=True)

    def step() -> None:
        hidden = x @ w
        (hidden.tanh() + hidden.sigmoid() + hidden.expand(2, 8, 16)[0]).sum().backward()

    trace = trace_of(step)
    for op in ops_named(trace, "torchdelta.accumulate"):
        assert all(trace.buffers[id_].death_op >= op.index for id_ in op.reads)
        assert sizes(trace, op.reads[:1]) == sizes(trace, op.writes)
    assert ops_named(trace, "torchdelta.accumulate")


def test_gradients_that_exist_are_added_to() -> None:
    """With gradients kept from before, the engine writes a new version of each."""
    layer = nn.Linear(16, 16, bias=False)
    layer.weight.grad = torch.ones(16, 16)
    trace = trace_of(lambda: layer(torch.randn(8, 16)).sum().backward())
    (accumulation,) = ops_named(trace, "torchdelta.accumulate")
    old, new = trace.buffers[accumulation.reads[0]], trace.buffers[accumulation.writes[0]]
    assert (old.birth_op, old.kind, new.kind, old.storage_id) == (-1, "gradient", "gradient", new.storage_id)


def test_blind_node_is_one_op() -> None:
    """A node whose formula must not see the mode is one op, with what it unpacked and what it handed on."""
    weight, x = torch.randn(16, 16, requires_grad=True), torch.randn(8, 16)
    trace = trace_of(lambda: (x @ weight).prod(1).sum().backward())
    (node,) = ops_named(trace, "torchdelta.node")
    assert node.node.startswith("ProdBackward")
    assert sizes(trace, node.writes) == [8 * 16 * 4]
    assert {8 * 16 * 4, 8 * 4} <= set(sizes(trace, node.reads))
    assert node.workspace_bytes > 0


def test_content_from_elsewhere_has_its_pseudo_op() -> None:
    """An array of numpy's that turns up in mid-step is an input, born by a pseudo-op."""
    numpy = pytest.importorskip("numpy")
    weight = torch.randn(16, 16, requires_grad=True)
    trace = trace_of(lambda: (torch.from_numpy(numpy.ones((8, 16), "float32")) @ weight).sum().backward())
    (external,) = ops_named(trace, "torchdelta.external")
    born = trace.buffers[external.writes[0]]
    assert (external.reads, born.kind, born.size_bytes) == ((), "input", 8 * 16 * 4)
    assert born.id in ops_named(trace, "aten.mm.default")[0].reads


def test_saved_tensor_names_what_backward_reads() -> None:
    """The noise of `rrelu` is packed before the op writes it: the saved tensor names what was written."""
    weight, x = torch.randn(64, 64, requires_grad=True), torch.randn(32, 64)
    trace = trace_of(lambda: nn.functional.rrelu(x @ weight, training=True).sum().backward())
    (rrelu,) = ops_named(trace, "aten.rrelu_with_noise.default")
    noise = next(id_ for id_ in rrelu.writes if trace.buffers[id_].saved)
    assert trace.buffers[noise].birth_op == rrelu.index
    (backward,) = ops_named(trace, "aten.rrelu_with_noise_backward.default")
    assert noise in backward.reads
    assert not [saved for saved in trace.saved_tensors if trace.buffers[saved.buffer_id].death_op == rrelu.index]


def test_statistics_that_no_module_is_known_to_have() -> None:
    """The collector lists no frozen module: its running statistics are first met where a batch norm saves them."""
    norm, x = nn.BatchNorm1d(4), torch.randn(8, 4, requires_grad=True)
    gc.collect()
    gc.freeze()
    try:
        trace = trace_of(lambda: norm(x * 2).square().sum().backward())
    finally:
        gc.unfreeze()
    (op,) = ops_named(trace, "aten.native_batch_norm.default")
    assert [buffer.kind for buffer in trace.buffers if buffer.birth_op == op.index].count("input") >= 2
    assert all(saved.op >= trace.buffers[saved.buffer_id].birth_op for saved in trace.saved_tensors)


def test_file_round_trip(tmp_path: Path) -> None:
    """A recorded trace comes back from its file as it was."""
    trace = trace_of(Program("gpt2", "adamw").step)
    path = tmp_path / "step.trace"
    write_trace(trace, path)
    assert read_trace(path) == trace


def test_what_runs_without_gradients_before_the_first_save_dies_where_plain_frees_it() -> None:
    """A teacher's output: the runtime holds it for a replay, the plain step does not."""
    teacher, student, x = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64), torch.randn(32, 64)

    def step() -> None:
        with torch.no_grad():
            wanted = teacher(x)
        loss = (student(x) - wanted).square()
        del wanted
        loss.mean().backward()

    trace = trace_of(step)
    made = next(op for op in trace.ops if op.name == "aten.addmm.default")
    squared = next(op for op in trace.ops if op.name == "aten.pow.Tensor_Scalar")
    assert trace.buffers[made.writes[0]].death_op == squared.index + 1
