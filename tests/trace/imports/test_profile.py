"""Profiles of torch.profiler become traces, or give their times to a step that was traced."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.imports.profiles import Written, two_layers
from torchdelta.errors import TraceError, TraceFileError
from torchdelta.trace.imports import kineto
from torchdelta.trace.imports.kineto import read_profile_file
from torchdelta.trace.imports.profile import read_profile
from torchdelta.trace.imports.timing import with_measured_times
from torchdelta.trace.model import BEFORE_STEP, Buffer, Header, Op, Trace, counts, load_curve
from torchdelta.trace.validate import validate

RECORDED = Path("../shared/data/gpu")
"""Profiles of real GPUs (SOURCES.txt there); may be absent."""
V100 = RECORDED / "kineto_v100_resnet50_fp32_b32.pt.trace.json.gz"
A100 = RECORDED / "hta_a100_rank0_dlrm_shapes.json.gz"


@pytest.fixture
def write(tmp_path):
    """Write a profile and return its path."""

    def write(text: str | bytes, name: str = "profile.json") -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def test_a_step_op_by_op(write):
    """Outermost ops, their kernels' times, phases, lives and what they read."""
    step = read_profile(write(two_layers()))
    validate(step)
    assert [(op.name, op.phase) for op in step.ops] == [
        ("aten.linear", "forward"),
        ("aten.relu", "forward"),
        ("aten.threshold_backward", "backward"),
        ("aten.mm", "backward"),
    ]
    assert [op.time_s for op in step.ops] == pytest.approx([30e-6, 10e-6, 20e-6, 40e-6])
    assert step.header.device_name == "Test GPU"
    assert "step #1 of 3" in step.header.comment
    born = [(b.size_bytes, b.birth_op, b.death_op, b.saved) for b in step.buffers if b.birth_op != BEFORE_STEP]
    assert born == [(1024, 0, 4, True), (1536, 1, 3, True), (2048, 2, 4, False), (512, 3, 4, False)]
    # What was there before, by the total that the allocator names.
    assert counts(step).before_step_bytes == 1000
    assert load_curve(step) == [2024, 3560, 5608, 4584]
    reads = [[step.buffers[id_].size_bytes for id_ in op.reads] for op in step.ops]
    assert reads == [[], [1024], [1536], [1024, 2048]]


def test_profiles_of_old_versions(write):
    """Without addresses and totals the load is the same, but for what was there before."""
    old = read_profile(write(two_layers(addresses=False, first_total_bytes=None)))
    assert load_curve(old) == [1024, 2560, 4608, 3584]
    assert "without what was in memory before" in old.header.comment


def test_all_of_it_as_one_step(write):
    """Also where nothing marks a step."""
    text = json.loads(two_layers(2))
    text["traceEvents"] = [event for event in text["traceEvents"] if "ProfilerStep" not in event["name"]]
    path = write(json.dumps(text))
    with pytest.raises(TraceFileError, match=r"no marks of steps .* prof.step.* --whole"):
        read_profile(path)
    assert len(read_profile(path, whole=True).ops) == 8


def test_compressed_profiles_are_read(write):
    """As `tensorboard_trace_handler(use_gzip=True)` writes them."""
    path = write(gzip.compress(two_layers().encode(), mtime=0), "profile.json.gz")
    assert len(read_profile(path).ops) == 4


def test_blocks_from_before_the_step_may_die_in_it(write):
    """With and without addresses."""
    for addresses in (True, False):
        written = Written(addresses=addresses, first_total_bytes=None)
        start = written.clock
        written.op("aten::relu", [[4, 64]], kernel_us=1.0, memory=[(9, -4096), (1, 1024)])
        written.op("aten::relu", [[4, 64]], kernel_us=1.0, memory=[(2, 512)])
        written.step(0, start)
        step = read_profile(write(written.text()))
        assert load_curve(step) == [5120, 1536]


HOSTILE = {
    "nothing": (b"", "not a profile"),
    "no JSON": (b"\x80\x04\x95pickle", "not a profile"),
    "another JSON": (b'{"hello": 1}', "traceEvents"),
    "a list": (b"[]", "not a profile"),
    "cut short": (two_layers().encode()[:700], "cut short"),
    "a compressed one, cut short": (gzip.compress(two_layers().encode(), mtime=0)[:300], "cannot read the profile"),
    "a damaged compressed one": (b"\x1f\x8b\x08\x00" + bytes(30), "cannot read the profile"),
    "nested": (b'{"traceEvents": ' + b"[" * 200_000, "not a profile"),
    "nested arguments": (
        b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2, "args": '
        + b"[" * 100_000
        + b"]" * 100_000
        + b"}]}",
        "",
    ),
    "no events": (b'{"traceEvents": []}', "no marks"),
    "a time that is none": (
        b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": "noon", "dur": 2}]}',
        "'noon'",
    ),
    "an endless time": (
        b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": "inf", "dur": 2}]}',
        "inf",
    ),
    "a step with a number of 5,000 digits": (
        two_layers().replace("ProfilerStep#", "ProfilerStep#" + "9" * 5000).encode(),
        "no marks",
    ),
    "a negative duration": (
        b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": -2}]}',
        "-2",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_profiles_are_one_line(write, case):
    """Whatever is wrong with the file."""
    data, said = HOSTILE[case]
    with pytest.raises(TraceFileError) as caught:
        read_profile(write(data))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_arguments_that_are_not_utf8_are_left_out(write):
    """The op is read without its shapes; the text of a profile is checked only where it is used."""
    whole = read_profile(write(two_layers()))
    odd = two_layers().encode().replace(b'"float"', b'"\xff"')
    assert [op.name for op in read_profile(write(odd)).ops] == [op.name for op in whole.ops]


def test_a_bomb_is_not_unpacked(write, monkeypatch):
    """Beyond a limit nothing is decompressed or decoded."""
    monkeypatch.setattr(kineto, "MAX_FILE_BYTES", 1000)
    with pytest.raises(TraceFileError, match="larger than 1000 bytes"):
        read_profile(write(gzip.compress(b" " * 100_000, mtime=0)))


junk = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5), st.just([]), st.just([[]])
)


