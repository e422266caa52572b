"""How far a prediction may be off, and when it says that it extrapolates."""

import pytest
from msgspec.structs import replace

from tests.trace.strategies import example
from torchdelta.machine.catalog import CATALOG, find
from torchdelta.machine.interval import SEEN, SEEN_MACHINES, UNSEEN, interval_of, kind_of, range_text
from torchdelta.trace.model import Product

RTX3090 = find("rtx3090")


def step(name="aten.mm.default", *, scale=1.0, dtype="float16", phase="forward"):
    """Return a step of which one op, a product of this name, takes nearly all of the time."""
    trace = example()
    sizes = Product(rows=1, columns=1, inner=1)
    one = replace(trace.ops[0], name=name, time_s=scale, flops=1, dtype=dtype, product=sizes, phase=phase)
    rest = (replace(op, flops=0, time_s=1e-5) for op in trace.ops[1:])
    return replace(trace, ops=(one, *rest))


def test_a_step_like_the_published_ones():
    """Its interval is that of its kind, and it is no extrapolation."""
    for name, kind in (("aten.mm.default", "product"), ("aten.convolution.default", "convolution")):
        found = interval_of(step(name), RTX3090)
        assert kind_of(step(name)) == kind
        assert (found.low, found.high) == SEEN[kind]
        assert found.extrapolates == ()
        assert found.low < 1 < found.high


@pytest.mark.parametrize(
    ("changed", "machine", "reason"),
    [
        ({}, "t4", "no published step ran on t4"),
        ({"scale": 1e-5}, "rtx3090", "launches take"),
        ({"dtype": "float64"}, "rtx3090", "no published step multiplies float64"),
        (
            {"name": "aten._flash_attention_backward.default", "phase": "backward"},
            "rtx3090",
            "no published step trains with fused attention kernels",
        ),
    ],
)
def test_a_step_unlike_them(changed, machine, reason):
    """It says why, and its interval is wider."""
    found = interval_of(step(**changed), find(machine))
    assert any(reason in said for said in found.extrapolates)
    assert (found.low, found.high) in UNSEEN.values()


def test_an_extrapolation_is_no_surer():
    """For each kind the interval of an extrapolation contains the other one."""
    for kind, (low, high) in SEEN.items():
        assert UNSEEN[kind][0] <= low
        assert UNSEEN[kind][1] >= high


def test_machines_without_an_interval():
    """A CPU has none; every machine that published steps ran on is in the catalog."""
    assert interval_of(example(), find("cpu")) is None
    assert set(SEEN_MACHINES) <= set(CATALOG)


def test_three_digits():
    """The ends of an interval are told to three digits."""
    assert range_text(0.35012, 0.4801) == "350 to 480"
    assert range_text(0.0001234, 12.3456) == "0.123 to 12300"
    assert range_text(0, 0) == "0 to 0"
