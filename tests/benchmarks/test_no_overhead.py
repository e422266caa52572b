"""AutoSwap without waiting: its schedule is a plan, in a steady state."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.no_overhead import gaps_of_variables, no_overhead, reduction
from tests.planners.chains import MACHINE, MIB, blocks, chain
from torchdelta.plan.validate import validate
from torchdelta.planners.literature.autoswap import SCORES
from torchdelta.simulate.gaps import Gap
from torchdelta.trace.model import BEFORE_STEP, Buffer, Header, Op, Trace, peak


@settings(max_examples=20)
@given(blocks(), st.sampled_from(SCORES))
def test_the_schedule_without_waiting_is_a_plan_of_its_own_peak(steps, score):
    """The validator accepts it for the peak that it claims, which is never above the plain one."""
    trace = chain(steps)
    found = reduction(trace, MACHINE, score)
    assert found.peak_bytes <= found.plain_peak_bytes == peak(trace, with_workspace=True).size_bytes
    assert 0.0 <= found.reduction < 1.0
    validate(trace, found.plan)


def test_copies_follow_each_other_and_end_in_time():
    """One tensor of 4 MiB over a gap of 20 ms at 1 GB/s is away in the middle of it, not at its ends."""
    trace = chain([(4 * MIB, 4e-3, 1e-4)] * 6)
    (first,) = [gap for gap in gaps_of_variables(trace, min_size_bytes=MIB) if gap.last_use_op == 1]
    (absence,) = no_overhead(trace, MACHINE, (first,)).plan.absences
    copy_s = 4 * MIB / 1e9
    times_s = np.concatenate(([0.0], np.cumsum([op.time_s for op in trace.ops])))
    assert times_s[absence.leave_op] >= times_s[first.last_use_op + 1] + copy_s
    assert times_s[absence.return_op + 1] >= times_s[first.next_use_op] - copy_s >= times_s[absence.return_op]
    assert no_overhead(trace, MACHINE, (first,)).peak_bytes <= no_overhead(trace, MACHINE, ()).peak_bytes


def test_a_momentum_is_one_variable_over_the_end_of_the_step():
    """What every step overwrites in its optimizer is idle from there to the optimizer of the next one."""
    trace = Trace(
        header=Header(torch_version="2.13.0", device="cpu", created_by="tests"),
        buffers=(
            Buffer(id=0, storage_id=0, size_bytes=MIB, kind="optimizer_state", birth_op=BEFORE_STEP, death_op=3),
            Buffer(id=1, storage_id=0, size_bytes=MIB, kind="optimizer_state", birth_op=3, death_op=4),
        ),
        ops=(
            *(Op(index=i, name="aten.neg.default", phase="forward", time_s=1.0) for i in range(3)),
            Op(index=3, name="aten.add_.Tensor", phase="optimizer", reads=(0,), writes=(1,), time_s=1.0),
        ),
    )
    (gap,) = gaps_of_variables(trace, min_size_bytes=1)
    assert gap == Gap(
        buffer_id=1,
        size_bytes=MIB,
        last_use_op=3,
        next_use_op=4 + 3,
        can_recompute=False,
        can_recompute_at_use=False,
    )
    (absence,) = no_overhead(trace, MACHINE, (gap,)).plan.absences
    assert (absence.leave_op, absence.return_op) == (5, 6)


def test_every_score_has_a_name():
    """The four of the paper's table."""
    assert SCORES == ("doa", "aoa", "wdoa", "swdoa")
    with pytest.raises(KeyError):
        reduction(chain([(8 * MIB, 2e-3, 2e-4)] * 3), MACHINE, "nonsense")