@given(st.dictionaries(st.sampled_from(["Bytes", "Addr", "Device Type", "Total Allocated"]), junk), junk, junk)
def test_odd_arguments_are_one_line_or_left_out(tmp_path_factory, memory, dims, types):
    """An event's arguments may be of any type and size."""
    text = json.loads(two_layers(1))
    for event in text["traceEvents"]:
        if event["name"] == "[memory]":
            event["args"] |= memory
        elif event.get("cat") == "cpu_op":
            event["args"] |= {"Input Dims": [dims, dims], "Input type": types}
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    path.write_text(json.dumps(text, allow_nan=True))
    said = ""
    try:
        validate(read_profile(path))
    except TraceFileError as error:
        said = str(error)
    assert "\n" not in said


# -- times for a traced step


def priced_step(*ops: tuple[str, float, int]) -> Trace:
    """Build a step of ops that write one buffer each: name, seconds and FLOPs."""
    return Trace(
        header=Header(torch_version="", device="cuda", created_by="test"),
        buffers=tuple(
            Buffer(id=i, storage_id=i, size_bytes=8, kind="activation", birth_op=i, death_op=len(ops))
            for i in range(len(ops))
        ),
        ops=tuple(
            Op(index=i, name=name, phase="forward", writes=(i,), time_s=time_s, flops=flops, moved_bytes=8)
            for i, (name, time_s, flops) in enumerate(ops)
        ),
    )


def test_measured_times_replace_priced_ones(write):
    """By name and shapes, inner ops too; the others keep their price times what the measured ones took of theirs."""
    profile = read_profile_file(write(two_layers()))
    step = priced_step(
        ("aten.addmm.default", 15e-6, 100),  # 30 us were measured
        ("aten.relu.default", 40e-6, 0),  # 10 us
        ("aten.mm.default", 5e-6, 100),  # of other shapes
        ("aten.gelu.default", 8e-6, 0),  # not in the profile
    )
    shapes = [((8, 16), (4, 8)), ((4, 64),), ((3, 3),), ((4, 64),)]
    shapes[0] = ((16, 8), (4, 8))
    timed, match = with_measured_times(step, shapes, profile, source="profile.json")
    assert [op.time_s for op in timed.ops] == pytest.approx([30e-6, 10e-6, 10e-6, 2e-6])
    assert match.num_ops == 2
    assert (match.matrix_factor, match.other_factor) == pytest.approx((2.0, 0.25))
    assert match.share == pytest.approx(55 / 68)
    assert not any(op.flops or op.moved_bytes for op in timed.ops)  # nobody prices them again


def test_a_profile_of_another_step_is_refused(write):
    """One that shows next to nothing of it."""
    profile = read_profile_file(write(two_layers()))
    with pytest.raises(TraceError, match=r"covers only 0% of this step's time, 0 of its 1 ops .* batch size"):
        with_measured_times(priced_step(("aten.mm.default", 1e-3, 1)), [((2, 2),)], profile, source="profile.json")


# -- real ones


@pytest.mark.skipif(not V100.exists(), reason="no recorded profile")
def test_a_real_profile():
    """ResNet-50 on a V100, 32 images: the ops of the middle step take the time that was published for it."""
    step = read_profile(V100)
    found = counts(step)
    assert step.header.device_name == "Tesla V100-DGXS-32GB"
    assert found.time_s == pytest.approx(0.0986, rel=0.03)
    assert sum(op.name == "aten.conv2d" for op in step.ops) == 53
    # The changes of the allocator's own count: 2.60 GiB above where the step began.
    assert found.peak.size_bytes / 2**30 == pytest.approx(2.60, rel=0.03)
    assert found.saved_bytes / 2**30 == pytest.approx(2.54, rel=0.02)


@pytest.mark.skipif(not A100.exists(), reason="no recorded profile")
def test_a_real_profile_without_memory():
    """It has times and shapes, and says what is missing for a trace."""
    profile = read_profile_file(A100)
    assert profile.device_name == "NVIDIA A100-SXM4-80GB"
    assert any(name == "aten::mm" and shapes for name, shapes in profile.times_s)
    with pytest.raises(TraceFileError, match="profile_memory=True"):
        read_profile(A100)
