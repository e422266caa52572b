"""Draws the README's chart from `results/policies.json`: `python -m benchmarks.chart`.

Step time against budget for each model, ours beside recomputing only and swapping only. Plain SVG, written by hand:
three small panels are not worth a plotting library.
"""

from __future__ import annotations

import json
from typing import Any, Final

from benchmarks.results import REPOSITORY

SOURCE: Final = REPOSITORY / "benchmarks" / "results" / "policies.json"
TARGET: Final = REPOSITORY / "docs" / "images" / "step-time.svg"
# Colours that colour-blind readers tell apart (Okabe and Ito), and markers that a black-and-white print does.
SERIES: Final = (
    ("torchdelta", "torchdelta (default)", "#0072B2", "circle"),
    ("recompute-only", "recompute only", "#D55E00", "square"),
    ("swap-only", "swap only (disk)", "#009E73", "triangle"),
)
PANEL_WIDTH: Final = 270
PANEL_HEIGHT: Final = 230
LEFT, TOP, GAP = 46, 44, 48
LEAST_RATIO, STEP_RATIO = 1.0, 0.2
SHARES: Final = (0.8, 0.6, 0.5, 0.4)


def main() -> None:
    """Draw the chart."""
    stored = json.loads(SOURCE.read_text(encoding="utf-8"))
    models: dict[str, Any] = {name: item for name, item in stored["data"].items() if "0.5" in item}
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(draw(models, stored["environment"]), encoding="utf-8")
    print(f"drew {TARGET.relative_to(REPOSITORY)}")


def draw(models: dict[str, Any], environment: dict[str, Any]) -> str:
    """Return the SVG."""
    points = {name: {policy: series(contests, policy) for policy, *_ in SERIES} for name, contests in models.items()}
    highest = max(ratio for panel in points.values() for line in panel.values() for _, ratio in line)
    highest = LEAST_RATIO + STEP_RATIO * (int((highest - LEAST_RATIO) / STEP_RATIO) + 1)
    width, height = LEFT + len(models) * (PANEL_WIDTH + GAP), TOP + PANEL_HEIGHT + 78
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="16" font-weight="bold">Step time against plain, by budget (lower is better)</text>',
    ]
    for index, (name, panel) in enumerate(points.items()):
        parts += panel_of(name, panel, LEFT + index * (PANEL_WIDTH + GAP), highest)
    for index, (_, label, colour, marker) in enumerate(SERIES):
        x, y = LEFT + index * 190, height - 26
        parts += [mark(marker, x + 6, y - 4, colour), f'<text x="{x + 18}" y="{y}">{label}</text>']
    machine = f"{environment['cpu']}, {environment['num_cores']} cores, torch {environment['torch']}"
    conditions = f"{machine}; raw figures: benchmarks/results/policies.json"
    parts.append(f'<text x="{LEFT}" y="{height - 6}" fill="#555555" font-size="10">{conditions}</text>')
    return "\n".join([*parts, "</svg>\n"])


def series(contests: dict[str, Any], policy: str) -> list[tuple[float, float]]:
    """Return (share of the plain peak, step time against plain) for the budgets that a policy could hold."""
    found: list[tuple[float, float]] = []
    for share in SHARES:
        intervals = contests.get(str(share), {}).get("intervals", {})
        if policy in intervals:
            found.append((share, intervals[policy]["wall"]["median"]))
    return found


def panel_of(name: str, panel: dict[str, list[tuple[float, float]]], left: float, highest: float) -> list[str]:
    """Return one model's panel."""
    bottom = TOP + PANEL_HEIGHT

    def x_of(share: float) -> float:
        return left + (SHARES[0] - share) / (SHARES[0] - SHARES[-1]) * (PANEL_WIDTH - 24) + 12

    def y_of(ratio: float) -> float:
        return bottom - (ratio - LEAST_RATIO) / (highest - LEAST_RATIO) * PANEL_HEIGHT

    parts = [f'<text x="{left + PANEL_WIDTH / 2}" y="{TOP - 10}" text-anchor="middle">{name}</text>']
    for step in range(round((highest - LEAST_RATIO) / STEP_RATIO) + 1):
        ratio = LEAST_RATIO + step * STEP_RATIO
        y = y_of(ratio)
        parts.append(f'<line x1="{left}" x2="{left + PANEL_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555555">{ratio:.1f}</text>')
    for share in SHARES:
        label = f"{share:.0%}"
        parts.append(
            f'<text x="{x_of(share):.1f}" y="{bottom + 16}" text-anchor="middle" fill="#555555">{label}</text>'
        )
    for policy, _, colour, marker in SERIES:
        line = [(x_of(share), y_of(ratio)) for share, ratio in panel[policy]]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [mark(marker, x, y, colour) for x, y in line]
    return parts


def mark(kind: str, x: float, y: float, colour: str) -> str:
    """Return one marker."""
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>'
    if kind == "square":
        return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{colour}"/>'
    return f'<path d="M {x:.1f} {y - 5:.1f} l 5 9 l -10 0 z" fill="{colour}"/>'


if __name__ == "__main__":
    main()
