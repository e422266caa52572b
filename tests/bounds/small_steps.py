"""Random small training steps that do what real ones do: what a bound has to hold on.

Modules that are called again, gradient accumulation, batch norms with statistics, versions written in place, ops of
several outputs, saved tensors that backward uses in any order, and ops that cannot run twice.
"""

import msgspec
from hypothesis import strategies as st

from tests.planners.chains import MIB
from torchdelta.trace.model import BEFORE_STEP, Buffer, Header, Op, SavedTensor, Trace

MAX_SAVED = 6

_SIZES = st.sampled_from([4, MIB, 3 * MIB, 8 * MIB, 16 * MIB])
_TIMES_S = st.sampled_from([0.0, 1e-4, 1e-3, 5e-3, 2e-2])
_KINDS = st.sampled_from(["plain", "plain", "plain", "in place", "overwrite", "norm", "norm", "two outputs"])


class _Step:
    """A step in the making. Mutable."""

    def __init__(self):
        self.drafts = []  # fields of the buffers, by id
        self.ops = []
        self.saved = []  # (op, buffer id)
        self.last_use = {}

    def born(self, size_bytes, kind, storage_id=None):
        """Add a buffer that the next op writes, or that is there before the step if there is no op yet."""
        id_ = len(self.drafts)
        storages = {draft["storage_id"] for draft in self.drafts}
        self.drafts.append(
            {
                "id": id_,
                "storage_id": len(storages) if storage_id is None else storage_id,
                "size_bytes": size_bytes,
                "kind": kind,
                "birth_op": len(self.ops) if self.ops or kind in {"activation", "temporary"} else BEFORE_STEP,
            }
        )
        return id_

    def overwrite(self, id_):
        """Add the version that the next op writes over another one."""
        old = self.drafts[id_]
        old["death_op"] = len(self.ops)
        return self.born(old["size_bytes"], old["kind"], old["storage_id"])

    def run(self, name, phase, reads, writes, time_s, *, recomputable):
        index = len(self.ops)
        self.last_use.update(dict.fromkeys((*reads, *writes), index))
        self.ops.append(
            Op(
                index=index,
                name=name,
                phase=phase,
                reads=tuple(dict.fromkeys(reads)),
                writes=tuple(writes),
                time_s=time_s,
                recomputable=recomputable,
            )
        )

    def trace(self, lasting):
        """Return the step: what is not in `lasting` dies after its last use."""
        num_ops = len(self.ops)
        for draft in self.drafts:
            lasts = draft["birth_op"] == BEFORE_STEP or draft["id"] in lasting
            draft.setdefault("death_op", num_ops if lasts else self.last_use[draft["id"]] + 1)
        packed = {id_ for _, id_ in self.saved}
        return Trace(
            header=Header(torch_version="2.13.0", device="cpu", created_by="tests"),
            buffers=tuple(Buffer(saved=draft["id"] in packed, **draft) for draft in self.drafts),
            ops=tuple(self.ops),
            saved_tensors=tuple(
                SavedTensor(op=op, buffer_id=id_, shape=(1,), stride=(1,), offset=0, dtype="float32")
                for op, id_ in self.saved
            ),
        )


@st.composite
def crowded(draw, steps):
    """Draw a step of any kind, and have autograd save all that it can, at sizes and times that compare."""
    trace = draw(steps)
    storages = sorted({buffer.storage_id for buffer in trace.buffers})
    sizes = dict(zip(storages, draw(st.lists(_SIZES, min_size=len(storages), max_size=len(storages))), strict=True))
    num_ops = len(trace.ops)
    times_s = draw(st.lists(_TIMES_S, min_size=num_ops, max_size=num_ops))
    again = draw(st.lists(st.sampled_from([True, True, True, False]), min_size=num_ops, max_size=num_ops))
    packed = [
        buffer.id
        for buffer in trace.buffers
        if buffer.birth_op != BEFORE_STEP
        and trace.ops[buffer.birth_op].phase == "forward"
        and any(buffer.id in op.reads and op.phase != "forward" for op in trace.ops)
    ]
    return Trace(
        header=trace.header,
        buffers=tuple(
            msgspec.structs.replace(buffer, size_bytes=sizes[buffer.storage_id], saved=buffer.id in packed)
            for buffer in trace.buffers
        ),
        ops=tuple(
            msgspec.structs.replace(op, time_s=time_s, recomputable=recomputable)
            for op, time_s, recomputable in zip(trace.ops, times_s, again, strict=True)
        ),
        saved_tensors=tuple(
            SavedTensor(
                op=trace.buffers[id_].birth_op + 1, buffer_id=id_, shape=(1,), stride=(1,), offset=0, dtype="float32"
            )
            for id_ in packed
        ),
    )


