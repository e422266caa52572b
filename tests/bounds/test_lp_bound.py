"""The bound: right where the answer is known by hand, ordered as bounds must be, and the same every time."""

import math
from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bounds.by_hand import time_by_hand
from tests.bounds.exhaustive import best_of_all
from tests.planners.chains import MACHINE, MIB, blocks, chain
from torchdelta.bounds.lp_bound import bound, choose_moments, least_peak_bound
from torchdelta.bounds.saved_class import saved_candidates
from torchdelta.simulate.model import Options
from torchdelta.trace.model import BEFORE_STEP, Buffer, Header, Op, SavedTensor, Trace, load_curve, peak

EQUAL = [(8 * MIB, 2e-3, 2e-4)] * 12


def test_a_step_that_fits_costs_nothing():
    """Without a moment above the budget there is nothing to bound."""
    trace = chain(EQUAL)
    found = bound(trace, MACHINE, peak(trace).size_bytes)
    assert found.feasible
    assert found.overhead == 0.0
    assert found.moments == ()
    assert not found.swap


def test_below_the_least_peak_nothing_is_feasible():
    """What cannot leave at some moment is more than the budget: proved without a solver."""
    trace = chain(EQUAL)
    least_bytes = least_peak_bound(trace)
    found = bound(trace, MACHINE, least_bytes - 1)
    assert not found.feasible
    assert math.isinf(found.time_s)
    assert bound(trace, MACHINE, least_bytes).feasible
    assert found.decision_class == "saved"


def test_one_tensor_over_the_budget_takes_its_cheaper_action():
    """All but nothing fits: the one tensor that must leave is recomputed, or swapped where its op is dear."""
    trace = chain([(8 * MIB, 2e-3, 2e-4)] * 3)
    budget_bytes = peak(trace).size_bytes - MIB
    slow_link = msgspec.structs.replace(MACHINE, host_out_bytes_per_s=1e6, host_in_bytes_per_s=1e6)
    found = bound(trace, slow_link, budget_bytes, integral=True, num_moments=100)
    # The only cheap replay is that of a gelu: its own op and the dead one before it.
    assert found.time_s - found.plain_time_s == pytest.approx(4e-4)
    fast_link = msgspec.structs.replace(MACHINE, host_out_bytes_per_s=1e13, host_in_bytes_per_s=1e13)
    assert bound(trace, fast_link, budget_bytes, integral=True, num_moments=100).overhead == pytest.approx(
        0.0, abs=1e-9
    )


def test_what_copies_and_replays_take_of_compute_counts():
    """Links that never wait, on a machine whose cores also copy: both copies are paid for, or each op of a replay."""
    trace = chain([(8 * MIB, 2e-3, 2e-4)] * 3)
    budget_bytes = peak(trace).size_bytes - MIB
    machine = msgspec.structs.replace(
        MACHINE,
        host_out_bytes_per_s=1e10,
        host_in_bytes_per_s=1e10,
        out_compute_s_per_byte=1e-11,
        in_compute_s_per_byte=3e-11,
        copy_compute_s=2e-5,
        replay_compute_s=1e-3,
    )

    def lost_s(**changed):
        found = bound(trace, msgspec.structs.replace(machine, **changed), budget_bytes, integral=True, num_moments=100)
        return found.time_s - found.plain_time_s

    assert lost_s() == pytest.approx(8 * MIB * 4e-11 + 2 * 2e-5)
    assert lost_s(host_out_bytes_per_s=1e6) == pytest.approx(4e-4 + 2 * 1e-3)  # the gelu, and the dead op before it


def one_tensor_away(saved_bytes, temporary_bytes, times_s):
    """Return a step whose saved tensor has to be away while a temporary one lives, if both do not fit."""
    drafts = [(1, "input", BEFORE_STEP, 5), (saved_bytes, "activation", 0, 5), (temporary_bytes, "temporary", 2, 3)]
    reads, writes = [(0,), (0,), (0,), (0,), (1,)], [(1,), (), (2,), (), ()]
    return Trace(
        header=Header(torch_version="2.13.0", device="cpu", created_by="tests"),
        buffers=tuple(
            Buffer(id=id_, storage_id=id_, size_bytes=size, kind=kind, birth_op=birth, death_op=death, saved=id_ == 1)
            for id_, (size, kind, birth, death) in enumerate(drafts)
        ),
        ops=tuple(
            Op(
                index=index,
                name="aten.mm.default",
                phase="forward" if index < 2 else "backward",
                reads=reads[index],
                writes=writes[index],
                time_s=time_s,
                recomputable=False,
            )
            for index, time_s in enumerate(times_s)
        ),
        saved_tensors=(SavedTensor(op=1, buffer_id=1, shape=(1,), stride=(1,), offset=0, dtype="float32"),),
    )


