"""Writes `docs/fidelity.md` and its picture from the ledger."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final
from xml.sax.saxutils import escape

from benchmarks.outcome import format_table

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["page", "picture"]

_WIDTH, _HEIGHT = 640, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 50, 50
_FONT: Final = 'font-family="sans-serif" font-size="12"'
_COLOURS: Final = {  # Okabe and Ito: colour-blind readers tell them apart
    "rtx3090": "#0072B2",
    "rtx4090": "#56B4E9",
    "rtx5090": "#009E73",
    "v100": "#E69F00",
    "a100": "#D55E00",
    "h100": "#CC79A7",
}

_HEAD: Final = """# How accurate the predictions are

<!-- made by `python -m benchmarks ledger`: change benchmarks/ledger/page.py and run it again -->

torchdelta plans for GPUs that are not there. This page compares what it predicts with what others measured: every
figure that was found, none left out because it is bad. The raw table, with files, commits and licences of the
sources, is [benchmarks/results/ledger.json](../benchmarks/results/ledger.json).
Nothing here was measured by us on a GPU.

```{figure} images/fidelity.svg
:alt: Predicted against published step times on logarithmic axes; most points lie within 25 % of the diagonal.

Each step was predicted by shares that were fitted without its model.
```

## Step times

The time of an op is a roofline with one share for each kind of kernel (`torchdelta/machine/kernels.py`). Its 16
parameters are the same for all machines and all models; a machine adds only printed peaks and what large products and
streaming kernels reach of them. They were fitted to the steps below, so the fair figures are those of fits that have
not seen the step:
"""

_MEMORY: Final = """
## Memory
"""

_ADD: Final = """
## Add a GPU

    torchdelta probe --share my-gpu.json

measures rates and a dozen kernels in about a minute and writes a file of about 2 KB: the device's name, versions of
torch and CUDA, and times; no names of persons or hosts. Sent to the project, it is added with
`python -m benchmarks ledger --add my-gpu.json`, and every prediction is made again.

`python -m benchmarks ledger` makes this page (it needs timm, transformers and scipy); with `--fit` it also prints the
shares that fit best.
"""


def page(ledger: dict[str, Any]) -> str:
    """Return the page of a ledger."""
    figures: list[dict[str, Any]] = ledger["figures"]
    steps = [figure for figure in figures if figure["quantity"] in {"step_time", "forward_time"}]
    parts = [_HEAD, _summary(ledger["summary"])]
    parts.append("\n*First figures*: without the RegNets that were added on 2026-11-25.\n")
    parts.append(_sources(ledger))
    parts.append(
        "\nThe worst, each by a fit without its model. *Frozen* is predicted over published with the shares as they"
        "\nare shipped; *without* is the same by a fit without any step of this model.\n"
    )
    worst = sorted(steps, key=lambda figure: -abs(math.log(figure["without_its_model"])))[:8]
    parts.append(_steps(worst))
    parts.append(_why())
    parts.append(_MEMORY)
    parts.append(_memory(ledger))
    parts.append("\n## Rates and parts of steps\n")
    parts.append(
        "\nRates of large products and of streaming kernels are where the catalog's shares are from: their errors say"
        "\nhow well a table of round shares fits, not how well it predicts. Kernel times are of one profile of"
        "\nResNet-50.\n"
    )
    known = {"step_time", "forward_time", "peak_allocated", "nvidia_smi_less_context", "largest_batch"}
    parts.append(_others([figure for figure in figures if figure["quantity"] not in known]))
    parts.append("\n## All steps\n")
    parts.append(_steps(steps))
    parts.append(_ADD)
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    table = [
        [
            row["name"],
            str(row["count"]),
            f"{row['median']:.1%}",
            f"{row['within_25_percent']:.0%}",
            f"x{row['worst']:.2f}",
            f"{row['mean']:.2f}",
            f"x{row['spread']:.2f}",
        ]
        for row in rows
    ]
    header = ("steps", "number", "median error", "within 25 %", "worst", "mean ratio", "spread")
    return format_table(header, table)


def _sources(ledger: dict[str, Any]) -> str:
    rows = [
        [row["source"], str(row["count"]), row["licence"] or "facts", f"{row['mean']:.2f}", f"{row['median']:.0%}"]
        for row in ledger["sources"]
    ]
    header = ("steps published by", "number", "licence", "mean ratio, it left out", "median error")
    return "\n" + format_table(header, rows)


def _why() -> str:
    return """
