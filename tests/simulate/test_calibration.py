"""The simulator against the figures of the planner findings: GPT2-Large on an A100, as it is on CUDA.

Their table of models is that of traces for the CPU (`tests/trace/symbolic/test_zoo.py`), their overheads are those of a
trace whose dropout masks are corrected for the device: a bool where the CPU saves a float32.
"""

import functools

import pytest
from msgspec import structs

from benchmarks import models
from torchdelta.machine.catalog import find
from torchdelta.machine.roofline import price
from torchdelta.planners import get
from torchdelta.planners.literature.checkpoint_rules import decisions
from torchdelta.simulate import simulate_plan
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import peak
from torchdelta.trace.symbolic import trace_step

pytestmark = pytest.mark.rest  # tracing it takes six seconds

# The profile that the prototype simulated: all kernels alike, both directions of the link at full rate.
MACHINE = structs.replace(
    find("a100-80g"),
    kernels="",
    flops_per_s={"float32": 19.5e12 * 0.7, "tf32": 78e12, "bfloat16": 156e12, "float16": 156e12},
    memory_bytes_per_s=1.6e12,
    host_out_bytes_per_s=25e9,
    host_in_bytes_per_s=25e9,
    both_ways_factor=1.0,
)
SWAP_ALL, PER_BLOCK = 6.46, 0.374  # overheads that the findings print


@functools.cache
def traced():
    """The step at the batch size of the findings."""
    return trace_step(models.gpt2_large, batch_size=2, optimizer="none")


def overhead(name, step):
    """Return the overhead of a planner's plan at half of the plain peak, or of checkpointing every block."""
    if name == "every block":
        problem = PlanningProblem.of(step, MACHINE)
        return problem.score(next(decisions(problem)), 2**62).time_s / problem.plain_time_s - 1
    budget_bytes = peak(step, with_workspace=True).size_bytes // 2
    return simulate_plan(step, MACHINE, get(name)(step, MACHINE, budget_bytes, "fast")).overhead


@pytest.mark.parametrize(("name", "printed"), [("swap-all", SWAP_ALL), ("every block", PER_BLOCK)])
def test_overheads_of_the_default_trace(name, printed):
    """Within 1 %: what is moved is priced by the views that an op is given."""
    assert overhead(name, price(traced(), MACHINE)) == pytest.approx(printed, rel=0.01)


@pytest.mark.parametrize(("name", "printed"), [("swap-all", SWAP_ALL), ("every block", PER_BLOCK)])
def test_overheads_at_the_prototypes_prices(name, printed):
    """To the last printed digit, where an op moves its whole buffers, as the prototype counted."""
    ops = tuple(structs.replace(op, moved_bytes=0) for op in traced().ops)
    step = price(structs.replace(traced(), ops=ops), MACHINE)
    assert round(100 * overhead(name, step), 1) == pytest.approx(100 * printed, abs=0.25)
