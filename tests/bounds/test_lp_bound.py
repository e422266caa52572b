"""The bound: right where the answer is known by hand, ordered as bounds must be, and the same every time."""

import math
from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bounds.by_hand import time_by_hand
from tests.planners.chains import MACHINE, MIB, blocks, chain
from torchdelta.bounds.lp_bound import bound, choose_moments, least_peak_bound
from torchdelta.bounds.saved_class import saved_candidates
from torchdelta.trace.model import load_curve, peak

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
