"""Least budgets and largest batches: found to the precision that is promised, and no batch is planned twice."""

import math

from tests.planners.chains import MACHINE, MIB, chain
from torchdelta.bounds.lp_bound import least_peak_bound
from torchdelta.plan.validate import validate
from torchdelta.planners import get
from torchdelta.planners.fitting import BatchSearch, least_budget
from torchdelta.trace.model import Buffer, Header, Op, Trace, peak


def test_the_least_budget_is_between_the_bound_and_the_plain_peak():
    """swap-all needs no less than the proved bound; at what is found it has a plan."""
    trace = chain([(8 * MIB, 2e-3, 2e-4)] * 8)
    found = least_budget(trace, MACHINE, get("swap-all"))
    assert least_peak_bound(trace) == found.lower_bound_bytes <= found.budget_bytes <= peak(trace).size_bytes
    assert found.plan.header.budget_bytes == found.budget_bytes
    assert get("swap-all")(trace, MACHINE, found.budget_bytes, "fast") == found.plan


def test_keep_needs_the_plain_peak():
    """Who does nothing has no smaller budget."""
    trace = chain([(8 * MIB, 2e-3, 2e-4)] * 8)
    plain_bytes = peak(trace, with_workspace=True).size_bytes
    assert plain_bytes * 0.997 <= least_budget(trace, MACHINE, get("keep")).budget_bytes <= plain_bytes


def test_a_larger_class_is_looked_at_below_the_bound_of_a_smaller_one():
    """The proved bound is of the class saved; what nobody saved idles over the peak and may leave in extended."""
    uses = {0: (0, 4), 1: (1, 3), 2: (2, 3)}  # when each buffer is written, and then read
    trace = Trace(
        header=Header(torch_version="2.13.0", device="cpu", created_by="tests"),
        buffers=tuple(
            Buffer(
                id=id_,
                storage_id=id_,
                size_bytes=8 * MIB,
                kind="temporary",
                birth_op=born,
                death_op=read + 1,
                saved=False,
            )
            for id_, (born, read) in uses.items()
        ),
        ops=tuple(
            Op(
                index=index,
                name="aten.mm.default",
                phase="forward",
                reads=tuple(id_ for id_, (_, read) in uses.items() if read == index),
                writes=tuple(id_ for id_, (born, _) in uses.items() if born == index),
                time_s=1e-3,
            )
            for index in range(5)
        ),
        saved_tensors=(),
    )
    found = least_budget(trace, MACHINE, get("torchdelta", "extended"))
    assert found.lower_bound_bytes == 24 * MIB
    assert found.budget_bytes <= 16.1 * MIB
    validate(trace, found.plan, MACHINE)


def test_the_largest_batch_is_found_for_each_limit():
    """A price a sample that grows with the batch until nothing fits: each limit has its own largest batch."""
    asked = []

    def sample_time_s(size):
        asked.append(size)
        return math.inf if size > 100 else 1 + size / 100

    search = BatchSearch(sample_time_s)
    assert search.largest(1.5).size == 50
    assert search.largest(1.25, first=3).size == 25
    assert search.largest(math.inf).size == 100
    assert search.largest(1.0) is None
    assert len(asked) == len(set(asked))


def test_small_samples_by_the_billion():
    """A batch is not called the largest for being where the search gave up; nor where it was never tried."""
    limit = 3 * 10**9
    tried = []

    def sample_time_s(size: int) -> float:
        tried.append(size)
        return 1e-9 if size <= limit else math.inf

    found = BatchSearch(sample_time_s).largest(math.inf)
    assert found is not None
    assert limit * 0.995 <= found.size <= limit
    everything = BatchSearch(lambda _: 1e-9).largest(math.inf, first=2**41)
    assert everything is not None
    assert everything.size == 2**41
