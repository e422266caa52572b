"""The planners of the literature do what their papers say."""

import msgspec
import numpy as np
import pytest

from tests.planners.chains import MACHINE, MIB, chain
from torchdelta.errors import InfeasibleError
from torchdelta.planners import get, names
from torchdelta.planners.literature.autoswap import Candidates
from torchdelta.planners.literature.checkpoint_rules import block_of, decisions
from torchdelta.planners.literature.delta_2022_released import PLAYED, recomputes
from torchdelta.planners.literature.ideal import LinkSlack
from torchdelta.simulate import simulate_plan
from torchdelta.simulate.gaps import Gap
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import BEFORE_STEP, Buffer, Header, Op, SavedTensor, Trace, peak

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


def from_a_batch_that_dies():
    """A step whose only saved buffer is made from a batch that is gone when it is used again, as in `x = x / 255`."""
    buffers = [(8, "input", BEFORE_STEP, 1), (8, "activation", 0, 5), (8, "activation", 1, 3), (8, "activation", 2, 4)]
    buffers += [(1, "temporary", 3, 5), (1, "temporary", 4, 5)]
    ops = [("forward", (0,), 1e-6), ("forward", (1,), 1e-3), ("forward", (2,), 1e-3)]
    ops += [("backward", (3,), 1e-3), ("backward", (4, 1), 1e-3)]
    return Trace(
        header=Header(torch_version="2.13.0", device="cpu", created_by="tests"),
        buffers=tuple(
            Buffer(
                id=id_,
                storage_id=id_,
                size_bytes=size * MIB,
                kind=kind,
                birth_op=birth,
                death_op=death,
                saved=id_ == 1,
            )
            for id_, (size, kind, birth, death) in enumerate(buffers)
        ),
        ops=tuple(
            Op(
                index=index,
                name="aten.mul.Tensor",
                phase=phase,
                reads=reads,
                writes=(index + 1,),
                time_s=time_s,
                recomputable=phase == "forward",
            )
            for index, (phase, reads, time_s) in enumerate(ops)
        ),
        saved_tensors=(SavedTensor(op=1, buffer_id=1, shape=(1,), stride=(1,), offset=0, dtype="float32"),),
    )


@pytest.mark.parametrize("name", ["swap-all", "torchdelta", "capuchin", "mu-two", "delta-2024"])
def test_what_cannot_be_made_again_is_swapped(name):
    """However cheap the op was that made it."""
    plan = get(name)(from_a_batch_that_dies(), FAST, 17 * MIB, "fast")
    assert actions(plan) == {"swap": 1, "recompute": 0}


def blocks_dropped(codes, problem):
    """Return the places of the blocks in which something is recomputed."""
    modules = [problem.trace.ops[problem.trace.buffers[gap.buffer_id].birth_op].module for gap in problem.gaps]
    return {int(module.split(".")[1]) for module, code in zip(modules, codes, strict=True) if code == Code.RECOMPUTE}


def test_checkpointing_tries_the_rules_of_torch_and_torchtitan():
    """Of so many segments, `checkpoint_sequential` keeps the last; torchtitan counts layers from 1."""
    problem = PlanningProblem.of(chain(EQUAL), MACHINE)
    tried = [blocks_dropped(codes, problem) for codes in decisions(problem)]
    assert set(range(6)) in tried  # three segments of two blocks, the rest is in the last one
    assert {1, 3, 5, 7} in tried
    assert {2, 5} in tried


def test_the_least_budget_that_swapping_all_names_holds():
    """Small buffers that leave within the refused budget have no choice within the one that is named."""
    trace = chain([(20 * 1024, 2e-3, 1e-4)] * 20, weight_bytes=1024)
    constant = Buffer(
        id=len(trace.buffers),
        storage_id=len(trace.buffers),
        size_bytes=100 * MIB,
        kind="constant",
        birth_op=BEFORE_STEP,
        death_op=len(trace.ops),
    )
    trace = msgspec.structs.replace(trace, buffers=(*trace.buffers, constant))
    with pytest.raises(InfeasibleError) as refused:
        get("swap-all")(trace, MACHINE, MIB)
    least_bytes = refused.value.least_budget_bytes
    assert least_bytes is not None
    assert get("swap-all")(trace, MACHINE, least_bytes).header.budget_bytes == least_bytes


def test_a_pick_over_the_end_lowers_the_load_of_the_next_step():
    """AutoSwap's submodular score: by hand, on three gaps of which the first one reaches into the next step."""
    workspaces = {1: MIB // 2, 2: MIB}
    ops = tuple(
        Op(index=index, name="a", phase="forward", time_s=1e-3, workspace_bytes=workspaces.get(index, 0))
        for index in range(10)
    )
    parameter = Buffer(id=0, storage_id=0, size_bytes=20 * MIB, kind="parameter", birth_op=BEFORE_STEP, death_op=10)
    header = Header(torch_version="2.13.0", device="cpu", created_by="tests")
    gaps = tuple(
        Gap(
            buffer_id=0,
            size_bytes=4 * MIB,
            last_use_op=last,
            next_use_op=following,
            can_recompute=False,
            can_recompute_at_use=False,
        )
        for last, following in ((8, 13), (0, 3), (1, 4))
    )
    scores = Candidates(Trace(header=header, buffers=(parameter,), ops=ops), MACHINE, gaps).scores(MIB)
    # Afterwards 41.5 - 8 MiB of load are left over ops 1 and 2, and 41 - 4 over ops 2 and 3.
    assert np.argsort(-scores["swdoa"]).tolist() == [0, 2, 1]
