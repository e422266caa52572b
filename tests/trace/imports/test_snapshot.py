"""Torch's memory snapshots are read, and hostile pickles are refused before anything runs."""

import math
import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.imports.logs import played
from tests.trace.strategies import example
from torchdelta.errors import TraceFileError
from torchdelta.trace.imports.snapshot import read_snapshot
from torchdelta.trace.imports.unpickle import load_plain
from torchdelta.trace.model import BEFORE_STEP, peak
from torchdelta.trace.validate import validate

RECORDED = Path("../shared/data/gpu")
"""Snapshots of real CUDA runs, of one training step each (SOURCES.txt there); may be absent."""

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner, inner, inner)
    ),
    max_leaves=20,
)


@given(plain, st.sampled_from([2, 3, 4, 5]))
def test_plain_data_of_every_protocol(value, protocol):
    """Dicts, lists, tuples, texts and numbers come back as they were, shared parts too."""
    assert load_plain(pickle.dumps([value, value], protocol)) == [value, value]


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/torchdelta-was-here",)


HOSTILE = {
    "a command": pickle.dumps({"device_traces": [Evil()]}),
    "a class": pickle.dumps({"device_traces": os.path.join}),
    "an object": pickle.dumps(Evil.__new__(Evil).__class__),
    "bytes": pickle.dumps(b"plain, but no snapshot has any"),
    "a huge memo": b"\x80\x02]r\xff\xff\xff\xff.",
    "old style": b"cos\nsystem\n(S'true'\ntR.",
}


def shared(depth):
    """A tuple of twice the same tuple, of twice the same tuple, and so on: small, but not what is inside it."""
    pair = ()
    for _ in range(depth):
        pair = (pair, pair)
    return pair


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_pickles_are_refused(tmp_path, case):
    """What would import, call or build anything is an error of one line, and nothing has run."""
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(TraceFileError) as caught:
        read_snapshot(path)
    assert "\n" not in str(caught.value)
    assert "refused" in str(caught.value) or case == "a huge memo"