@st.composite
def small_steps(draw):
    """Draw a step of one to three micro-batches, with at most `MAX_SAVED` saved tensors."""
    step = _Step()
    batch = step.born(MIB, "input")
    statistics = [step.born(1024, "constant") for _ in range(draw(st.integers(0, 2)))]  # current versions
    if not statistics:
        statistics.append(step.born(1024, "constant"))
    step.ops.append(
        Op(index=0, name="aten.neg.default", phase="forward", reads=(batch,))
    )  # so that what follows is born
    step.last_use[batch] = 0
    num_micro = draw(st.integers(1, 3))
    shared = [batch]  # what a later micro-batch may still read
    for _ in range(num_micro):
        _micro_batch(draw, step, statistics, shared, MAX_SAVED // num_micro)
    lasting = set(draw(st.lists(st.sampled_from(range(len(step.drafts))), max_size=2)))
    lasting = {id_ for id_ in lasting if "death_op" not in step.drafts[id_]}
    return step.trace(lasting)


def _micro_batch(draw, step, statistics, shared, max_saved):
    current, tape = list(shared), []
    for _ in range(draw(st.integers(2, 6))):
        kind, time_s = draw(_KINDS), draw(_TIMES_S)
        recomputable = draw(st.integers(0, 5)) > 0
        reads = draw(st.lists(st.sampled_from(current[-4:]), min_size=1, max_size=2, unique=True))
        born = [id_ for id_ in current if step.drafts[id_]["birth_op"] != BEFORE_STEP]
        name = "aten.mm.default"
        if kind in {"in place", "overwrite"} and born:
            old = draw(st.sampled_from(born))
            name = "aten.relu_.default" if kind == "in place" else "aten.copy_.default"
            reads = [id_ for id_ in reads if id_ != old]
            reads = [old, *reads] if kind == "in place" else (reads or [shared[0]])
            made = [step.overwrite(old)]
            current[current.index(old)] = made[0]
            shared[:] = [made[0] if id_ == old else id_ for id_ in shared]
            tape = [id_ for id_ in tape if id_ != old]
        elif kind == "norm":
            name = "aten.native_batch_norm.default"
            place = draw(st.integers(0, len(statistics) - 1))
            reads = [*reads, statistics[place]]
            made = [step.born(draw(_SIZES), "activation"), step.born(1024, "activation")]
            statistics[place] = step.overwrite(statistics[place])
            current += made
            made = [*made, statistics[place]]
        else:
            made = [step.born(draw(_SIZES), "activation") for _ in range(1 + (kind == "two outputs"))]
            current += made
        step.run(name, "forward", reads, made, time_s, recomputable=recomputable)
        for id_ in made:
            if id_ not in statistics and len(tape) < max_saved and draw(st.integers(0, 3)) > 0:
                tape.append(id_)
    for id_ in tape:
        step.saved.append((len(step.ops), id_))
    later = draw(st.sampled_from(current))
    if later not in shared and draw(st.booleans()):
        shared.append(later)
    left, grad = list(draw(st.permutations(tape))) if draw(st.booleans()) else tape[::-1], None
    room = step.born(draw(_SIZES), "temporary")
    step.run("aten.ones.default", "backward", (), (room,), draw(_TIMES_S), recomputable=False)
    grad = room
    while left:
        number = draw(st.integers(1, 2))
        used, left = left[:number], left[number:]
        reads = [grad, *used]
        if draw(st.integers(0, 5)) == 0 and step.drafts[used[0]]["storage_id"] not in {
            step.drafts[id_]["storage_id"] for id_ in (*shared, *left)
        }:
            made = [step.overwrite(used[0])]
            current = [id_ for id_ in current if id_ != used[0]]
        else:
            made = [step.born(draw(_SIZES), "temporary")]
        step.run("aten.mul.Tensor", "backward", reads, made, draw(_TIMES_S), recomputable=draw(st.booleans()))
        grad = made[0]
