"""Random valid traces for property tests, and the example of `docs/trace-format.md`.

`traces()` plays a small training step: storages come, are overwritten in place, and go, as an allocator would see it.
It never draws and rejects: whatever it gives is valid, and shrinks towards few ops and few buffers.
"""

from hypothesis import strategies as st

from torchdelta.trace.model import BEFORE_STEP, Buffer, BufferKind, Header, Op, Phase, Product, SavedTensor, Trace

PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")
OWNED_KINDS: tuple[BufferKind, ...] = ("parameter", "gradient", "optimizer_state", "input", "constant")
BORN_KINDS: tuple[BufferKind, ...] = ("activation", "temporary", "gradient")

texts = st.text(st.characters(codec="utf-8"), max_size=12)
names = (
    st.sampled_from(["aten.mm.default", "aten.add_.Tensor", "aten.native_batch_norm.default", "torchdelta.external"])
    | texts
)
sizes_bytes = st.integers(0, 64) | st.integers(0, 2**45)
_lengths = st.integers(0, 2**20)
products = st.builds(Product, groups=_lengths, rows=_lengths, columns=_lengths, inner=_lengths, window=_lengths)


def headers() -> st.SearchStrategy[Header]:
    """Draw where a trace comes from."""
    return st.builds(
        Header,
        torch_version=texts,
        device=st.sampled_from(["cpu", "cuda"]),
        device_name=texts,
        created_by=texts,
        batch_size=st.none() | st.integers(0, 4096),
        comment=texts,
    )


@st.composite
def traces(draw: st.DrawFn, *, max_ops: int = 12, resize: bool = False, lasting: bool = False) -> Trace:
    """Draw a valid trace.

    Args:
        draw: Given by hypothesis.
        max_ops: The most ops.
        resize: Whether an overwritten storage may change its size.
        lasting: Whether all that is there before the step outlives it, as parameters and optimizer states do.
    """
    num_ops = draw(st.integers(1, max_ops))
    drafts: list[dict[str, object]] = []  # the buffers' fields by id; death_op is added when they die
    current: dict[int, int] = {}  # storage id -> id of its current version
    num_storages = 0

    def born(storage_id: int, size_bytes: int, kind: BufferKind, birth_op: int) -> int:
        drafts.append(
            {
                "id": len(drafts),
                "storage_id": storage_id,
                "size_bytes": size_bytes,
                "kind": kind,
                "birth_op": birth_op,
                "death_op": num_ops,
            }
        )
        current[storage_id] = len(drafts) - 1
        return current[storage_id]

    def some(ids: list[int], at_most: int) -> list[int]:
        if not ids:
            return []
        return draw(st.lists(st.sampled_from(ids), unique=True, max_size=at_most))

    for _ in range(draw(st.integers(0, 4))):
        born(num_storages, draw(sizes_bytes), draw(st.sampled_from(OWNED_KINDS)), BEFORE_STEP)
        num_storages += 1

    stays = set(current) if lasting else set[int]()
    ops: list[Op] = []
    saved: list[tuple[int, int]] = []
    for index in range(num_ops):
        for storage_id in some([id_ for id_ in current if id_ not in stays], 2):  # freed between two ops
            drafts[current.pop(storage_id)]["death_op"] = index
        saved += [(index, id_) for id_ in some(list(current.values()), 1)]
        reads = some(list(current.values()), 3)
        writes: list[int] = []
        for storage_id in some(list(current), 1):  # overwritten in place
            old = drafts[current[storage_id]]
            old["death_op"] = index
            size_bytes = draw(sizes_bytes) if resize else old["size_bytes"]
            writes.append(born(storage_id, size_bytes, old["kind"], index))  # type: ignore[arg-type]
        for _ in range(draw(st.integers(0, 2))):  # fresh
            writes.append(born(num_storages, draw(sizes_bytes), draw(st.sampled_from(BORN_KINDS)), index))
            num_storages += 1
        saved += [(index + 1, id_) for id_ in some(writes, 1)]
        ops.append(
            Op(
                index=index,
                name=draw(names),
                phase=draw(st.sampled_from(PHASES)),
                module=draw(texts),
                reads=tuple(reads),
                writes=tuple(draw(st.permutations(writes))),
                time_s=draw(st.floats(0, 1e3)),
                random=draw(st.booleans()),
                recomputable=draw(st.booleans()),
                workspace_bytes=draw(st.integers(0, 64)),
                node=draw(texts),
                flops=draw(st.integers(0, 2**50)),
                dtype=draw(st.sampled_from(["", "float32", "bfloat16"])),
                moved_bytes=draw(st.integers(0, 64)),
                product=draw(st.none() | products),
                layout=draw(st.sampled_from(["", "channels_last"])),
            )
        )
    saved_ids = {id_ for _, id_ in saved}
    buffers = tuple(Buffer(**draft, saved=draft["id"] in saved_ids) for draft in drafts)  # type: ignore[arg-type]
    return Trace(
        header=draw(headers()),
        buffers=buffers,
        ops=tuple(ops),
        saved_tensors=tuple(draw(_views(op, buffers[id_])) for op, id_ in saved),
    )


