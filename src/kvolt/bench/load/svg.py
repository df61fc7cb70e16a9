"""Line and scatter plots as SVG text. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import msgspec

_WIDTH, _HEIGHT = 460, 250
"""About the displayed size, so that font sizes are true."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 34, 38
_COLOURS = ("#3b82f6", "#dc2626", "#059669", "#d97706", "#7c3aed")
_NUM_TICKS = 5

Point = tuple[float, float]


class Series(msgspec.Struct, frozen=True):
    """A named line or scatter series."""

    name: str
    points: Sequence[Point]
    as_line: bool = True


def plot(
    title: str, x_label: str, y_label: str, series: Sequence[Series], y_limit: float | None = None
) -> str:
    """One chart with axes from zero and the unit behind the title. `y_limit` is drawn as a line."""
    points = [point for each in series for point in each.points]
    x_max = max((x for x, _ in points), default=0.0)
    y_max = max((y for _, y in points), default=0.0)
    x_ticks, y_ticks = ticks(x_max), ticks(max(y_max, y_limit or 0.0))
    x_scale = (_WIDTH - _LEFT - _RIGHT) / x_ticks[-1]
    y_scale = (_HEIGHT - _TOP - _BOTTOM) / y_ticks[-1]

    def place(point: Point) -> tuple[float, float]:
        return _LEFT + point[0] * x_scale, _HEIGHT - _BOTTOM - point[1] * y_scale

    unit = "" if y_label.casefold() in title.casefold() else escape(y_label)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">',
        f"<title>{escape(title)}</title>",
        f'<text x="4" y="16" class="title">{escape(title)} <tspan class="unit">{unit}</tspan></text>',
    ]
    for tick in y_ticks:
        x, y = place((0.0, tick))
        parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for tick in x_ticks:
        x, y = place((tick, 0.0))
        parts.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{short(tick)}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">{escape(x_label)}</text>')
    if y_limit is not None:
        _, y = place((0.0, y_limit))
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" class="limit"/>')
        label_y = y - 4 if y > _TOP + 12 else y + 12  # above the line but below the title
        parts.append(f'<text x="{_LEFT + 4}" y="{label_y:.1f}" class="limit">limit {short(y_limit)}</text>')
    legend_x = _WIDTH - _RIGHT
    for number, each in reversed(list(enumerate(series))):
        colour = _COLOURS[number % len(_COLOURS)]
        placed = [place(point) for point in each.points]
        if each.as_line:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        else:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.6" fill="{colour}"/>' for x, y in placed]
        if len(series) > 1:
            parts.append(
                f'<text x="{legend_x}" y="16" text-anchor="end" style="fill:{colour}">{escape(each.name)}</text>'
            )
            legend_x -= 8 * len(each.name) + 12
    return "\n".join([*parts, "</svg>"])


def ticks(largest: float) -> list[float]:
    """Round numbers from 0 to at least `largest`."""
    if not largest > 0 or not math.isfinite(largest):
        return [0.0, 1.0]
    raw = largest / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * (1 - 1e-9))
    return [step * number for number in range(math.ceil(largest / step - 1e-9) + 1)]


def short(number: float) -> str:
    """Short text of a tick value."""
    if number >= 1e6:
        return f"{number / 1e6:g}M"
    return f"{number / 1e3:g}k" if number >= 1e4 else f"{float(f'{number:.4g}'):g}"
