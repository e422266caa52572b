"""The planners of the literature do what their papers say."""

import msgspec
import pytest

from tests.planners.chains import MACHINE, MIB, chain
from torchdelta.errors import InfeasibleError
from torchdelta.planners import get, names
from torchdelta.planners.literature.checkpoint_rules import block_of, decisions
from torchdelta.planners.literature.delta_2022_released import PLAYED, recomputes
from torchdelta.planners.literature.ideal import LinkSlack
from torchdelta.simulate import simulate_plan
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import peak

EQUAL = [(8 * MIB, 2e-3, 2e-4)] * 8
FAST = msgspec.structs.replace(MACHINE, host_out_bytes_per_s=1e12, host_in_bytes_per_s=1e12)
SLOW = msgspec.structs.replace(MACHINE, host_out_bytes_per_s=1e6, host_in_bytes_per_s=1e6)
OTHERS = list(names())


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
    assert PLAYED.synchronous
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


@pytest.mark.parametrize("percent", [50, 40])
def test_the_knapsack_swaps_where_replays_take_too_much(percent):
    """Replays of wide ops need room that the knapsack does not see: the choice is repaired by swaps where they fit."""
    trace = chain(EQUAL)
    ops = tuple(
        msgspec.structs.replace(op, workspace_bytes=32 * MIB)
        if op.name == "aten.mm.default" and op.phase == "forward"
        else op
        for op in trace.ops
    )
    trace = msgspec.structs.replace(trace, ops=ops)
    plan = get("delta-2024")(trace, SLOW, share(trace, percent), "fast")
    assert actions(plan)["swap"] > 0
    assert actions(plan)["recompute"] > 0


def test_the_time_left_on_the_link_is_asked_at_a_gaps_own_moment():
    """A swap put on the link at one moment takes time at every other moment that its gap spans, and only there."""
    trace = chain(EQUAL)
    gaps = sorted(PlanningProblem.of(trace, SLOW).gaps, key=lambda gap: gap.last_use_op - gap.next_use_op)
    wide = gaps[0]
    narrow = next(gap for gap in gaps if wide.last_use_op < gap.last_use_op and gap.next_use_op < wide.next_use_op)
    early, late = wide.last_use_op + 1, narrow.last_use_op + 1
    slack = LinkSlack(trace, SLOW, early)
    alone_s = slack.at(late).stall_s(narrow)
    with pytest.raises(AssertionError):
        slack.stall_s(narrow)
    slack.book(wide)
    assert slack.at(late).stall_s(narrow) >= alone_s
    assert slack.at(late).stall_s(wide) > LinkSlack(trace, SLOW, late).stall_s(wide) - 1e-9
    assert not LinkSlack(trace, SLOW, early).spans(narrow)


def test_blocks_are_read_off_module_paths():
    """The first number in a path is a block's place in its list."""
    assert block_of("transformer.h.11.attn.c_proj") == "transformer.h.11"
    assert block_of("network.4.conv1") == "network.4"
    assert block_of("lm_head") == ""
    assert block_of("") == ""


def test_checkpointing_keeps_what_a_segment_hands_on():
    """The tensor between two blocks stays; what was saved inside of one is recomputed."""
    trace = chain(EQUAL)
    problem = PlanningProblem.of(trace, MACHINE)
    codes = next(decisions(problem))  # every block by itself
    gone = {
        trace.ops[trace.buffers[gap.buffer_id].birth_op].name
        for gap, code in zip(problem.gaps, codes, strict=True)
        if code
    }
    assert gone == {"aten.mm.default"}


def test_checkpointing_takes_the_rule_that_is_fastest():
    """No rule that fits is faster than the planner's plan; with room for it, not all blocks are checkpointed."""
    trace = chain(EQUAL)
    problem = PlanningProblem.of(trace, MACHINE)
    every_block = problem.score(next(decisions(problem)), share(trace, 100))
    for percent in (95, 85, 75):
        budget_bytes = share(trace, percent)
        scores = [problem.score(codes, budget_bytes) for codes in decisions(problem)]
        plan = get("checkpoint")(trace, MACHINE, budget_bytes, "fast")
        fastest_s = min(score.time_s for score in scores if score.is_feasible)
        assert simulate_plan(trace, MACHINE, plan).score.time_s == pytest.approx(fastest_s)
        assert actions(plan)["swap"] == 0
        assert fastest_s < every_block.time_s


def test_a_memory_budget_keeps_what_saves_the_most_time():
    """The last rules are knapsacks: with no share nothing expensive is kept, and more of it with each larger share."""
    trace = chain([(8 * MIB, 1e-3 * place, 2e-4) for place in range(1, 9)])
    ops = tuple(msgspec.structs.replace(op, flops=int(op.name == "aten.mm.default")) for op in trace.ops)
    problem = PlanningProblem.of(msgspec.structs.replace(trace, ops=ops), MACHINE)
    products = {id_ for op in problem.trace.ops if op.flops for id_ in op.writes}
    kept_bytes = [
        sum(
            gap.size_bytes
            for gap, code in zip(problem.gaps, codes, strict=True)
            if gap.buffer_id in products and not code
        )
        for codes in list(decisions(problem))[-20:]
    ]
    assert kept_bytes[0] == min(kept_bytes)
    assert kept_bytes[-1] > kept_bytes[10] > kept_bytes[0]


def test_an_impossible_budget_names_the_least_that_was_found():
    """One line, with a budget at which the planner does find a plan."""
    trace = chain(EQUAL)
    with pytest.raises(InfeasibleError) as caught:
        get("swap-all")(trace, MACHINE, 1, "fast")
    least_bytes = caught.value.least_budget_bytes
    assert str(least_bytes) in str(caught.value)
    assert get("swap-all")(trace, MACHINE, least_bytes, "fast").absences
