"""The simulator against real steps, in what does not depend on a clock: bytes at the allocator, copies, replays."""

import gc

import pytest

from benchmarks.fidelity.contest import Contest
from torchdelta.errors import NativeError
from torchdelta.simulate import simulate


@pytest.fixture(scope="module")
def contest():
    """One round on the smallest model."""
    gc.collect()  # what other tests have left must not die in the middle of the trace
    try:
        contest = Contest("tiny", num_steps=1, batch_size=16)
    except NativeError as error:
        pytest.skip(str(error))
    contest.run(1)
    yield contest
    contest.copies.close()


@pytest.mark.rest
def test_the_simulated_plain_peak_is_the_allocators(contest):
    """What ops take inside themselves is in the trace, so nothing but a few numbers is missing."""
    # Tensors of other tests are in the trace, but not in the counter, which began with this model.
    touched = {buffer_id for op in contest.trace.ops for buffer_id in (*op.reads, *op.writes)}
    others_bytes = sum(buffer.size_bytes for buffer in contest.trace.buffers if buffer.id not in touched)
    peak_bytes = contest.problem.plain_peak_bytes - others_bytes
    assert peak_bytes == pytest.approx(contest.allocator_peak_bytes, rel=1e-3)


@pytest.mark.rest
def test_forced_decisions_move_and_repeat_what_is_simulated(contest):
    """The simulator replays as many ops as the runtime, and swaps what it swaps but for the batch."""
    for name, decisions in contest.decisions.items():
        simulation = simulate(contest.trace, contest.problem.machine, decisions)
        assert sum(len(replay.ops) for replay in simulation.plan.replays) == contest.work[name]["num_recomputed_ops"]
        batch_bytes = sum(b.size_bytes for b in contest.trace.buffers if b.kind in {"input", "constant"})
        swapped_bytes = contest.work[name]["swapped_out_bytes"]
        assert simulation.swapped_out_bytes <= swapped_bytes <= simulation.swapped_out_bytes + batch_bytes
    assert contest.work["checkpoint"]["num_recomputed_ops"] > 0