def test_tuples_are_no_keys():
    """To hash a tuple of shared tuples takes forever, and a deeply nested one passes the end of the stack."""
    listed = pickle.dumps([shared(60), None], 4)
    as_dict = listed.replace(b"]", b"}", 1).removesuffix(b"e.") + b"u."  # what sets items in place of what appends
    for data in (as_dict, b"\x80\x04})" + b"\x85" * 1_000_000 + b"Ns.", b"\x80\x04()Nd."):
        with pytest.raises(TraceFileError, match="a tuple is the key of a dict at byte"):
            load_plain(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_error_or_plain_data(data):
    """Arbitrary bytes never raise anything but our error."""
    try:
        load_plain(b"\x80\x04" + data)
    except TraceFileError as error:
        assert "\n" not in str(error)  # noqa: PT017 - most bytes are an error, some are plain data


def test_every_cut_and_every_flip_of_a_snapshot():
    """Damage gives plain data or our error."""
    data = pickle.dumps(snapshot_of_steps(3), 4)
    for place in range(0, len(data), 7):
        for damaged in (data[:place], data[:place] + bytes([data[place] ^ 0x5A]) + data[place + 1 :]):
            try:
                load_plain(damaged)
            except TraceFileError:
                continue
    assert all(opcode.name != "GLOBAL" for opcode, _, _ in pickletools.genops(data))


def snapshot_of_steps(num_steps: int, *, forget: int = 0) -> dict[str, Any]:
    """What torch would dump after some steps of the documented example; the first entries may be forgotten."""
    entries = [
        {
            "action": {"alloc": "alloc", "free": "free_completed"}[event.op],
            "addr": 2**40 + 512 * int(event.id),
            "size": event.size_bytes,
            "stream": 0,
            "time_us": round(event.time_s * 1e6),
            "frames": [{"filename": "train.py", "line": 7, "name": "step"}],
        }
        for event in played(example(), num_steps)
        if event.op in {"alloc", "free"}
    ]
    alive: dict[int, int] = {}
    for entry in entries:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = entry["size"]
        else:
            entry["size"] = alive.pop(entry["addr"])
    blocks = [{"address": a, "size": s, "state": "active_allocated"} for a, s in alive.items()]
    blocks.append({"address": 1, "size": 4096, "state": "inactive"})
    segment = {"device": 0, "address": 2**40, "total_size": 2**20, "blocks": blocks}
    return {"segments": [segment], "device_traces": [entries[forget:], []]}


def test_a_snapshot_becomes_a_step(tmp_path):
    """Lives and load are those of the step; blocks from before the recording are there, from the segments."""
    path = tmp_path / "snapshot.pickle"
    for forget in (0, 2):  # with 2, parameter and batch were allocated before the recording began
        path.write_bytes(pickle.dumps(snapshot_of_steps(4, forget=forget)))
        trace = read_snapshot(path)
        validate(trace)
        assert peak(trace).size_bytes == peak(example()).size_bytes
        assert sorted(b.size_bytes for b in trace.buffers if b.birth_op == BEFORE_STEP) == [24, 32]
    whole = read_snapshot(path, whole=True)
    validate(whole)
    assert peak(whole).size_bytes == peak(example()).size_bytes
    assert sum(op.time_s for op in whole.ops) < 1


def test_what_is_no_snapshot(tmp_path):
    """Each is one line with the file's name and what to do."""
    path = tmp_path / "snapshot.pickle"
    for content, message in (
        (pickle.dumps([1, 2]), "not a memory snapshot: a dict with device_traces is wanted"),
        (pickle.dumps({"device_traces": [[]]}), "no events of device 0: there are some of none; call torch.cuda"),
        (pickle.dumps({"device_traces": [[{"addr": 1}]]}), "a damaged memory snapshot: KeyError"),
        (pickle.dumps({"device_traces": [[1]]}), "a damaged memory snapshot: AttributeError"),
        (pickle.dumps(snapshot_of_steps(2)), "no iteration in"),
        (b"", "not a pickle"),
    ):
        path.write_bytes(content)
        with pytest.raises(TraceFileError, match=message) as caught:
            read_snapshot(path)
        assert str(caught.value).startswith(str(path))
        assert "\n" not in str(caught.value)
    path.write_bytes(pickle.dumps(snapshot_of_steps(4)))
    with pytest.raises(TraceFileError, match=r"no events of device 1: there are some of \[0\]"):
        read_snapshot(path, device=1)
    negative = snapshot_of_steps(4)
    next(entry for entry in negative["device_traces"][0] if entry["action"] == "alloc")["size"] = -5
    path.write_bytes(pickle.dumps(negative))
    with pytest.raises(TraceFileError, match="negative size_bytes -5") as caught:
        read_snapshot(path, whole=True)
    assert str(caught.value).startswith(str(path))


def damaged(**fields: Any) -> dict[str, Any]:
    """A snapshot of steps in which all entries of one address have other fields."""
    snapshot = snapshot_of_steps(4)
    entries = snapshot["device_traces"][0]
    address = next(entry["addr"] for entry in entries if entry["action"] == "free_completed")
    entries[:] = [entry | fields if entry["addr"] == address else entry for entry in entries]
    return snapshot


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (damaged(size=10**400), "bytes"),
        (damaged(size=2**63), "9223372036854775808 bytes"),
        (damaged(size=math.inf), "a damaged memory snapshot: OverflowError"),
        (damaged(time_us=10**400), "a damaged memory snapshot: OverflowError"),
        (damaged(addr=[1]), "a damaged memory snapshot: TypeError"),
        (damaged(addr=shared(60)), "a damaged memory snapshot: TypeError: a tuple where a number or a text is wanted"),
        (damaged(action=shared(60)), "a damaged memory snapshot: TypeError: a tuple where"),
        (damaged(action="free_completed"), "is freed, but it was not allocated"),
        (damaged(action="free_completed", size=0), "is freed, but it was not allocated"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_snapshots_with_absurd_values(tmp_path, content, message, whole):
    """Numbers that no machine has, blocks that are freed twice: one line each, with or without an iteration."""
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(TraceFileError, match=message) as caught:
        read_snapshot(path, whole=whole)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(path))


@pytest.mark.skipif(not RECORDED.is_dir(), reason="the recorded snapshots are not here")
@pytest.mark.parametrize(("length", "least", "peak_gib"), [(128, "5.55 GiB", 6.53), (512, "8.00 GiB", 11.58)])
def test_recorded_snapshots_of_one_step(length, least, peak_gib):
    """Their layers repeat, below the peak: refused. As a whole they have the peak."""
    path = RECORDED / f"wed_medium_{length}_training_memory_snapshot.pickle.gz"
    with pytest.raises(TraceFileError, match=f"reaches {least} of its peak of {peak_gib} GiB"):
        read_snapshot(path)
    assert peak(read_snapshot(path, whole=True)).size_bytes / 2**30 == pytest.approx(peak_gib, abs=0.01)
