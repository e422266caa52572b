"""Small training steps made by hand: the shape of a network, without a network."""

from hypothesis import strategies as st

from torchdelta.machine.model import Machine
from torchdelta.trace.model import BEFORE_STEP, Buffer, Header, Op, SavedTensor, Trace

MIB = 2**20

MACHINE = Machine(
    name="test",
    memory_bytes=2**40,
    flops_per_s={"float32": 1e12},
    memory_bytes_per_s=1e12,
    host_out_bytes_per_s=1e9,
    host_in_bytes_per_s=1e9,
)

SEARCHES = """
from tests.planners.chains import MACHINE, MIB, chain
from torchdelta.planners.default.search_planner import choose
from torchdelta.planners.problem_within import least_peak
from torchdelta.simulate.problem import PlanningProblem

step = chain([(8 * MIB, 2e-3, 1e-4), (4 * MIB, 8e-3, 5e-4)] * 3, optimizer=True)
for decision_class in ("saved", "all"):
    problem = PlanningProblem.of(step, MACHINE, decision_class=decision_class)
    for effort in ("fast", "best"):
        choose(problem, int(1.1 * least_peak(problem)), effort)
"""
"""A program that calls, and so compiles, all compiled code of the planners."""


def chain(blocks, *, weight_bytes=MIB, optimizer=False, skips=False, stats=False):
    """Return a step of blocks in a row: each a wide op whose output is saved, a cheap one, and one whose output dies.

    Args:
        blocks: One `(size_bytes, wide_s, cheap_s)` a block.
        weight_bytes: Bytes of each block's parameter.
        optimizer: Whether momentum and parameter of each block are then written over, one block after the other.
        skips: Whether a block's output is made from that of the block before, too.
        stats: Whether backward begins by reading four bytes that were made from each wide output.
    """
    ops, drafts, saved = [], [], []

    def buffer(size_bytes, kind, birth):
        id_ = len(drafts)
        drafts.append(
            {"id": id_, "storage_id": id_, "size_bytes": size_bytes, "kind": kind, "birth_op": birth, "death_op": None}
        )
        return id_

    def overwrite(name, reads, id_):
        (new,) = run(name, "optimizer", "", reads, (weight_bytes,), 1e-4, drafts[id_]["kind"])
        drafts[new]["storage_id"] = id_
        drafts[id_]["death_op"] = drafts[new]["birth_op"]
        return new

    def run(name, phase, module, reads, sizes, time_s, kind="temporary"):
        index = len(ops)
        writes = tuple(buffer(size, kind, index) for size in sizes)
        ops.append(
            Op(
                index=index,
                name=name,
                phase=phase,
                module=module,
                reads=tuple(dict.fromkeys(reads)),
                writes=writes,
                time_s=time_s,
                recomputable=phase == "forward",
            )
        )
        return writes

    weights = [buffer(weight_bytes, "parameter", BEFORE_STEP) for _ in blocks]
    batch = buffer(blocks[0][0], "input", BEFORE_STEP)
    stream, tape, small = batch, [], []
    for index, (size_bytes, wide_s, cheap_s) in enumerate(blocks):
        module = f"layers.{index}"
        (wide,) = run(
            "aten.mm.default", "forward", module, (stream, weights[index]), (size_bytes,), wide_s, "activation"
        )
        (dead,) = run("aten.neg.default", "forward", module, (wide,), (size_bytes,), cheap_s)
        read = (dead, stream) if skips else (dead,)
        (cheap,) = run("aten.gelu.default", "forward", module, read, (size_bytes,), cheap_s, "activation")
        if stats:
            small += run("aten.sum.default", "forward", module, (wide,), (4,), 1e-6, "activation")
            saved.append((len(ops), small[-1]))
        tape.append((stream, wide, cheap))
        saved += [(len(ops), wide), (len(ops), cheap)]
        stream = cheap
    (loss,) = run("aten.mean.default", "forward", "", (stream,), (4,), 1e-6, "activation")
    (grad,) = run("aten.expand.default", "backward", "", (loss, *small), (blocks[-1][0],), 1e-6)
    grads = []
    for index, (stream, wide, cheap) in reversed(list(enumerate(tape))):
        size_bytes, wide_s, cheap_s = blocks[index]
        (grad,) = run("aten.gelu_backward.default", "backward", "", (grad, wide, cheap), (size_bytes,), 2 * cheap_s)
        (weight_grad,) = run("aten.mm.default", "backward", "", (grad, stream), (weight_bytes,), wide_s, "gradient")
        grads.append((index, weight_grad))
        if index:
            (grad,) = run("aten.mm.default", "backward", "", (grad, weights[index]), (blocks[index - 1][0],), wide_s)
    if optimizer:
        momenta = [buffer(weight_bytes, "optimizer_state", BEFORE_STEP) for _ in blocks]
        for index, weight_grad in grads:
            momentum = overwrite("aten.add_.Tensor", (momenta[index], weight_grad), momenta[index])
            overwrite("aten.sub_.Tensor", (weights[index], momentum), weights[index])
    lives = {}
    for op in ops:
        for id_ in (*op.reads, *op.writes):
            lives[id_] = op.index + 1
    for draft in drafts:
        whole = draft["kind"] in {"parameter", "input", "gradient", "optimizer_state"}
        if draft["death_op"] is None:
            draft["death_op"] = len(ops) if whole else lives[draft["id"]]
    packed = {id_ for _, id_ in saved}
    return Trace(
        header=Header(torch_version="2.13.0", device="cpu", created_by="tests", batch_size=4),
        buffers=tuple(Buffer(saved=d["id"] in packed, **d) for d in drafts),
        ops=tuple(ops),
        saved_tensors=tuple(
            SavedTensor(
                op=op,
                buffer_id=id_,
                shape=(drafts[id_]["size_bytes"] // 4,),
                stride=(1,),
                offset=0,
                dtype="float32",
            )
            for op, id_ in saved
        ),
    )


def blocks():
    """Draw the blocks of a chain: what they hold and how long they take."""
    size_bytes = st.integers(1, 16).map(lambda size: size * MIB)
    time_s = st.sampled_from([1e-4, 5e-4, 2e-3, 8e-3])
    return st.lists(st.tuples(size_bytes, time_s, time_s), min_size=1, max_size=5)
