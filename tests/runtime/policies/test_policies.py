"""The reactive policies: order and action, on graphs small enough to know the answer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.programs import mlp, running, same_bits, train
from tests.sampling import sample
from torchdelta.aten.facts import facts_of
from torchdelta.config import POLICIES
from torchdelta.runtime.policies import REGISTRY
from torchdelta.runtime.policies.base import Action
from torchdelta.runtime.state.buffer import Buffer, OpEntry, View
from torchdelta.runtime.state.copies import TierCopy

MUL = torch.ops.aten.mul.Tensor


@dataclass
class FixedCosts:
    """Costs that a test has set."""

    clock: int = 100
    can_swap: bool = True
    swap_s_per_byte: float = 1.0
    dropped_buffers: list[Buffer] = field(default_factory=list[Buffer])

    def swap_time_s(self, buffer: Buffer) -> float:
        """By size alone; half when a copy is there."""
        return buffer.size_bytes * self.swap_s_per_byte * (0.5 if buffer.copy is not None else 1.0)

    def own_time_s(self, buffer: Buffer) -> float:
        """The op's."""
        return buffer.op.time_s if buffer.op is not None else float("inf")

    def missing_time_s(self, buffer: Buffer) -> float:
        """The op's and those of dropped sources, walked naively."""
        if buffer.op is None:
            return float("inf")
        away = {id(b) for b in self.dropped_buffers}
        seen: set[int] = set()

        def cost(b: Buffer) -> float:
            if id(b) in seen:
                return 0.0
            seen.add(id(b))
            assert b.op is not None
            return b.op.time_s + sum(cost(view.buffer) for view in b.op.args if id(view.buffer) in away)

        return cost(buffer)

    def dropped(self) -> list[Buffer]:
        """Those that a test has dropped."""
        return self.dropped_buffers


class NoTier:
    """A tier that takes back what it never gave."""

    def release(self, slot: object) -> None:
        """Do nothing."""


def made(
    size_bytes: int,
    *,
    used: int = 0,
    time_s: float | None = 1.0,
    sources: tuple[Buffer, ...] = (),
    copied: bool = False,
    saved: int = 0,
) -> Buffer:
    """Build a buffer; `time_s` None means that no op made it."""
    buffer = Buffer(size_bytes)
    buffer.last_used = used
    buffer.save_order = saved
    if time_s is not None:
        entry = OpEntry(MUL, facts_of(MUL), [View(source, torch.zeros(1)) for source in sources], None)
        entry.time_s = time_s
        buffer.op = entry
    if copied:
        buffer.copy = TierCopy(NoTier(), None, None, torch.UntypedStorage(0))  # pyright: ignore[reportArgumentType]
    return buffer


def ranked(policy: str, candidates: list[Buffer], costs: FixedCosts | None = None) -> list[tuple[Buffer, Action]]:
    """Rank by a policy's name."""
    return REGISTRY[policy]().rank(candidates, costs or FixedCosts())


BUFFERS = st.lists(
    st.builds(
        made,
        st.integers(1, 1000),
        used=st.integers(0, 100),
        time_s=st.one_of(st.none(), st.floats(0.001, 1000)),
        copied=st.booleans(),
        saved=st.integers(0, 50),
    ),
    max_size=12,
)


def test_registry_is_the_configs() -> None:
    """Every name that the configuration allows is registered, and no other; each policy knows its name."""
    assert tuple(REGISTRY) == POLICIES
    assert all(REGISTRY[name]().name == name for name in POLICIES)


@pytest.mark.parametrize("policy", sample(POLICIES, 3))
@given(candidates=BUFFERS, can_swap=st.booleans())
def test_every_candidate_is_ranked_once(policy: str, candidates: list[Buffer], can_swap: bool) -> None:
    """What is left out of a ranking could never leave."""
    ranking = ranked(policy, candidates, FixedCosts(can_swap=can_swap))
    assert sorted(buffer.id for buffer, _ in ranking) == sorted(buffer.id for buffer in candidates)


