"""The command line of the ledger: `python -m benchmarks ledger`."""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from tqdm import tqdm

from benchmarks.launch import REPOSITORY
from benchmarks.ledger.figures import Figure
from benchmarks.ledger.page import page, picture
from benchmarks.ledger.shares import figures_of_share
from benchmarks.outcome import Outcome
from benchmarks.results import RESULTS
from torchdelta.machine.interval import SEEN, UNSEEN, Family
from torchdelta.machine.kernels import CUDA_SHARES, KernelShares

if TYPE_CHECKING:
    import argparse
    from collections.abc import Container, Iterable, Sequence

    from benchmarks.ledger.fitting import Dataset

_LEDGER: Final = RESULTS / "ledger.json"
_PAGE: Final = REPOSITORY / "docs" / "fidelity.md"
_PICTURE: Final = REPOSITORY / "docs" / "images" / "fidelity.svg"
_TABLES: Final = {"model": "one model", "gpu": "one GPU", "source": "one source"}
_GOALS: Final = {"model": (0.10, 0.90, 1.8), "gpu": (0.15, 0.0, math.inf)}
"""Median error at most, share within 25 % at least, worst factor at most: set for the first figures."""
_CLOSE: Final = 0.25
_DIGITS: Final = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the ledger."""
    parser.add_argument("--add", nargs="+", type=Path, default=[], help="files of `torchdelta probe --share`")
    parser.add_argument("--fit", action="store_true", help="print the shares that fit best, and the intervals")


def run(options: argparse.Namespace) -> Outcome:
    """Predict every figure, judge the predictions, and write page and picture."""
    outcome = Outcome()
    figures = _published()
    known = {figure.id for figure in figures}
    for path in options.add:
        figures += [figure for figure in figures_of_share(path) if figure.id not in known]
    if options.quick:
        figures = figures[::20]
    dataset = _dataset(figures)
    fitted = dataset.fit([True] * len(dataset.timed))
    left_out = {group: dataset.left_out(group, fitted) for group in _TABLES}
    if options.fit:
        todays = [figure for figure in figures if figure.id not in dataset.of_old_kernels]
        _print_fit(fitted, left_out, todays)
    outcome.data = _ledger(figures, dataset, left_out)
    _check(outcome, fitted)
    if not (options.no_write or options.quick):
        _PAGE.write_text(page(outcome.data), encoding="utf-8")
        _PICTURE.write_text(picture(outcome.data), encoding="utf-8")
    return outcome


def _published() -> list[Figure]:
    """Return the figures of the ledger that is there, without its predictions."""
    names = {field.name for field in msgspec.structs.fields(Figure)}
    rows: Iterable[dict[str, Any]] = json.loads(_LEDGER.read_text(encoding="utf-8"))["data"]["figures"]
    return [msgspec.convert({name: row[name] for name in row.keys() & names}, type=Figure) for row in rows]


def _dataset(figures: Sequence[Figure]) -> Dataset:
    # Late: without timm and scipy the other benchmarks still run.
    from benchmarks.ledger.evaluate import FITTED_PARTS, timed_of
    from benchmarks.ledger.fitting import Dataset

    wanted = [
        figure
        for figure in figures
        if figure.quantity in {"step_time", "forward_time"} or figure.id.rsplit("/", 1)[-1] in FITTED_PARTS
    ]
    found = (timed_of(figure) for figure in tqdm(wanted, file=sys.stderr, desc="tracing"))
    return Dataset([timed for timed in found if timed is not None])


def _ledger(figures: Sequence[Figure], dataset: Dataset, left_out: dict[str, dict[str, float]]) -> dict[str, Any]:
    from benchmarks.ledger.evaluate import batch_cases, predicted

    frozen = dict(zip((one.id for one in dataset.timed), dataset.errors(CUDA_SHARES), strict=True))
    rows: list[dict[str, Any]] = []
    cases: list[dict[str, Any]] = []
    for figure in tqdm(figures, file=sys.stderr, desc="predicting"):
        value = predicted(figure)
        row = msgspec.to_builtins(figure) | {"predicted": None if value is None else _rounded(value)}
        row["ratio"] = None if value is None else _rounded(value / figure.published)
        if figure.id in left_out["model"]:
            row |= {f"without_its_{group}": _rounded(math.exp(found[figure.id])) for group, found in left_out.items()}
        rows.append(row)
        if figure.quantity == "largest_batch":
            cases += [msgspec.to_builtins(case) for case in batch_cases(figure)]
    steps = {one.id: float(frozen[one.id]) for one in dataset.timed if one.is_step}
    summary = [_judged("as shipped (fitted to all of them)", steps)]
    summary += [_judged(f"leave {name} out", left_out[group]) for group, name in _TABLES.items()]
    first = {figure.id for figure in figures if not figure.added}
    summary += [
        _judged(f"leave {name} out, first figures alone", _only(left_out[group], first))
        for group, name in _TABLES.items()
        if len(first) < len(figures)
    ]
    return {
        "shares": msgspec.structs.asdict(CUDA_SHARES),
        "summary": summary,
        "sources": _sources(figures, left_out["source"]),
        "gpus": _gpus(dataset, left_out["gpu"]),
        "batch_cases": cases,
        "figures": rows,
    }


def _only(errors: dict[str, float], ids: Container[str]) -> dict[str, float]:
    return {id_: error for id_, error in errors.items() if id_ in ids}


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _judged(name: str, errors: dict[str, float]) -> dict[str, Any]:
    """Return how far predictions are off, given the logarithms of predicted over published."""
    values = list(errors.values())
    shares = [abs(math.expm1(value)) for value in values]
    return {
        "name": name,
        "count": len(values),
        "median": _rounded(statistics.median(shares)),
        "within_25_percent": _rounded(sum(share <= _CLOSE for share in shares) / len(shares)),
        "worst": _rounded(math.exp(max(abs(value) for value in values))),
        "mean": _rounded(math.exp(statistics.fmean(values))),
        "spread": _rounded(math.exp(statistics.pstdev(values))),
    }


def _sources(figures: Sequence[Figure], errors: dict[str, float]) -> list[dict[str, Any]]:
    steps = [figure for figure in figures if figure.id in errors]
    found: list[dict[str, Any]] = []
    for source in dict.fromkeys(figure.source for figure in steps):
        own = [figure for figure in steps if figure.source == source]
        judged = _judged(source, {figure.id: errors[figure.id] for figure in own})
        found.append({"source": source, "licence": own[0].licence, **judged})
    return found


def _gpus(dataset: Dataset, errors: dict[str, float]) -> list[dict[str, Any]]:
    of = {one.id: str(one.groups["gpu"]) for one in dataset.timed if one.is_step}
    names = dict.fromkeys(of.values())
    return [_judged(name, {id_: error for id_, error in errors.items() if of[id_] == name}) for name in names]


def _print_fit(fitted: KernelShares, left_out: dict[str, dict[str, float]], figures: Sequence[Figure]) -> None:
    print("CUDA_SHARES: Final = KernelShares(")
    for name, value in msgspec.structs.asdict(fitted).items():
        print(f"    {name}={value:.3g},")
    print(")")
    print("SEEN", _intervals([left_out["model"]], figures, 10, 90))
    print("UNSEEN", _intervals([left_out["gpu"], left_out["source"]], figures, 5, 95))


def _intervals(
    errors: Sequence[dict[str, float]], figures: Sequence[Figure], low: int, high: int
) -> dict[Family, tuple[float, float]]:
    """Return between which percentiles of published over predicted the steps of each kind lie."""
    from benchmarks.ledger.evaluate import kind_of_step, machine_of

    by_kind: dict[Family, list[float]] = {"convolution": [], "product": []}
    for figure in figures:
        if figure.id in errors[0] and figure.step is not None:
            kind = kind_of_step(figure.step, machine_of(figure))
            by_kind[kind] += [math.exp(-some[figure.id]) for some in errors]
    found: dict[Family, tuple[float, float]] = {}
    for kind, values in by_kind.items():
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        found[kind] = (round(cuts[low - 1], 2), round(cuts[high - 1], 2))
    return found


def _check(outcome: Outcome, fitted: KernelShares) -> None:
    for judged in outcome.data["summary"]:
        goal = next(
            (_GOALS[group] for group in _GOALS if judged["name"].startswith(f"leave {_TABLES[group]} out")), None
        )
        if goal is None:
            continue
        median, within, worst = goal
        name = judged["name"]
        detail = f"{judged['median']:.1%}, wanted at most {median:.0%}"
        outcome.check(f"{name}: median error", detail, passed=judged["median"] <= median, required=False)
        if within:
            detail = f"{judged['within_25_percent']:.1%}, wanted {within:.0%}"
            passed = judged["within_25_percent"] >= within
            outcome.check(f"{name}: within 25 %", detail, passed=passed, required=False)
            detail = f"x{judged['worst']:.2f}, wanted at most x{worst}"
            outcome.check(f"{name}: worst", detail, passed=judged["worst"] <= worst, required=False)
    cases = outcome.data["batch_cases"]
    if cases:
        right = sum(case["ran"] == case["fits"] for case in cases) / len(cases)
        detail = f"{right:.1%} of {len(cases)}, wanted 98%"
        outcome.check("batches that ran or did not", detail, passed=right >= 0.98, required=False)
    peaks = [row for row in outcome.data["figures"] if row["id"].startswith("cs336/medium")]
    if peaks:
        worst = max(abs(row["ratio"] - 1) for row in peaks)
        outcome.check("peaks of snapshots", f"within {worst:.2%}, wanted 1%", passed=worst <= 0.01, required=False)
    shipped, best = msgspec.structs.asdict(CUDA_SHARES), msgspec.structs.asdict(fitted)
    off = max(abs(math.log(shipped[name] / best[name])) for name in shipped)
    outcome.check("the shipped shares are those of the fit", f"within {off:.1%}", passed=off <= 0.02, required=False)
    outcome.data["intervals"] = {"seen": dict(SEEN), "unseen": dict(UNSEEN)}
