"""A step with a valid plan to be broken."""

import pytest

from tests.planners.chains import MACHINE, MIB, chain
from torchdelta.simulate import Decision, simulate
from torchdelta.trace.model import peak


@pytest.fixture(scope="module")
def step():
    """A step of six blocks."""
    return chain([(8 * MIB, 8e-3, 2e-3)] * 6)


@pytest.fixture(scope="module")
def plan(step):
    """A plan that swaps two tensors of it and recomputes two others, with a replay of two ops."""
    made = {trace_op.writes[0]: trace_op.name for trace_op in step.ops if trace_op.phase == "forward"}
    wide = [id_ for id_, name in made.items() if name == "aten.mm.default"]
    cheap = [id_ for id_, name in made.items() if name == "aten.gelu.default"]
    decisions = [Decision(buffer_id=id_, action="swap") for id_ in wide[:2]]
    decisions += [Decision(buffer_id=id_, action="recompute") for id_ in cheap[1:3]]
    return simulate(step, MACHINE, decisions, budget_bytes=peak(step).size_bytes).plan