@pytest.mark.parametrize("policy", sample(POLICIES, 3))
@given(candidates=BUFFERS, seed=st.randoms())
def test_ranking_does_not_depend_on_the_order_of_asking(policy: str, candidates: list[Buffer], seed: Any) -> None:
    """The same buffers are ranked the same way, however they are handed over, and again."""
    first = ranked(policy, candidates)
    shuffled = list(candidates)
    seed.shuffle(shuffled)
    again = ranked(policy, shuffled)
    if policy in {"dtr", "recompute-only"}:  # what cannot be recomputed comes last, as it is met
        first, again = ([pair for pair in ranking if pair[0].op is not None] for ranking in (first, again))
    assert again == first


@given(candidates=BUFFERS)
def test_delta_2022_orders_by_bytes_times_staleness(candidates: list[Buffer]) -> None:
    """The filter of the paper; its director asks whether the copies out and back take longer than the op."""
    costs = FixedCosts()
    ranking = ranked("delta-2022", candidates, costs)
    scores = [buffer.size_bytes * (costs.clock - buffer.last_used + 1) for buffer, _ in ranking]
    assert scores == sorted(scores, reverse=True)
    for buffer, action in ranking:
        if buffer.copy is None and buffer.op is not None:
            assert action is (Action.SWAP if costs.swap_time_s(buffer) < buffer.op.time_s else Action.RECOMPUTE)


def test_director_takes_what_is_there() -> None:
    """A copy on the tier makes leaving free; a full tier leaves only dropping."""
    copied, plain = made(10, time_s=1e-9, copied=True), made(10, time_s=1e9)
    for policy in ("delta-2022", "largest-first", "lru"):
        assert dict(ranked(policy, [copied]))[copied] is Action.SWAP
        assert dict(ranked(policy, [plain]))[plain] is Action.SWAP
        assert dict(ranked(policy, [plain], FixedCosts(can_swap=False)))[plain] is Action.RECOMPUTE


@given(candidates=BUFFERS)
def test_largest_first(candidates: list[Buffer]) -> None:
    """Sizes fall."""
    sizes = [buffer.size_bytes for buffer, _ in ranked("largest-first", candidates)]
    assert sizes == sorted(sizes, reverse=True)


@given(candidates=BUFFERS)
def test_least_recently_used(candidates: list[Buffer]) -> None:
    """Uses rise."""
    uses = [buffer.last_used for buffer, _ in ranked("lru", candidates)]
    assert uses == sorted(uses)


@given(candidates=BUFFERS)
def test_recompute_only_swaps_only_what_no_op_made(candidates: list[Buffer]) -> None:
    """And that last of all."""
    for policy in ("recompute-only", "dtr"):
        ranking = ranked(policy, candidates)
        assert all((action is Action.RECOMPUTE) == (buffer.op is not None) for buffer, action in ranking)
        actions = [action for _, action in ranking]
        assert actions == sorted(actions, key=lambda action: action is Action.SWAP)


@given(candidates=BUFFERS)
def test_swap_only_never_recomputes(candidates: list[Buffer]) -> None:
    """In the order of saving."""
    ranking = ranked("swap-only", candidates)
    assert all(action is Action.SWAP for _, action in ranking)
    orders = [buffer.save_order for buffer, _ in ranking]
    assert orders == sorted(orders)


@given(candidates=BUFFERS)
def test_default_takes_the_cheaper_way_back(candidates: list[Buffer]) -> None:
    """Scores rise, and each action is the cheaper of the two."""
    costs = FixedCosts()
    scores: list[float] = []
    for buffer, action in ranked("torchdelta", candidates, costs):
        recompute_s = costs.missing_time_s(buffer) if buffer.copy is None else float("inf")
        swap_s = costs.swap_time_s(buffer)
        assert action is (Action.RECOMPUTE if recompute_s <= swap_s else Action.SWAP)
        scores.append(min(recompute_s, swap_s) / (buffer.size_bytes * (costs.clock - buffer.last_used + 1)))
    assert scores == sorted(scores)


