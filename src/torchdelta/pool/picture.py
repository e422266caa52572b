"""A placement as a picture: time to the right, address upwards, one rectangle a life."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape, quoteattr

from torchdelta.pool.model import footprint_bytes
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from torchdelta.pool.model import Instance

_WIDTH: Final = 1200
_HEIGHT: Final = 700
_MARGIN: Final = 64
_MOST_DRAWN: Final = 20_000  # the largest areas; a browser shows no more
_LEAST_EDGED: Final = 3.0  # pixels: thinner ones would be all edge
_EDGE: Final = ' stroke="white" stroke-width="0.5"'
_COLOURS: Final = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")


def svg(instance: Instance, offsets_bytes: NDArray[np.int64], *, lower_bound_bytes: int, title: str) -> str:
    """Return the picture. Names and figures of a life show when the pointer rests on it."""
    footprint = max(footprint_bytes(instance, offsets_bytes), 1)
    placed = instance.is_placed.nonzero()[0]
    if not len(placed):
        return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"></svg>\n'
    first, last = int(instance.starts[placed].min()), int(instance.ends[placed].max())
    across, up = (_WIDTH - 2 * _MARGIN) / max(last - first, 1), (_HEIGHT - 2 * _MARGIN) / footprint
    bottom = _HEIGHT - _MARGIN
    # The distance between two moments may not fit into 64 bits.
    areas = (instance.ends.astype(float) - instance.starts) * instance.sizes_bytes
    drawn = sorted(placed.tolist(), key=lambda life: -areas[life])[:_MOST_DRAWN]
    caption = f"footprint {format_bytes(footprint)}, lower bound {format_bytes(lower_bound_bytes)}, {len(placed)} lives"
    if len(drawn) < len(placed):
        caption += f", the {len(drawn)} largest drawn"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_MARGIN}" y="28" font-size="18">{escape(title)}</text>',
        f'<text x="{_MARGIN}" y="48" font-size="13" fill="#555">{caption}</text>',
    ]
    for life in drawn:
        start, end = int(instance.starts[life]), int(instance.ends[life])
        x, width = _MARGIN + (start - first) * across, end - start
        height = instance.sizes_bytes[life] * up
        y = bottom - offsets_bytes[life] * up - height
        label = (
            f"{instance.ids[life]}: {format_bytes(int(instance.sizes_bytes[life]))} at {int(offsets_bytes[life])}, "
            f"moments {start} to {end}"
        )
        lines.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width * across, 0.1):.2f}" height="{max(height, 0.1):.2f}" '
            f'fill="{_COLOURS[life % len(_COLOURS)]}"{_EDGE if height > _LEAST_EDGED else ""}>'
            f"<title>{escape(label)}</title></rect>"
        )
    bound_y = bottom - lower_bound_bytes * up
    right = _WIDTH - _MARGIN
    lines += [
        f'<line x1="{_MARGIN}" x2="{right}" y1="{bottom}" y2="{bottom}" stroke="black"/>',
        f'<line x1="{_MARGIN}" x2="{_MARGIN}" y1="{_MARGIN}" y2="{bottom}" stroke="black"/>',
        f'<path d="M{_MARGIN} {bound_y:.2f} H{right}" stroke="black" stroke-dasharray="6 4"/>',
        f'<text x={quoteattr(str(right))} y="{bottom + 24}" font-size="13" text-anchor="end">moment {last}</text>',
        f'<text x="{_MARGIN}" y="{bottom + 24}" font-size="13">moment {first}</text>',
        f'<text x="{_MARGIN - 8}" y="{bottom}" font-size="13" text-anchor="end">0</text>',
        f'<text x="{_MARGIN - 8}" y="{_MARGIN + 4}" font-size="13" text-anchor="end">{format_bytes(footprint)}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