@pytest.mark.parametrize(
    ("first_s", "bytes_per_s", "synchronous", "lost_s"),
    [
        (0.2, 1e8, False, 1.6),  # each copy: 0.5 s of compute, a wait of 0.3 s, and 0.2 s beside an op
        (2.0, 1e8, False, 1.3),  # the copy out has its second beside the long op, but takes compute all the same
        (0.2, 2.5e8, True, 0.8),  # compute waits for both copies of 0.4 s, which is less than they would take
    ],
)
def test_copies_take_compute_when_they_are_made(first_s, bytes_per_s, synchronous, lost_s):
    """One tensor has to be away at one op: the bound is the time of the only plan."""
    size_bytes = 100_000_000
    trace = one_tensor_away(size_bytes, size_bytes, [0.1, first_s, 0.0, 0.2, 0.1])
    machine = msgspec.structs.replace(
        MACHINE,
        host_out_bytes_per_s=bytes_per_s,
        host_in_bytes_per_s=bytes_per_s,
        out_compute_s_per_byte=5e-9,
        in_compute_s_per_byte=5e-9,
    )
    budget_bytes = size_bytes + 1
    found = bound(trace, machine, budget_bytes)
    best_s, _ = best_of_all(trace, machine, budget_bytes, options=Options(synchronous=synchronous))
    assert found.time_s - found.plain_time_s == pytest.approx(lost_s)
    assert best_s - found.plain_time_s == pytest.approx(lost_s)


@pytest.mark.parametrize("integral", [False, True])
@pytest.mark.parametrize("size_bytes", [10, 17, 4096])
def test_a_small_tensor_makes_room_in_a_large_budget(size_bytes, integral):
    """A row of memory in which all tensors are tiny parts of the budget is not below the solver's tolerances."""
    temporary_bytes = 180_000_000_000
    trace = one_tensor_away(size_bytes, temporary_bytes, [0.1, 0.1, 1.0, 0.1, 0.1])
    machine = msgspec.structs.replace(MACHINE, host_out_bytes_per_s=1e7, host_in_bytes_per_s=1e7)
    budget_bytes = temporary_bytes + 1
    best_s, _ = best_of_all(trace, machine, budget_bytes)
    found = bound(trace, machine, budget_bytes, num_moments=5, min_candidate_bytes=1, integral=integral)
    assert found.feasible
    assert found.time_s == pytest.approx(best_s)


@pytest.mark.parametrize("last_s", [8e-3, 5e-4])
def test_whole_tensors_beside_a_slow_link(last_s):
    """The solver finds the best plan, although a copy back takes ten times as long as the step."""
    trace = chain([(9 * MIB, 1e-4, 5e-4), (8 * MIB, 1e-4, 8e-3), (7 * MIB, 8e-3, last_s)])
    machine = msgspec.structs.replace(MACHINE, host_out_bytes_per_s=4e9, host_in_bytes_per_s=1e7)
    budget_bytes = 56_706_990
    best_s, _ = best_of_all(trace, machine, budget_bytes)
    every = len(trace.ops)
    found = bound(trace, machine, budget_bytes, num_moments=every, min_candidate_bytes=1, integral=True)
    assert found.time_s == pytest.approx(best_s)


def test_a_replay_of_a_dead_chain_is_charged_whole():
    """The op between two saved tensors has died: recomputing the second one runs it as well."""
    trace = chain([(8 * MIB, 2e-3, 2e-4)] * 2)
    by_producer = {trace.ops[c.producer_op].name + str(c.producer_op): c for c in saved_candidates(trace)}
    cheap = by_producer["aten.gelu.default2"]
    assert [trace.ops[op].name for op in cheap.chain_ops] == ["aten.neg.default", "aten.gelu.default"]
    wide = by_producer["aten.mm.default3"]
    assert [trace.ops[op].name for op in wide.chain_ops] == ["aten.mm.default"]


