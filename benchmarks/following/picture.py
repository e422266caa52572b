"""Peak against step time as a picture: each way to train is a mark, lower and further left is better.

Drawn by hand as SVG, so that it needs no package. Colours are those of Okabe and Ito, which colour-blind readers tell
apart; each series has a mark of its own beside.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from benchmarks.following.contenders import FOLLOWED, NO_PREFETCH, PEERS, REACTIVE, RECORD_ONLY, in_budget
from benchmarks.following.figures import Data, cell, ratio
from benchmarks.turns import PLAIN, Interval

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, HEIGHT = 820, 480
LEFT, RIGHT, TOP, BOTTOM = 64, 230, 60, 56
_FONT = 'font-family="sans-serif" font-size="12"'
_Y_LABEL = "step time, of plain"
_LOWEST, _HIGHEST = 0.8, 1.2  # of the least and the largest median: what is shown of intervals
_ARROW = "; an arrow: the interval goes on"
_COLOURS = {
    FOLLOWED: "#0072B2",
    REACTIVE: "#D55E00",
    NO_PREFETCH: "#56B4E9",
    "checkpoint": "#009E73",
    "checkpoint-2": "#CC79A7",
    "selective": "#E69F00",
    "offload": "#000000",
    RECORD_ONLY: "#999999",
    PLAIN: "#000000",
    "bound": "#666666",
}
_NAMES = {
    FOLLOWED: "torchdelta, plan followed",
    REACTIVE: "torchdelta, reactive",
    NO_PREFETCH: "plan without prefetch",
    "checkpoint": "checkpoint, every block",
    "checkpoint-2": "checkpoint, every 2nd block",
    "selective": "selective checkpoint",
    "offload": "offload all to the disk tier",
    RECORD_ONLY: "a budget in which nothing leaves",
    PLAIN: "plain",
    "bound": "no plan is faster (bound)",
}
_MARKS = {FOLLOWED: "circle", REACTIVE: "square", NO_PREFETCH: "hollow", RECORD_ONLY: "plus", PLAIN: "star"}
_PEER_MARKS = dict(zip(PEERS, ("up", "down", "diamond", "cross"), strict=True))


@dataclass(kw_only=True)
class Series:
    """Points of one way to train: share of plain's peak, and step time over plain's."""

    name: str
    points: list[tuple[float, Interval]] = field(default_factory=list)


def svg(model: str, data: Data, caption: str) -> str:
    """Return the picture of one model."""
    series = _series(data)
    everything = [point for each in series for point in each.points]
    if not everything:
        return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"></svg>\n'
    shares = [share for share, _ in everything]
    medians = [interval.median for _, interval in everything]
    # One round in which the machine stood still must not flatten all others: what goes on beyond ends in an arrow.
    lowest, highest = min(medians) * _LOWEST, max(medians) * _HIGHEST
    times = [min(max(b, lowest), highest) for _, interval in everything for b in (interval.low, interval.high)]
    x_ticks, y_ticks = _ticks(min(shares), max(shares)), _ticks(min(1.0, *times), max(times))
    across = _scale(x_ticks, LEFT, WIDTH - RIGHT)
    up = _scale(y_ticks, HEIGHT - BOTTOM, TOP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {_FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="16">{escape(model)}: peak memory and step time, as shares of plain</text>',
        f'<text x="{LEFT}" y="42" font-size="11" fill="#555">{escape(caption + _ARROW)}</text>',
        *_axes(x_ticks, y_ticks, across, up),
    ]
    for row, each in enumerate(series):
        lines += _draw(each, across, up)
        y = TOP + 14 + 22 * row
        colour = _COLOURS[each.name]
        if each.name == "bound":
            lines.append(
                f'<path d="M{WIDTH - RIGHT + 14} {y} h20" stroke="{colour}" stroke-width="1.5" stroke-dasharray="2 3"/>'
            )
        else:
            lines.append(_mark(each.name, WIDTH - RIGHT + 24, y))
        lines.append(f'<text x="{WIDTH - RIGHT + 40}" y="{y + 4}">{escape(_NAMES[each.name])}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _series(data: Data) -> list[Series]:
    plain_bytes = data["peaks"][PLAIN]
    found = {name: Series(name=name) for name in _NAMES}
    for label, budget_bytes in data["budgets"].items():
        share = budget_bytes / plain_bytes
        for name in (FOLLOWED, REACTIVE, NO_PREFETCH):
            interval = ratio(data, in_budget(name, label))
            if interval is not None:
                found[name].points.append((share, interval))
        least = cell(data, label).bound
        if least is not None:
            found["bound"].points.append((share, Interval(median=least, low=least, high=least, num_samples=1)))
    for peer in PEERS:
        interval = ratio(data, peer)
        if interval is not None:
            found[peer].points.append((data["peaks"][peer] / plain_bytes, interval))
    recorded = ratio(data, RECORD_ONLY)
    if recorded is not None:
        found[RECORD_ONLY].points.append((1.0, recorded))
    found[PLAIN].points.append((1.0, Interval(median=1.0, low=1.0, high=1.0, num_samples=1)))
    for each in found.values():
        each.points.sort(key=lambda point: point[0])
    return [each for each in found.values() if each.points]


def _draw(series: Series, across: Callable[[float], float], up: Callable[[float], float]) -> list[str]:
    """Return a line through the points of ours, an interval and a mark at each point."""
    colour = _COLOURS[series.name]
    places = [(across(share), up(interval.median)) for share, interval in series.points]
    lines: list[str] = []
    if len(places) > 1:
        path = " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dash = {"bound": ' stroke-dasharray="2 3"', NO_PREFETCH: ' stroke-dasharray="6 3"'}.get(series.name, "")
        lines.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>')
    if series.name == "bound":
        return lines
    for (share, interval), (x, y) in zip(series.points, places, strict=True):
        if interval.high > interval.low:
            lines.append(
                f'<path d="{_interval(x, up(interval.low), up(interval.high))}" fill="none" stroke="{colour}"/>'
            )
        title = f"{_NAMES[series.name]}: peak {share:.1%}, time {interval}"
        lines.append(f"<g><title>{escape(title)}</title>{_mark(series.name, x, y)}</g>")
    return lines


def _interval(x: float, low_y: float, high_y: float) -> str:
    """Return the path of an interval, with an arrow at each end that lies outside of the picture."""
    bottom, top = min(low_y, HEIGHT - BOTTOM), max(high_y, TOP)
    path = f"M{x:.1f} {bottom:.1f} V{top:.1f}"
    for end, outside, away in ((bottom, low_y, -6), (top, high_y, 6)):
        if end != outside:
            path += f" M{x - 4:.1f} {end + away:.1f} L{x:.1f} {end:.1f} L{x + 4:.1f} {end + away:.1f}"
    return path


def _mark(name: str, x: float, y: float) -> str:
    """Return the mark of a series around a point."""
    colour = _COLOURS[name]
    kind = _MARKS.get(name) or _PEER_MARKS[name]
    shapes = {
        "up": "M{x} {t} L{r} {b} H{l} Z",
        "down": "M{x} {b} L{r} {t} H{l} Z",
        "diamond": "M{x} {t} L{r} {y} L{x} {b} L{l} {y} Z",
        "square": "M{l} {t} H{r} V{b} H{l} Z",
        "cross": "M{l} {t} L{r} {b} M{l} {b} L{r} {t}",
        "plus": "M{x} {t} V{b} M{l} {y} H{r}",
        "star": "M{x} {t} V{b} M{l} {y} H{r} M{l} {t} L{r} {b} M{l} {b} L{r} {t}",
    }
    if kind in ("circle", "hollow"):
        fill = colour if kind == "circle" else "white"
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>'
    sides = {"x": x, "y": y, "l": x - 5, "r": x + 5, "t": y - 5, "b": y + 5}
    path = shapes[kind].format(**{side: f"{value:.1f}" for side, value in sides.items()})
    return f'<path d="{path}" fill="{colour}" stroke="{colour}" stroke-width="2"/>'


def _axes(
    x_ticks: list[float], y_ticks: list[float], across: Callable[[float], float], up: Callable[[float], float]
) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    lines: list[str] = []
    for tick in x_ticks:
        x = across(tick)
        lines.append(f'<path d="M{x:.1f} {TOP} V{bottom}" stroke="#e4e4e4"/>')
        lines.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:.0%}</text>')
    for tick in y_ticks:
        y = up(tick)
        lines.append(f'<path d="M{LEFT} {y:.1f} H{right}" stroke="#e4e4e4"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.3g}</text>')
    middle = (LEFT + right) / 2
    return [
        *lines,
        f'<path d="M{LEFT} {TOP} V{bottom} H{right}" fill="none" stroke="black"/>',
        f'<text x="{middle:.0f}" y="{bottom + 40}" text-anchor="middle">peak memory, of the plain peak</text>',
        f'<text transform="translate(18 {(TOP + bottom) / 2:.0f}) rotate(-90)" text-anchor="middle">{_Y_LABEL}</text>',
    ]


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers, four to eight of them, that enclose an interval."""
    span = max(high - low, 0.05)
    rough = span / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    first = math.floor(low / step)
    ticks = [first * step]
    for index in itertools.count(first + 1):
        ticks.append(index * step)
        if ticks[-1] >= high:
            return ticks
    raise AssertionError


def _scale(ticks: list[float], first: float, last: float) -> Callable[[float], float]:
    low, high = ticks[0], ticks[-1]
    return lambda value: first + (value - low) / (high - low) * (last - first)
