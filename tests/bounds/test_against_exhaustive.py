"""No plan beats the bound: on random steps of every kind, against every combination of decisions."""

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.bounds.exhaustive import best_of_all, combinations
from tests.bounds.small_steps import crowded, small_steps
from tests.planners.chains import MACHINE, blocks, chain
from tests.planners.tangles import tangles
from tests.sampling import sample
from tests.trace.strategies import traces
from torchdelta.bounds.lp_bound import bound, least_peak_bound
from torchdelta.simulate.model import Options
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import peak
from torchdelta.trace.validate import validate

RELATIVE = 1e-6  # what a solver leaves open, and sums in another order
MOST_COMBINATIONS = 3**7
RATES = st.sampled_from([1e7, 3e8, 1e9, 4e9, 1e11])
STEPS = {
    "crowded": crowded(traces(max_ops=16)),
    "small": small_steps(),
    "tangled": tangles(),
    "chain": st.builds(chain, blocks().filter(lambda drawn: len(drawn) <= 3), skips=st.booleans(), stats=st.booleans()),
}


def machines():
    """Draw links of any rates, with or without a disk, and copies that take compute or none."""
    disk = st.sampled_from([0.0, 0.0, 1e8, 2e9])
    taken = st.sampled_from([0.0, 0.0, 1e-10, 1e-9, 1e-8])
    each_s = st.sampled_from([0.0, 0.0, 1e-4, 5e-3])
    return st.builds(
        lambda out, in_, write, read, latency_s, out_s, in_s, copy_s, replay_s: msgspec.structs.replace(
            MACHINE,
            host_out_bytes_per_s=out,
            host_in_bytes_per_s=in_,
            link_latency_s=latency_s,
            disk_write_bytes_per_s=write,
            disk_read_bytes_per_s=read if write else 0.0,
            out_compute_s_per_byte=out_s,
            in_compute_s_per_byte=in_s,
            copy_compute_s=copy_s,
            replay_compute_s=replay_s,
        ),
        RATES,
        RATES,
        disk,
        st.sampled_from([1e8, 4e9]),
        st.sampled_from([0.0, 1e-4]),
        *(taken, taken, each_s, each_s),
    )


def has_decisions(trace, machine):
    """Return whether there is more than one combination of decisions, and few enough to try all."""
    number, _ = combinations(
        PlanningProblem.of(trace, machine, min_size_bytes=1), disk=machine.disk_write_bytes_per_s > 0
    )
    return 1 < number <= MOST_COMBINATIONS


def check(trace, machine, percent, *, synchronous):
    """Compare every kind of bound with the best of all decisions."""
    validate(trace)
    least_bytes, most_bytes = least_peak_bound(trace), peak(trace, with_workspace=True).size_bytes
    budget_bytes = least_bytes + (most_bytes - least_bytes) * percent // 100
    disk, options = machine.disk_write_bytes_per_s > 0, Options(synchronous=synchronous)
    found = best_of_all(trace, machine, budget_bytes, disk=disk, at_most=MOST_COMBINATIONS, options=options)
    assert found is not None
    best_s, simulation = found
    every = len(trace.ops)
    for kind in (
        {},
        {"num_moments": every, "min_candidate_bytes": 1},
        {"num_moments": every, "min_candidate_bytes": 1, "integral": True},
    ):
        proved = bound(trace, machine, budget_bytes, **kind)
        assert proved.time_s <= best_s * (1 + RELATIVE), (kind, proved, simulation and simulation.plan)


@pytest.mark.parametrize("steps", sample(STEPS, 2))
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_combination_of_decisions_beats_the_bound(steps, data):
    """Neither the linear program nor that with whole tensors, at few moments or at all."""
    percent, synchronous = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([False, False, True]))
    trace, machine = data.draw(STEPS[steps]), data.draw(machines())
    assume(has_decisions(trace, machine))
    check(trace, machine, percent, synchronous=synchronous)


@pytest.mark.whole
@pytest.mark.parametrize("steps", STEPS)
@settings(max_examples=2750, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_combination_of_decisions_beats_the_bound_on_ten_thousand_steps(steps, data):
    """The same on so many more: 2,750 of each of four kinds."""
    percent, synchronous = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([False, False, True]))
    trace, machine = data.draw(STEPS[steps]), data.draw(machines())
    assume(has_decisions(trace, machine))
    check(trace, machine, percent, synchronous=synchronous)