@settings(max_examples=40)
@given(blocks(), st.integers(0, 100))
def test_bounds_are_ordered(steps, percent):
    """A smaller budget costs no less, the MILP is no lower than the LP, and more moments are no lower than fewer."""
    trace = chain(steps, weight_bytes=4)
    least_bytes, most_bytes = least_peak_bound(trace), peak(trace).size_bytes
    budget_bytes = least_bytes + (most_bytes - least_bytes) * percent // 100
    every = len(trace.ops)
    relaxed = bound(trace, MACHINE, budget_bytes, num_moments=every)
    whole = bound(trace, MACHINE, budget_bytes, num_moments=every, integral=True)
    few = bound(trace, MACHINE, budget_bytes, num_moments=2)
    larger = bound(trace, MACHINE, budget_bytes + MIB, num_moments=every)
    tolerance_s = 1e-6 * relaxed.plain_time_s
    assert relaxed.time_s <= whole.time_s + tolerance_s
    assert few.time_s <= relaxed.time_s + tolerance_s
    assert larger.time_s <= relaxed.time_s + tolerance_s
    assert relaxed.time_s >= relaxed.plain_time_s


def test_tensors_that_are_whole_do_not_share_what_is_left():
    """Room for one and a half of equal tensors keeps one: halves are proved away, and another one has to leave."""
    trace = chain([(8 * MIB, 2e-3, 2e-4)] * 3)
    slow_link = msgspec.structs.replace(MACHINE, host_out_bytes_per_s=1e6, host_in_bytes_per_s=1e6)
    every = len(trace.ops)
    little_less = peak(trace).size_bytes - MIB
    relaxed = bound(trace, slow_link, little_less, num_moments=every)
    whole = bound(trace, slow_link, little_less, num_moments=every, integral=True)
    assert relaxed.time_s - relaxed.plain_time_s < 0.5 * (whole.time_s - whole.plain_time_s)


def test_the_same_trace_has_the_same_bound():
    """Nothing depends on the clock or on the order of a set."""
    trace = chain(EQUAL)
    budget_bytes = peak(trace).size_bytes // 2
    assert bound(trace, MACHINE, budget_bytes) == bound(trace, MACHINE, budget_bytes)


def test_moments_are_spread_over_the_time_above_the_budget():
    """The highest one is among them, and none is below the budget."""
    trace = chain(EQUAL)
    load = load_curve(trace)
    budget_bytes = max(load) // 2
    moments = choose_moments(trace, load, budget_bytes, 6)
    assert len(moments) == 6
    assert load.index(max(load)) in moments
    assert all(load[m] > budget_bytes for m in moments)
    assert list(moments) == sorted(moments)


@pytest.mark.rest
@settings(max_examples=25)
@given(blocks().filter(lambda steps: len(steps) <= 3), st.integers(0, 100), st.sampled_from([1e9, 1e10, 1e11]))
def test_no_combination_carried_out_by_hand_beats_the_bound(steps, percent, link_bytes_per_s):
    """Every combination of actions on a small step takes at least as long as the bound says, or does not fit."""
    trace = chain(steps, weight_bytes=4)
    machine = msgspec.structs.replace(
        MACHINE, host_out_bytes_per_s=link_bytes_per_s, host_in_bytes_per_s=link_bytes_per_s
    )
    least_bytes, most_bytes = least_peak_bound(trace), peak(trace).size_bytes
    budget_bytes = least_bytes + (most_bytes - least_bytes) * percent // 100
    every = len(trace.ops)
    proved = bound(trace, machine, budget_bytes, num_moments=every, integral=True, min_candidate_bytes=1)
    ids = [candidate.buffer_id for candidate in saved_candidates(trace)]
    for actions in product((None, "swap", "recompute"), repeat=len(ids)):
        chosen = {id_: action for id_, action in zip(ids, actions, strict=True) if action is not None}
        assert time_by_hand(trace, machine, chosen, budget_bytes) >= proved.time_s - 1e-6 * proved.plain_time_s