def test_default_charges_the_missing_chain() -> None:
    """A cheap op on top of a dear dropped one is dear."""
    dear = made(10, time_s=500.0)
    on_top, alone = made(10, time_s=1.0, sources=(dear,)), made(10, time_s=2.0)
    costs = FixedCosts(dropped_buffers=[dear], swap_s_per_byte=10.0)
    assert ranked("torchdelta", [on_top, alone], costs) == [(alone, Action.RECOMPUTE), (on_top, Action.SWAP)]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Buffer], list[Buffer]]:
    """Draw a small graph of buffers, and which of them are dropped."""
    buffers: list[Buffer] = []
    for _ in range(draw(st.integers(1, 9))):
        sources = draw(st.lists(st.sampled_from(buffers), max_size=3, unique_by=id)) if buffers else []
        buffers.append(
            made(
                draw(st.integers(1, 50)),
                used=draw(st.integers(0, 99)),
                time_s=draw(st.integers(1, 64)) * 1.0,
                sources=tuple(sources),
            )
        )
    return buffers, draw(st.lists(st.sampled_from(buffers), unique_by=id))


@given(graph=graphs())
def test_dtr_counts_the_evicted_neighbourhood(graph: tuple[list[Buffer], list[Buffer]]) -> None:
    """Against brute force.

    Dropped buffers that are reached from a resident one over dropped ones only, each counted once.
    """
    buffers, dropped = graph
    away = {id(buffer) for buffer in dropped}

    def near(buffer: Buffer) -> list[Buffer]:
        assert buffer.op is not None
        above = [view.buffer for view in buffer.op.args]
        below = [
            other for other in buffers if other.op is not None and any(view.buffer is buffer for view in other.op.args)
        ]
        return [other for other in above + below if id(other) in away]

    def neighbourhood_s(buffer: Buffer) -> float:
        found: dict[int, Buffer] = {}
        waiting = near(buffer)
        while waiting:
            other = waiting.pop()
            if id(other) not in found:
                found[id(other)] = other
                waiting += near(other)
        return sum(other.op.time_s for other in found.values() if other.op is not None)

    costs = FixedCosts(dropped_buffers=dropped)
    resident = [buffer for buffer in buffers if id(buffer) not in away]
    ranking = [buffer for buffer, _ in ranked("dtr", resident, costs)]
    scores = [
        (costs.own_time_s(b) + neighbourhood_s(b)) / (b.size_bytes * (costs.clock - b.last_used + 1)) for b in ranking
    ]
    assert len(ranking) == len(resident)
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(scores))


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_at_work(policy: str) -> None:
    """Each holds a budget of three quarters with the same bits, by the actions that its name allows."""
    x = torch.randn(128, 64)

    def run(budget: int | str, **options: Any) -> tuple[list[torch.Tensor], Any, Any]:
        torch.manual_seed(3)
        model = mlp(64, 4, dropout=0.1)
        with running(budget, **options) as (memory_budget, session):
            observed = train(model, x)
        return observed, memory_budget.summary(), session.counters

    plain, recorded, _ = run("1TiB")
    budget_bytes = int(recorded.peak_bytes * 0.75)
    observed, summary, counters = run(budget_bytes, policy=policy)
    assert same_bits(observed, plain)
    assert summary.peak_bytes <= budget_bytes
    assert counters.num_evictions > 0
    if policy == "swap-only":
        assert (summary.num_recomputed_ops, summary.recomputed_bytes) == (0, 0)
        assert summary.swapped_out_bytes > 0
    if policy in {"recompute-only", "dtr"}:
        assert summary.num_recomputed_ops > 0
        assert summary.swapped_out_bytes <= 2 * x.nbytes  # the input of each step has no op
