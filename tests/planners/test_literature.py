"""The planners of the literature do what their papers say."""

import msgspec
import pytest

from tests.planners.chains import MACHINE, MIB, chain
from torchdelta.errors import InfeasibleError
from torchdelta.planners import get, names
from torchdelta.planners.checkpoint import block_of
from torchdelta.planners.delta_2022_released import OPTIONS, recomputes
from torchdelta.trace.model import peak

EQUAL = [(8 * MIB, 2e-3, 2e-4)] * 8
FAST = msgspec.structs.replace(MACHINE, host_out_bytes_per_s=1e12, host_in_bytes_per_s=1e12)
SLOW = msgspec.structs.replace(MACHINE, host_out_bytes_per_s=1e6, host_in_bytes_per_s=1e6)
OTHERS = [name for name in names() if name != "exact"]


def share(trace, percent):
    """A share of the plain peak in bytes."""
    return peak(trace, with_workspace=True).size_bytes * percent // 100


def actions(plan):
    """How often a plan uses each action."""
    kinds = [absence.action for absence in plan.absences]
    return {kind: kinds.count(kind) for kind in ("swap", "recompute")}


def test_a_step_that_fits_is_left_alone():
    """Nobody but swap-all and checkpoint, which do not ask, acts without need."""
    trace = chain(EQUAL)
    for name in OTHERS:
        plan = get(name)(trace, MACHINE, share(trace, 100), "fast")
        if name not in {"swap-all", "checkpoint"}:
            assert plan.absences == (), name


def test_checkpointing_that_needs_more_than_plain_is_not_done():
    """What a wide op takes inside itself is met again in its replay, when more is alive: keeping everything fits."""
    trace = chain(EQUAL[:2])
    wide = [msgspec.structs.replace(op, workspace_bytes=256 * MIB) for op in trace.ops if op.name == "aten.mm.default"]
    forward = [op for op in wide if op.phase == "forward"]
    ops = {op.index: op for op in (*trace.ops, *forward)}
    trace = msgspec.structs.replace(trace, ops=tuple(ops[index] for index in range(len(ops))))
    assert get("checkpoint")(trace, MACHINE, share(trace, 100), "fast").absences == ()


def test_the_director_weighs_both_copies_against_the_op():
    """As described: where the link is fast everything is swapped, where it is slow everything is recomputed."""
    trace = chain(EQUAL)
    fast = actions(get("delta-2022")(trace, FAST, share(trace, 60), "fast"))
    slow = actions(get("delta-2022")(trace, SLOW, share(trace, 60), "fast"))
    assert fast["swap"]
    assert not fast["recompute"]
    assert slow["recompute"]
    assert not slow["swap"]


def test_the_released_director_compares_microseconds_with_nanoseconds():
    """100 MiB made in 1 ms: the ratio is 0.017 and not 17, so it is swapped; only far cheaper ops are recomputed."""
    assert not recomputes(100 * MIB, 1e-3)
    assert recomputes(100 * MIB, 1e-5)
    assert OPTIONS.synchronous
    assert not OPTIONS.prefetch
    trace = chain(EQUAL)
    assert actions(get("delta-2022-released")(trace, SLOW, share(trace, 60), "fast"))["recompute"] == 0


def test_dtr_recomputes_only_and_autoswap_swaps_only():
    """The two one-sided families stay on their side."""
    trace = chain(EQUAL)
    assert actions(get("dtr")(trace, MACHINE, share(trace, 60), "fast"))["swap"] == 0
    for name in OTHERS:
        if name.startswith("autoswap-"):
            assert actions(get(name)(trace, FAST, share(trace, 70), "fast"))["recompute"] == 0


def test_the_knapsack_prefers_a_hidden_swap_and_else_the_cheaper_action():
    """With a link that carries everything for nothing no op runs again; without one nothing is swapped."""
    trace = chain(EQUAL)
    assert actions(get("delta-2024")(trace, FAST, share(trace, 60), "fast"))["recompute"] == 0
    assert actions(get("delta-2024")(trace, SLOW, share(trace, 60), "fast"))["swap"] == 0


def test_blocks_are_read_off_module_paths():
    """The first number in a path is a block's place in its list."""
    assert block_of("transformer.h.11.attn.c_proj") == "transformer.h.11"
    assert block_of("network.4.conv1") == "network.4"
    assert block_of("lm_head") == ""
    assert block_of("") == ""


def test_checkpointing_keeps_what_a_segment_hands_on():
    """The tensor between two blocks stays; what was saved inside of one is recomputed."""
    trace = chain(EQUAL)
    plan = get("checkpoint")(trace, MACHINE, share(trace, 75), "fast")
    gone = {trace.ops[trace.buffers[absence.buffer_id].birth_op].name for absence in plan.absences}
    assert gone == {"aten.mm.default"}
    assert actions(plan)["swap"] == 0


def test_an_impossible_budget_names_the_least_that_was_found():
    """One line, with a budget at which the planner does find a plan."""
    trace = chain(EQUAL)
    with pytest.raises(InfeasibleError) as caught:
        get("swap-all")(trace, MACHINE, 1, "fast")
    least_bytes = caught.value.least_budget_bytes
    assert str(least_bytes) in str(caught.value)
    assert get("swap-all")(trace, MACHINE, least_bytes, "fast").absences
