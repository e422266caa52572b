"""Small training steps whose gaps do not nest: backward uses what forward saved in any order, several at a time."""

from hypothesis import strategies as st

from tests.planners.chains import MIB
from torchdelta.trace.model import BEFORE_STEP, Buffer, Header, Op, SavedTensor, Trace


@st.composite
def tangles(draw):
    """Draw a step with three or four saved tensors: who is made from whom, by which op, and who is used when."""
    names = [f"saved{number}" for number in range(draw(st.integers(3, 4)))]
    sizes = {"input": 4, **{name: draw(st.integers(1, 16)) * MIB for name in names}}
    time_s = st.sampled_from([1e-4, 2e-3, 1e-2])
    steps = []  # phase, reads, writes, seconds, whether it may run again
    made = ["input"]
    while len(made) <= len(names):
        number = len(made) - 1
        writes = names[number : number + draw(st.integers(1, 2))]
        reads = draw(st.lists(st.sampled_from(made), min_size=1, max_size=2, unique=True))
        steps.append(("forward", reads, writes, draw(time_s), draw(st.integers(0, 4)) > 0))
        made += writes
    sizes |= {"loss": 4, "grad0": 4, "room": 48 * MIB}
    steps.append(("forward", [names[-1]], ["loss"], 2e-2, False))
    steps += [("backward", ["loss"], ["grad0"], 1e-3, False), ("backward", ["grad0"], ["room"], 1e-4, False)]
    left, last = draw(st.permutations(names)), "room"
    while left:
        used = draw(st.integers(1, 2))
        grad = f"grad{len(steps)}"
        sizes[grad] = draw(st.sampled_from([4, 8 * MIB, 24 * MIB]))
        steps.append(("backward", [last, *left[:used]], [grad], draw(time_s), False))
        left, last = left[used:], grad
    return _trace(steps, sizes, names)


def _trace(steps, sizes, saved):
    ids = {name: number for number, name in enumerate(sizes)}
    births = {name: index for index, (_, _, writes, _, _) in enumerate(steps) for name in writes}
    deaths = {name: index + 1 for index, (_, reads, writes, _, _) in enumerate(steps) for name in (*reads, *writes)}
    ops = [
        Op(
            index=index,
            name="aten.mm.default",
            phase=phase,
            module="",
            reads=tuple(ids[name] for name in reads),
            writes=tuple(ids[name] for name in writes),
            time_s=time_s,
            recomputable=recomputable,
        )
        for index, (phase, reads, writes, time_s, recomputable) in enumerate(steps)
    ]
    buffers = [
        Buffer(
            id=number,
            storage_id=number,
            size_bytes=sizes[name],
            kind="input" if name == "input" else "activation" if name in saved else "temporary",
            birth_op=births.get(name, BEFORE_STEP),
            death_op=len(steps) if name == "input" else deaths[name],
            saved=name in saved,
        )
        for name, number in ids.items()
    ]
    packed = [
        SavedTensor(op=births[n] + 1, buffer_id=ids[n], shape=(sizes[n] // 4,), stride=(1,), offset=0, dtype="float32")
        for n in saved
    ]
    header = Header(torch_version="2.13.0", device="cpu", created_by="tests", batch_size=4)
    return Trace(header=header, buffers=tuple(buffers), ops=tuple(ops), saved_tensors=tuple(packed))
