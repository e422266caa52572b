"""Steps on which an earlier bound stood above a plan that fits: each is one reason in small."""

import msgspec
import pytest
import torch
from torch import nn

from tests.bounds.exhaustive import best_of_all
from tests.planners.chains import MACHINE as FAST_LINK
from tests.planners.chains import MIB
from torchdelta.bounds.lp_bound import bound
from torchdelta.machine.catalog import find
from torchdelta.machine.roofline import price
from torchdelta.planners import get
from torchdelta.simulate import simulate_plan
from torchdelta.trace.model import BEFORE_STEP, Buffer, Header, Op, SavedTensor, Trace, load_curve
from torchdelta.trace.symbolic import trace_step
from torchdelta.trace.validate import validate

MACHINE = msgspec.structs.replace(FAST_LINK, host_out_bytes_per_s=1e6, host_in_bytes_per_s=1e6)


def step(buffers, ops):
    """Return a step of buffers `(storage, bytes, kind, birth, death, saved)` and ops `(name, reads, writes, s, again)`.

    The ops up to the last birth of a saved buffer are forward, and the rest is backward.
    """
    last_birth = max(birth for _, _, _, birth, _, saved in buffers if saved)
    trace = Trace(
        header=Header(torch_version="2.13.0", device="cpu", created_by="tests"),
        buffers=tuple(
            Buffer(id=id_, storage_id=storage, size_bytes=size, kind=kind, birth_op=birth, death_op=death, saved=saved)
            for id_, (storage, size, kind, birth, death, saved) in enumerate(buffers)
        ),
        ops=tuple(
            Op(
                index=index,
                name=f"aten.{name}.default",
                phase="forward" if index <= last_birth else "backward",
                reads=reads,
                writes=writes,
                time_s=time_s,
                recomputable=again,
            )
            for index, (name, reads, writes, time_s, again) in enumerate(ops)
        ),
        saved_tensors=tuple(
            SavedTensor(op=birth + 1, buffer_id=id_, shape=(1,), stride=(1,), offset=0, dtype="float32")
            for id_, (_, _, _, birth, _, saved) in enumerate(buffers)
            if saved
        ),
    )
    validate(trace)
    return trace


def check(trace, budget_bytes):
    """Return the best plan's time after all bounds have been compared with it."""
    best_s, _ = best_of_all(trace, MACHINE, budget_bytes)
    for kind in ({}, {"num_moments": len(trace.ops), "integral": True}):
        assert bound(trace, MACHINE, budget_bytes, **kind).time_s <= best_s * (1 + 1e-6)
    return best_s


@pytest.mark.parametrize("budget_mib", [480, 500, 510, 520])
def test_a_batch_norm_that_is_called_twice_does_not_run_its_first_call_again(budget_mib):
    """The first call's statistics are gone when the second one is replayed, which does not need them."""
    large, small = 100 * MIB, 1024
    trace = step(
        [
            (0, MIB, "input", BEFORE_STEP, 10, False),
            (1, small, "constant", BEFORE_STEP, 1, False),
            (2, large, "activation", 0, 9, True),
            (3, large, "activation", 1, 9, True),
            (1, small, "constant", 1, 3, False),
            (5, large, "activation", 2, 8, True),
            (6, large, "activation", 3, 8, True),
            (1, small, "constant", 3, 10, False),
            (8, large, "activation", 4, 7, True),
            (9, 50 * MIB, "activation", 5, 7, True),
            *((id_, MIB, "temporary", id_ - 4, 10, False) for id_ in (10, 11, 12, 13)),
        ],
        [
            ("mm", (0,), (2,), 1.0, False),
            ("native_batch_norm", (2, 1), (3, 4), 5.0, True),
            ("relu", (3,), (5,), 9.0, False),
            ("native_batch_norm", (5, 4), (6, 7), 0.1, True),
            ("mm", (6,), (8,), 1.0, False),
            ("mm", (8,), (9,), 1.0, False),
            ("mul", (8, 9), (10,), 1.0, False),
            ("mul", (5, 6), (11,), 1.0, False),
            ("mul", (2, 3), (12,), 1.0, False),
            ("mul", (12,), (13,), 1.0, False),
        ],
    )
    best_s = check(trace, budget_mib * MIB)
    if budget_mib >= 510:
        assert best_s == pytest.approx(21.2)  # 0.1 s more than the plain step: the second call alone


@pytest.mark.parametrize("budget_mib", [210, 250])
def test_what_an_op_overwrites_is_there_for_the_replay_before_it(budget_mib):
    """The source of the replay is written over by the very op that uses its target."""
    trace = step(
        [
            (0, MIB, "input", BEFORE_STEP, 6, False),
            (1, MIB, "activation", 0, 4, False),
            (2, 100 * MIB, "activation", 1, 5, True),
            (3, 100 * MIB, "activation", 2, 4, True),
            (1, MIB, "temporary", 4, 6, False),
            (5, 100 * MIB, "temporary", 3, 5, False),
        ],
        [
            ("mm", (0,), (1,), 9.0, True),
            ("relu", (1,), (2,), 0.1, True),
            ("mm", (2,), (3,), 1.0, False),
            ("ones", (3,), (5,), 1.0, False),
            ("mul", (2, 5), (4,), 1.0, False),
            ("mul", (), (), 1.0, False),
        ],
    )
    assert check(trace, budget_mib * MIB) == pytest.approx(13.2)


def _layers(num_blocks):
    parts, channels = [], 3
    for _ in range(num_blocks):
        parts += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        channels = 16
    return nn.Sequential(*parts)


class Consistency(nn.Module):
    """A target from a first pass without gradients through the same batch-normed net."""

    def __init__(self):
        super().__init__()
        self.net = _layers(4)

    def forward(self, pixels):
        with torch.no_grad():
            target = self.net(pixels)
        return (self.net(pixels + 0.01 * torch.randn_like(pixels)) - target).pow(2).mean()


def called_twice(batch_size):
    """A net that a step calls twice."""

    def one_step(model, pixels):
        model(pixels).backward()
        model.zero_grad()

    return Consistency(), torch.randn(batch_size, 3, 64, 64), one_step


def accumulation(batch_size):
    """Gradient accumulation over two micro-batches."""

    def one_step(model, pixels):
        for half in pixels.chunk(2):
            model(half).pow(2).mean().backward()
        model.zero_grad()

    return _layers(4), torch.randn(batch_size, 3, 64, 64), one_step


@pytest.mark.parametrize("make", [called_twice, accumulation])
def test_no_plan_of_a_net_with_repeated_batch_norms_beats_the_bound(make):
    """On traced steps, at all budgets between the least peak and the plain one."""
    machine = find("rtx3090")
    trace = price(trace_step(make, batch_size=16, optimizer="none"), machine)
    plain_bytes = max(load_curve(trace, with_workspace=True))
    compared = 0
    for share in (0.95, 0.85, 0.75, 0.65):
        proved = bound(trace, machine, int(share * plain_bytes))
        if proved.feasible and proved.overhead > 0:
            plan = get("torchdelta")(trace, machine, int(share * plain_bytes))
            assert proved.time_s <= simulate_plan(trace, machine, plan).time_s * (1 + 1e-6), share
            compared += 1
    assert compared