What is known about them: in RegNets with channels innermost, under torch 1.12, most grouped convolutions ran without
tensor cores, and a step took up to 3.5 times as long as with channels outermost. The publisher of the figures reports
the same for the torch version before (pytorch/pytorch#70954). The model prices these convolutions as slow where groups
are wider than 8 channels and their number is no multiple of 32, which excludes ResNeXts; it does not know which widths
are slower than others. Forward passes under torch 2.4 are not slow any more, so no machine of the catalog has slow
grouped convolutions. Of the RegNets, only regnety_160 was among the first figures. The others (all RegNets in both
tables of torch 1.12) were added on 2026-11-25, to see whether its error is typical. Two sources differ by 37 % in the
time of BERT-Large a sample on the same GPU. A ResNet-50 at 2,800 images a second may have waited for its data.
"""


def _memory(ledger: dict[str, Any]) -> str:
    rows = [
        [
            figure["id"],
            f"{figure['published']:.4g} {figure['unit']}",
            f"{figure['predicted']:.4g}",
            f"{figure['predicted'] / figure['published']:.3f}",
            figure["note"],
        ]
        for figure in ledger["figures"]
        if figure["quantity"] in {"peak_allocated", "nvidia_smi_less_context"}
    ]
    cases = ledger["batch_cases"]
    wrong = [case for case in cases if case["ran"] != case["fits"]]
    right = len(cases) - len(wrong)
    text = format_table(("peak", "published", "predicted", "ratio", "note"), rows)
    text += (
        f"\n\nOf {len(cases)} batches that ran on an RTX 3090 or did not (pytorch-image-models), {right} are predicted "
        f"right ({right / len(cases):.1%})."
    )
    if wrong:
        named = ", ".join(
            f"{case['id']} at {case['batch']} ({'ran' if case['ran'] else 'did not run'}, predicted "
            f"{case['peak_bytes'] / 2**30:.2f} GiB)"
            for case in wrong
        )
        text += f" Wrong: {named}."
    return text


def _steps(figures: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            _step_name(figure),
            figure["machine"],
            f"{figure['published']:.4g}",
            f"{figure['predicted']:.4g}",
            f"{figure['predicted'] / figure['published']:.2f}",
            f"{figure['without_its_model']:.2f}",
            figure["source"].split("/")[-1],
        ]
        for figure in figures
    ]
    return format_table(("step", "machine", "published ms", "predicted ms", "frozen", "without", "source"), rows)


def _step_name(figure: dict[str, Any]) -> str:
    step = figure["step"]
    words = [step["model"] if step["family"] == "timm" else f"{step['family']} {step['model']}"]
    words += [f"batch {step['batch']}", step["precision"], step.get("layout", "")]
    if step.get("forward_only"):
        words.append("forward")
    return " ".join(word for word in words if word)


def _others(figures: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            figure["id"].split("/", 1)[-1] if figure["quantity"] == "kernel_time" else figure["quantity"],
            figure["gpu"],
            f"{figure['published']:.4g} {figure['unit']}",
            "not in the catalog" if figure["predicted"] is None else f"{figure['predicted']:.4g}",
            "" if figure["predicted"] is None else f"{figure['predicted'] / figure['published']:.2f}",
            figure["source"].split("/")[-1],
        ]
        for figure in figures
    ]
    return format_table(("what", "GPU", "published", "predicted", "ratio", "source"), rows)


def picture(ledger: dict[str, Any]) -> str:
    """Return predicted against published step times, log-log, as SVG."""
    steps = [figure for figure in ledger["figures"] if figure.get("without_its_model") is not None]
    times = [figure["published"] for figure in steps]
    times += [figure["published"] * figure["without_its_model"] for figure in steps]
    low, high = (math.log10(min(times)) - 0.05, math.log10(max(times)) + 0.05) if times else (1.0, 3.0)

    def across(value_ms: float) -> float:
        return _LEFT + (math.log10(value_ms) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def up(value_ms: float) -> float:
        return _HEIGHT - _BOTTOM - (math.log10(value_ms) - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    ends = (10**low, 10**high)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" {_FONT}>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">Predicted against published: {len(steps)} steps</text>',
        f'<text x="{_LEFT}" y="39" font-size="11" fill="#555">each by a fit without its model; the band is 25 %</text>',
    ]
    x0, x1, y0, y1 = _LEFT, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM, _TOP
    lines.append(f'<clipPath id="inside"><rect x="{x0}" y="{y1}" width="{x1 - x0}" height="{y0 - y1}"/></clipPath>')
    corners = " ".join(
        f"{across(x):.1f},{up(x * factor):.1f}" for factor, order in ((1.25, 1), (0.75, -1)) for x in ends[::order]
    )
    lines.append(f'<polygon points="{corners}" fill="#eee" clip-path="url(#inside)"/>')
    diagonal = (across(ends[0]), up(ends[0]), across(ends[1]), up(ends[1]))
    lines.append('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" stroke="#888"/>'.format(*diagonal))
    ticks = [tick for tick in (20, 50, 100, 200, 500, 1000, 2000, 5000) if ends[0] <= tick <= ends[1]]
    for tick in ticks:
        lines += [
            f'<line x1="{across(tick):.1f}" y1="{y0}" x2="{across(tick):.1f}" y2="{y0 + 5}" stroke="#333"/>',
            f'<text x="{across(tick):.1f}" y="{y0 + 18}" text-anchor="middle">{tick}</text>',
            f'<line x1="{x0 - 5}" y1="{up(tick):.1f}" x2="{x0}" y2="{up(tick):.1f}" stroke="#333"/>',
            f'<text x="{x0 - 8}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick}</text>',
        ]
    lines.append(f'<rect x="{x0}" y="{y1}" width="{x1 - x0}" height="{y0 - y1}" fill="none" stroke="#333"/>')
    lines.append(f'<text x="{(x0 + x1) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">published, ms</text>')
    middle = (y0 + y1) / 2
    lines.append(
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">predicted, ms</text>'
    )
    for figure in steps:
        colour = _COLOURS.get(figure["machine"].split("-")[0], "#000000")
        x, y = across(figure["published"]), up(figure["published"] * figure["without_its_model"])
        lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}" fill-opacity="0.75">'
            f"<title>{escape(_step_name(figure))}</title></circle>"
        )
    for place, (name, colour) in enumerate(_COLOURS.items()):
        y = y1 + 16 + 16 * place
        lines.append(f'<circle cx="{x0 + 14}" cy="{y}" r="4" fill="{colour}"/>')
        lines.append(f'<text x="{x0 + 24}" y="{y + 4}">{name}</text>')
    lines.append("</svg>")
    return "\n".join(lines) + "\n"