@st.composite
def _views(draw: st.DrawFn, op: int, buffer: Buffer) -> SavedTensor:
    """Draw a view that lies within its buffer."""
    offset = draw(st.integers(0, min(buffer.size_bytes, 8)))
    left = buffer.size_bytes - offset
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((0,), (1,)), ((left, 1, 0), (1, 7, 1))]
    if left:
        shapes += [((), ()), ((left,), (1,)), ((5, left), (0, 1)), ((1, left), (2**40, 1))]
    shape, stride = draw(st.sampled_from(shapes))
    return SavedTensor(op=op, buffer_id=buffer.id, shape=shape, stride=stride, offset=offset, dtype="uint8")


def example() -> Trace:
    """Return the worked example of `docs/trace-format.md`: one linear layer without bias, ReLU in place, sum, SGD."""
    return Trace(
        header=Header(
            torch_version="2.13.0+cpu",
            device="cpu",
            created_by="torchdelta documentation",
            batch_size=4,
            comment="Linear(2, 3), ReLU in place, sum, SGD",
        ),
        buffers=(
            Buffer(id=0, storage_id=0, size_bytes=24, kind="parameter", birth_op=-1, death_op=6, saved=False),
            Buffer(id=1, storage_id=1, size_bytes=32, kind="input", birth_op=-1, death_op=7, saved=True),
            Buffer(id=2, storage_id=2, size_bytes=48, kind="activation", birth_op=0, death_op=1),
            Buffer(id=3, storage_id=2, size_bytes=48, kind="activation", birth_op=1, death_op=5, saved=True),
            Buffer(id=4, storage_id=3, size_bytes=4, kind="activation", birth_op=2, death_op=7),
            Buffer(id=5, storage_id=4, size_bytes=4, kind="temporary", birth_op=3, death_op=5),
            Buffer(id=6, storage_id=5, size_bytes=48, kind="temporary", birth_op=4, death_op=6),
            Buffer(id=7, storage_id=6, size_bytes=24, kind="gradient", birth_op=5, death_op=7),
            Buffer(id=8, storage_id=0, size_bytes=24, kind="parameter", birth_op=6, death_op=7),
        ),
        ops=(
            Op(
                index=0,
                name="aten.mm.default",
                phase="forward",
                module="0",
                reads=(1, 0),
                writes=(2,),
                time_s=3e-06,
                recomputable=True,
                flops=48,
                dtype="float32",
                moved_bytes=104,
                product=Product(rows=4, columns=3, inner=2),
            ),
            Op(
                index=1,
                name="aten.relu_.default",
                phase="forward",
                module="1",
                reads=(2,),
                writes=(3,),
                time_s=1e-06,
                recomputable=True,
            ),
            Op(
                index=2,
                name="aten.sum.default",
                phase="forward",
                reads=(3,),
                writes=(4,),
                time_s=1e-06,
                recomputable=True,
            ),
            Op(
                index=3,
                name="aten.ones_like.default",
                phase="backward",
                reads=(4,),
                writes=(5,),
                time_s=1e-06,
                recomputable=True,
            ),
            Op(
                index=4,
                name="aten.threshold_backward.default",
                phase="backward",
                reads=(5, 3),
                writes=(6,),
                time_s=2e-06,
                recomputable=True,
                node="ReluBackward0",
            ),
            Op(
                index=5,
                name="aten.mm.default",
                phase="backward",
                reads=(1, 6),
                writes=(7,),
                time_s=4e-06,
                recomputable=True,
                workspace_bytes=64,
                node="MmBackward0",
                flops=48,
                dtype="float32",
                moved_bytes=104,
                product=Product(rows=3, columns=2, inner=4),
            ),
            Op(
                index=6,
                name="aten.add_.Tensor",
                phase="optimizer",
                reads=(0, 7),
                writes=(8,),
                time_s=1e-06,
                recomputable=True,
            ),
        ),
        saved_tensors=(
            SavedTensor(op=0, buffer_id=1, shape=(4, 2), stride=(2, 1), offset=0, dtype="float32"),
            SavedTensor(op=2, buffer_id=3, shape=(4, 3), stride=(3, 1), offset=0, dtype="float32"),
        ),
    )
