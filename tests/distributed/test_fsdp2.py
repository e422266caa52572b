"""FSDP2: parameters that are gathered, freed and gathered again, in two real processes."""

from __future__ import annotations

import gc
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.distributed.verdict import KINDS, PRESSED, assert_good, judge
from tests.runtime.parts import running_session
from tests.same_bits.judge import UNLIMITED, Scope, Step, seed_everything
from tests.sampling import keep
from torchdelta import Config, MemoryBudget

if TYPE_CHECKING:
    from tests.distributed.pair import Pair

WIDTH = 64
NUM_STEPS = 3


class Block(nn.Module):
    """A block of a transformer, near enough."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + nn.functional.dropout(self.down(hidden), 0.1, self.training)


def sharded(reshard: bool, precision: str | None = None, *, offloads: bool = False) -> nn.Module:
    """Shard a model block by block."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"reshard_after_forward": reshard}
    if precision is not None:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32 if precision == "mixed" else None
        )
    if offloads:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(WIDTH, 8))
    for block in list(model)[:-1]:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def training(reshard: bool, how: str) -> Step:
    """Make a step that trains a sharded model for three optimizer steps."""

    def step(scope: Scope) -> dict[str, Any]:
        model = sharded(
            reshard,
            how if how in {"mixed", "bf16"} else None,
            offloads=how == "offload",
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seed_everything(torch.distributed.get_rank())
        losses, gradients = [], []
        num_parts = 2 if how == "accumulation" else 1
        with scope():
            for index in range(NUM_STEPS):
                for part in range(num_parts):
                    is_last = part == num_parts - 1
                    if how == "accumulation":
                        model.set_requires_gradient_sync(is_last)
                    rows = 96 if index == 1 else 128  # another shape, another plan
                    loss = model(torch.randn(rows, WIDTH)).float().square().mean()
                    loss.backward()
                    losses.append(loss.detach())
                gradients += [parameter.grad.to_local().clone() for parameter in model.parameters()]
                if how == "evaluation":
                    model.eval()
                    with torch.no_grad():
                        losses.append(model(torch.randn(32, WIDTH)).sum())
                    model.train()
                optimizer.step()
                optimizer.zero_grad()
        parameters = [parameter.detach().to_local() for parameter in model.parameters()]
        return {"losses": losses, "gradients": gradients, "parameters": parameters}

    return step


@pytest.mark.parametrize(
    ("reshard", "kind"), keep(itertools.product([True, False], KINDS), [(True, PRESSED), (False, "mixed")])
)
def test_same_bits(pair: Pair, reshard: bool, kind: str) -> None:
    """Activations leave and come back beside parameters that come and go, and no bit changes."""
    assert_good(pair.run(judge, f"fsdp2 {reshard}", training, (reshard, "plain"), kind), kind)


@pytest.mark.parametrize(
    ("how", "kind"),
    keep(
        itertools.product(["mixed", "bf16", "accumulation", "offload", "evaluation"], ["recompute", "swap"]),
        [("mixed", "recompute"), ("offload", "swap")],
    ),
)
def test_same_bits_of_variants(pair: Pair, how: str, kind: str) -> None:
    """Mixed precision, gradients that wait for their reduction, parameters offloaded, evaluation between steps."""
    assert_good(pair.run(judge, f"fsdp2 {how}", training, (True, how), kind), kind)


def counted(rank: int) -> dict[str, Any]:
    """Compare what the ledger counts in the middle and at the end of a step with what can be reached."""
    from torchdelta.runtime.record.scan import scan_storages
    from torchdelta.runtime.state.ledger import Ledger

    del rank
    gc.unfreeze()  # what earlier tests have put out of sight
    gc.collect()
    model = sharded(reshard=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    x = torch.randn(128, WIDTH)
    found: dict[str, Any] = {"entries": [], "counts": []}
    with MemoryBudget(UNLIMITED, Config(tier="memory")):
        session = running_session()
        for _ in range(3):
            loss = model(x).square().mean()
            names = {
                record.current.op.facts.name
                for record in session.ledger.records.values()
                if record.current is not None and record.current.op is not None
            }
            found["entries"].append(sorted(names))
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
            gc.collect()
            fresh = Ledger("cpu")
            scan_storages(fresh)
            found["counts"].append((session.ledger.usage.live_bytes, fresh.usage.live_bytes))
    return found


def test_bytes_are_counted_and_products_are_not_recomputed(pair: Pair) -> None:
    """Gathered parameters count while they are there; what reads them is on no tape."""
    for answer in pair.run(counted):
        for live_bytes, reachable_bytes in answer["counts"]:
            assert live_bytes == pytest.approx(reachable_bytes, abs=4096)
        for names in answer["entries"]:
            assert "aten.addmm.default" not in names
            assert "aten.gelu.default" in names


def told(rank: int) -> list[str]:
    """Train a little and return what was said."""
    import logging

    class Lines(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.lines: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.lines.append(record.getMessage())

    handler = Lines()
    logger = logging.getLogger("torchdelta")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    training(reshard=True, how="plain")(lambda: MemoryBudget(UNLIMITED))
    logger.removeHandler(handler)
    del rank
    return handler.lines


def test_said_once(pair: Pair) -> None:
    """One line for the class of the sharded parameters, one for their storages."""
    for lines in pair.run(told):
        assert sum("tensor subclass DTensor" in line for line in lines) == 1
        assert sum("freed and filled again" in line for line in lines) == 1


def foreseen(rank: int, how: str) -> tuple[int, int]:
    """Return the bytes of states that were foreseen for the first step of an optimizer, and those it has then."""
    from torchdelta.runtime.survey.first_step import foresee_first_step

    del rank

    class Reading(torch.optim.AdamW):
        """Reads a value, so that its step cannot be tried."""

        def step(self, closure: Any = None) -> Any:
            """Read, and step."""
            float(self.param_groups[0]["params"][0].sum())
            return super().step(closure)

    model = sharded(reshard=True)
    optimizer = (Reading if how == "estimate" else torch.optim.AdamW)(model.parameters(), foreach=how == "foreach")
    model(torch.randn(8, WIDTH)).sum().backward()
    step = foresee_first_step(optimizer)
    assert step.is_estimate == (how == "estimate")
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return step.state_bytes, sum(getattr(value, "_local_tensor", value).nbytes for value in states)


@pytest.mark.parametrize("how", ["foreach", "one by one", "estimate"])
def test_the_first_step_is_foreseen_at_the_sizes_of_the_shards(pair: Pair, how: str) -> None:
    """Each process has a part of each parameter, and so of the optimizer's states."""
    for foreseen_bytes, real_bytes in pair.run(foreseen, how):
        assert foreseen_bytes == pytest.approx(real_bytes, abs=256)


def gradients_needed(rank: int) -> tuple[int, int]:
    """Return the bytes of gradients that a run is said to need, and those of the shards of the parameters."""
    from torchdelta.runtime.survey.whole_run import RunNeed

    del rank
    model = sharded(reshard=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with MemoryBudget(UNLIMITED, Config(tier="memory")):
        session = running_session()
        model(torch.randn(8, WIDTH)).sum().backward()
        need = RunNeed(session.ledger, session.recorder, is_first_pass=True)
        need.add_backward_leaves(model.parameters())
        needed = need.finish(is_lower_bound=False)
    del optimizer
    return needed.gradient_bytes, sum(parameter.to_local().nbytes for parameter in model.parameters())


def test_gradients_count_at_the_sizes_of_the_shards(pair: Pair) -> None:
    """What a run needs is said of this process, not of all of them together."""
    for needed_bytes, shard_bytes in pair.run(gradients_needed):
        assert needed_bytes == shard_bytes
