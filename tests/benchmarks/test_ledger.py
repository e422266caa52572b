"""The ledger: predictions of published figures, the fit, the page, and what users add."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

pytest.importorskip("scipy")

from benchmarks.ledger.command import _judged
from benchmarks.ledger.figures import Figure
from benchmarks.ledger.fitting import PRIORS, Dataset, Timed
from benchmarks.ledger.page import page, picture
from benchmarks.ledger.shares import figures_of_share
from benchmarks.results import RESULTS
from torchdelta.errors import MachineError
from torchdelta.machine.catalog import find
from torchdelta.machine.interval import SEEN, UNSEEN
from torchdelta.machine.kernels import CUDA_SHARES, KernelShares, kernel_time_s
from torchdelta.machine.share import Share, SharedKernel
from torchdelta.trace.model import Op, Product

LEDGER = json.loads((RESULTS / "ledger.json").read_text(encoding="utf-8"))["data"]


def timed(place: int, shares: KernelShares) -> Timed:
    """Return a step whose published time is what some shares predict."""
    machine = find(("rtx3090", "a100-80g", "v100-32g")[place % 3])
    sizes = Product(groups=1 + 31 * (place % 2), rows=4096 * (1 + place), columns=64, inner=64, window=9)
    flops = 2 * sizes.groups * sizes.rows * 64 * 64 * 9
    convolution = Op(
        index=0, name="aten.convolution.default", phase="forward", flops=flops, dtype="float16", product=sizes
    )
    norm = Op(index=0, name="aten.native_batch_norm.default", phase="forward", writes=(1, 2, 3, 4))
    ops = ((convolution, 10**8, 3), (norm, 10**8 * (place + 1), 2))
    return Timed(
        id=str(place),
        published_s=sum(count * kernel_time_s(op, moved, machine, shares=shares) for op, moved, count in ops),
        machine=machine,
        ops=ops,
        groups={"model": place % 4},
        is_step=True,
    )


def test_the_fit_prices_as_the_library_does():
    """Predicted as arrays, each step has the time of `kernel_time_s`; so with the right shares no error is left."""
    dataset = Dataset([timed(place, CUDA_SHARES) for place in range(12)])
    assert dataset.errors(CUDA_SHARES) == pytest.approx([0.0] * 12, abs=1e-12)
    assert set(PRIORS) == {field.name for field in msgspec.structs.fields(KernelShares)}


def test_a_fit_finds_what_made_the_times():
    """From times that some shares make, the fit comes back near to them, with a model left out as well."""
    guesses = KernelShares(**{name: guess for name, (guess, _) in PRIORS.items()})
    dataset = Dataset([timed(place, msgspec.structs.replace(guesses, norm=1.3)) for place in range(12)])
    fitted = dataset.fit([True] * 12)
    assert max(abs(error) for error in dataset.errors(fitted)) < 0.05
    assert max(abs(error) for error in dataset.left_out("model", fitted).values()) < 0.1


def test_the_ledger_is_of_the_shipped_shares():
    """The kept predictions were made with the shares and intervals that are shipped."""
    assert LEDGER["shares"] == msgspec.structs.asdict(CUDA_SHARES)
    for name, shipped in (("seen", SEEN), ("unseen", UNSEEN)):
        assert {kind: tuple(ends) for kind, ends in LEDGER["intervals"][name].items()} == shipped
    for row in LEDGER["figures"]:
        assert row["source"]
        assert row["predicted"] is not None or not row["machine"], row["id"]


def test_the_kept_summary_is_that_of_the_rows():
    """Median, share within 25 % and worst factor follow from the rows, none of which is left out."""
    errors = {row["id"]: math.log(row["without_its_model"]) for row in LEDGER["figures"] if "without_its_model" in row}
    steps = [row for row in LEDGER["figures"] if row["quantity"] in {"step_time", "forward_time"}]
    assert len(steps) == len(errors)
    kept = next(row for row in LEDGER["summary"] if row["name"] == "leave one model out")
    judged = _judged(kept["name"], errors)
    assert {name: pytest.approx(value, rel=1e-3) for name, value in judged.items() if name != "name"} == {
        name: value for name, value in kept.items() if name != "name"
    }


def test_the_page_has_every_step():
    """The page is what the ledger gives, with every step; the picture has a mark for each."""
    from benchmarks.ledger.command import _PAGE, _PICTURE

    text = page(LEDGER)
    assert text == _PAGE.read_text(encoding="utf-8")
    drawn = picture(LEDGER)
    assert drawn == _PICTURE.read_text(encoding="utf-8")
    assert drawn.count("<title>") == sum("without_its_model" in row for row in LEDGER["figures"])


def test_what_a_user_shared_becomes_figures(tmp_path):
    """Rates and kernels get a figure each, on the catalog's machine of that name; another file is one line."""
    kernel = SharedKernel(name="aten.add.Tensor", time_s=1e-3, moved_bytes=10**9)
    share = Share(
        device="NVIDIA GeForce RTX 4090",
        torch_version="2.13.0",
        measured_at="2026-11-24",
        memory_bytes=25 * 10**9,
        flops_per_s={"float32": 7e13, "float16": 1.6e14},
        rates={"memory_bytes_per_s": 9e11, "host_out_bytes_per_s": 2e10, "host_in_bytes_per_s": 2e10}
        | {"both_ways_factor": 0.9},
        kernels=(kernel,),
    )
    path = tmp_path / "share.json"
    path.write_bytes(msgspec.json.encode(share))
    found = {figure.quantity: figure for figure in figures_of_share(path)}
    assert found["matmul_fp16"].published == pytest.approx(160)
    assert found["shared_kernel"].machine == "rtx4090"
    assert isinstance(found["shared_kernel"], Figure)
    for device, name in (("NVIDIA A100-SXM4-80GB", "a100-80g"), ("Tesla T4", "t4"), ("NVIDIA L40S", "")):
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(share, device=device)))
        assert {figure.machine for figure in figures_of_share(path)} == {name}
    path.write_text("{}")
    with pytest.raises(MachineError, match="not a file of `torchdelta probe --share`"):
        figures_of_share(path)
