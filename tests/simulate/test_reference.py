"""The compiled simulator equals the slow one."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planners.chains import MACHINE, blocks, chain
from tests.simulate.reference import Reference
from tests.trace.strategies import traces
from torchdelta.simulate.model import Code, Options
from torchdelta.simulate.problem import PlanningProblem

DISKY = msgspec.structs.replace(MACHINE, disk_write_bytes_per_s=3e8, disk_read_bytes_per_s=5e8, disk_latency_s=1e-4)


@settings(max_examples=100, deadline=None)
@given(
    st.data(),
    blocks() | st.none(),
    st.sampled_from(["saved", "extended", "all"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1.0, 0.8, 0.5, 0.3]),
    st.sampled_from([0.0, 4e-10]),
)
def test_both_simulators_agree(data, drawn, decision_class, prefetch, synchronous, both_ways, taken_s_per_byte):
    """Under any decisions and budget: the same bytes at each op, the same time, the same stalls."""
    is_all = decision_class == "all"
    trace = data.draw(traces(lasting=is_all)) if drawn is None else chain(drawn, optimizer=is_all)
    options = Options(prefetch=prefetch, synchronous=synchronous)
    machine = msgspec.structs.replace(
        DISKY,
        both_ways_factor=both_ways,
        out_compute_s_per_byte=taken_s_per_byte,
        in_compute_s_per_byte=taken_s_per_byte / 2,
        copy_compute_s=taken_s_per_byte * 1e5,
        replay_compute_s=taken_s_per_byte * 2e5,
    )
    problem = PlanningProblem.of(trace, machine, decision_class=decision_class, min_size_bytes=1, options=options)
    codes = np.array(data.draw(st.lists(st.integers(0, 4), min_size=len(problem.gaps), max_size=len(problem.gaps))))
    codes = np.array(
        [
            code if code < Code.RECOMPUTE or gap.can_recompute else code % Code.RECOMPUTE
            for code, gap in zip(codes, problem.gaps, strict=True)
        ],
        np.int8,
    )
    budget_bytes = data.draw(st.integers(0, max(problem.plain_peak_bytes, 1)))
    score = problem.score(codes, budget_bytes)
    totals = problem.work.total.tolist()
    slow = Reference(problem, codes, budget_bytes)
    assert score.time_s == pytest.approx(slow.time_s)
    if slow.is_possible:
        assert totals == slow.totals
        assert score.stall_s == pytest.approx(slow.stall_s, rel=1e-9, abs=1e-9)
        assert score.recompute_s == pytest.approx(sum(slow.replay_s.values()))
