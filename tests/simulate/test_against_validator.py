"""The independent validator agrees with the simulator to the byte."""

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planners.chains import MACHINE, MIB, blocks, chain
from tests.trace.strategies import traces
from torchdelta.plan.validate import find_fault
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import Problem
from torchdelta.trace.model import Buffer, Header, Op, SavedTensor, Trace

STEP = chain([(8 * MIB, 2e-3, 1e-4), (4 * MIB, 8e-3, 5e-4)] * 3)
DISKY = msgspec.structs.replace(MACHINE, disk_write_bytes_per_s=3e8, disk_read_bytes_per_s=5e8)


def some_codes(draw, problem):
    """Draw any codes that the class knows, whatever they do to the budget."""
    codes = problem.keep_all()
    for index, gap in enumerate(problem.gaps):
        allowed = [Code.KEEP, Code.SWAP, Code.DISK]
        if gap.can_recompute:
            allowed += [Code.RECOMPUTE] if problem.decision_class == "saved" else [Code.RECOMPUTE, Code.AGAIN]
        codes[index] = draw(st.sampled_from(allowed))
    return codes


@settings(max_examples=60, deadline=None)
@given(st.data(), blocks() | st.none(), st.sampled_from(["saved", "extended"]))
def test_what_the_simulator_says_of_memory_is_so(data, drawn, decision_class):
    """Under any decisions the plan is in order, and it holds a budget exactly if the simulator says so."""
    trace = data.draw(traces()) if drawn is None else chain(drawn)
    problem = Problem.of(trace, DISKY, decision_class=decision_class, min_size_bytes=1)
    codes = some_codes(data.draw, problem)
    budget_bytes = data.draw(st.integers(0, max(problem.plain_peak_bytes, 1)))
    found = problem.simulation(codes, budget_bytes)
    if found.time_s == float("inf"):
        return
    fault = find_fault(trace, found.plan)
    if found.score.is_feasible:
        assert fault is None
    else:
        assert fault is not None
    # At exactly the peak that it tells the plan fits, and at one byte less it does not.
    header = found.plan.header
    tight = msgspec.structs.replace(header, budget_bytes=found.peak.size_bytes)
    assert find_fault(trace, msgspec.structs.replace(found.plan, header=tight)) is None
    less = msgspec.structs.replace(header, budget_bytes=found.peak.size_bytes - 1)
    assert find_fault(trace, msgspec.structs.replace(found.plan, header=less)) is not None


def test_a_replay_finds_what_the_op_after_it_writes_over():
    """A version that an op overwrites without reading it is there until that op runs, for both."""

    def op(index, phase, reads, writes):
        return Op(index=index, name="aten.mm.default", phase=phase, reads=reads, writes=writes, recomputable=True)

    def buffer(id_, storage_id, birth_op, death_op):
        return Buffer(
            id=id_,
            storage_id=storage_id,
            size_bytes=MIB,
            kind="activation",
            birth_op=birth_op,
            death_op=death_op,
            saved=id_ == 1,
        )

    trace = Trace(
        header=Header(torch_version="2.13.0", device="cpu", created_by="tests"),
        buffers=(buffer(0, 0, 0, 3), buffer(1, 1, 1, 4), buffer(2, 0, 3, 4)),
        ops=(
            op(0, "forward", (), (0,)),
            op(1, "forward", (0,), (1,)),
            op(2, "forward", (), ()),
            op(3, "backward", (1,), (2,)),
        ),
        saved_tensors=(SavedTensor(op=1, buffer_id=1, shape=(1,), stride=(1,), offset=0, dtype="float32"),),
    )
    problem = Problem.of(trace, MACHINE)
    found = problem.simulation(np.array([Code.RECOMPUTE], np.int8), 2 * MIB)
    assert found.score.is_feasible
    assert find_fault(trace, found.plan) is None


def test_a_buffer_that_is_wanted_back_before_it_has_left_counts_once():
    """Its copy out ends before its copy in begins, so it is never there twice."""
    trace = chain([(MIB, 1e-4, 1e-4)] * 2)
    problem = Problem.of(trace, DISKY, min_size_bytes=1)
    codes = problem.keep_all()
    codes[[1, 3]] = Code.SWAP
    found = problem.simulation(codes, problem.plain_peak_bytes)
    less = msgspec.structs.replace(found.plan.header, budget_bytes=found.peak.size_bytes - 1)
    assert find_fault(trace, msgspec.structs.replace(found.plan, header=less)) is not None


def test_a_host_that_is_too_small_is_named():
    """The limits of the tiers are checked like the device's, by the simulator and by the validator."""
    problem = Problem.of(STEP, MACHINE)
    codes = np.full(len(problem.gaps), Code.SWAP, np.int8)
    found = problem.simulation(codes, problem.plain_peak_bytes)
    assert (
        find_fault(STEP, found.plan, msgspec.structs.replace(MACHINE, host_memory_bytes=found.host_peak_bytes)) is None
    )
    small = msgspec.structs.replace(MACHINE, host_memory_bytes=found.host_peak_bytes - 1)
    assert "the host would hold" in (find_fault(STEP, found.plan, small) or "")
    assert Problem.of(STEP, small).score(codes, problem.plain_peak_bytes).host_excess_bytes == 1
    codes[0] = Code.DISK
    found = Problem.of(STEP, DISKY).simulation(codes, problem.plain_peak_bytes)
    assert found.disk_written_bytes == found.disk_read_bytes == problem.gaps[0].size_bytes
    assert "has none" in (find_fault(STEP, found.plan, MACHINE) or "")
