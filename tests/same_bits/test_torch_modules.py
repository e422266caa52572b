"""Same bits on every module that torch ships samples for, in training and in evaluation mode."""

from __future__ import annotations

import pytest

from tests.following import judge_all_followed
from tests.same_bits.judge import DECISIONS, judge, plain_outcome
from tests.same_bits.op_database import module_calls, module_infos
from tests.sampling import sample

# The samples provoke torch's own warnings on purpose.
pytestmark = pytest.mark.filterwarnings("ignore")

NUM_CHUNKS = 8


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import the database before the collector is told to leave imports out."""
    module_infos()


def test_the_database_is_the_whole_one() -> None:
    """The promise speaks of every module; a filter that drops many must not pass unseen."""
    assert len(module_infos()) >= 100


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("chunk", sample(range(NUM_CHUNKS), 1, 3))
def test_every_module_leaves_the_same_bits(chunk: int, *, training: bool) -> None:
    """Outputs, gradients, buffers and generators of up to four samples of each module equal the plain run's."""
    found: dict[str, list[str]] = {}
    num_finished = 0
    for info in module_infos()[chunk::NUM_CHUNKS]:
        for index, step in enumerate(module_calls(info, training=training)):
            plain = plain_outcome(step)
            num_finished += plain.raised is None
            for kind, decisions in DECISIONS.items():
                differences = judge(step, decisions, plain)
                if differences:
                    found[f"{info.name}[{index}] {kind}"] = differences[:2]
    assert found == {}
    assert num_finished >= 20


@pytest.mark.parametrize("chunk", sample(range(NUM_CHUNKS), 1, 3))
def test_every_module_leaves_the_same_bits_when_a_plan_is_followed(chunk: int) -> None:
    """The same in training, in steps in which saved tensors leave and return by a program."""
    found, num_finished = judge_all_followed(
        (f"{info.name}[{index}]", step)
        for info in module_infos()[chunk::NUM_CHUNKS]
        for index, step in enumerate(module_calls(info, training=True))
    )
    assert found == {}
    assert num_finished >= 20
