"""SVG of a state machine: states in a column, arrows of labelled transitions beside it.

An arrow to the next state goes straight down. Arrows to later states run on the right, arrows back and to the same
state on the left, each in a lane of its own; all arrows to the last state share the rightmost lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_ROW, _BOX_WIDTH, _BOX_HEIGHT, _LANE, _PORT = 84, 120, 42, 26, 14
_TOP, _TEXT_PX, _MARGIN = 40, 6.2, 12
_LABEL_GAP = 14

_STYLE = """<style>
rect.page { fill: #fff } rect.state { fill: #eef3fa; stroke: #3b6ea5 } path { fill: none; stroke: #555 }
text { font: 11px Verdana, "DejaVu Sans", sans-serif; fill: #222 } text.state { font-size: 13px; text-anchor: middle }
text.left { text-anchor: end }
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path d="M0 0 8 4 0 8Z" style="fill:#555;stroke:none"/></marker></defs>"""

Edge = tuple[str, str]


@dataclass(frozen=True)
class _Arrow:
    before: int
    after: int
    label: str

    @property
    def is_straight(self) -> bool:
        return self.after == self.before + 1

    @property
    def is_left(self) -> bool:
        return self.after <= self.before


def state_diagram(states: Sequence[str], labels: Mapping[Edge, str]) -> str:
    """The diagram. `labels`: label of each arrow by its two states; the first state is the initial one."""
    places = {state: place for place, state in enumerate(states)}
    arrows = [_Arrow(places[before], places[after], label) for (before, after), label in labels.items()]
    return _Drawing(states, arrows).svg()


class _Drawing:
    def __init__(self, states: Sequence[str], arrows: Sequence[_Arrow]) -> None:
        self._states = states
        self._last = len(states) - 1
        self._straight = [each for each in arrows if each.is_straight]
        by_length = sorted(arrows, key=lambda each: (abs(each.after - each.before), each.before))
        self._left = [each for each in by_length if each.is_left]
        self._right = [each for each in by_length if not each.is_left and not each.is_straight]
        self._ports: dict[tuple[int, bool], int] = {}
        widest = max((len(each.label) for each in self._left), default=0) * _TEXT_PX
        self._left_lanes = _MARGIN + _LANE * len(self._left)
        self._box = self._left_lanes + widest + 2 * _LABEL_GAP
        widest = max((len(each.label) for each in self._right), default=0) * _TEXT_PX
        self._first_lane = self._box + _BOX_WIDTH + widest + 2 * _LABEL_GAP
        inner = sum(each.after != self._last for each in self._right)
        self._bus = self._first_lane + _LANE * inner

    def svg(self) -> str:
        width, height = self._bus + 2 * _MARGIN, _TOP + _ROW * len(self._states) - 20
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
            f'width="{width:.0f}" height="{height}">',
            _STYLE,
            f'<rect class="page" width="{width:.0f}" height="{height}" rx="6"/>',
            self._path((self._box + _BOX_WIDTH / 2, 8), (self._box + _BOX_WIDTH / 2, _TOP)),
        ]
        for arrow in self._straight:
            parts += self._down(arrow)
        for lane, arrow in enumerate(self._left):
            parts += self._beside(arrow, self._left_lanes - _LANE * lane, is_left=True)
        inner = [arrow for arrow in self._right if arrow.after != self._last]
        for lane, arrow in enumerate(inner):
            parts += self._beside(arrow, self._first_lane + _LANE * lane, is_left=False)
        for arrow in self._right:
            if arrow.after == self._last:
                parts += self._beside(arrow, self._bus, is_left=False)
        parts += [self._state(place, state) for place, state in enumerate(self._states)]
        return "\n".join([*parts, "</svg>\n"])

    def _down(self, arrow: _Arrow) -> list[str]:
        x = self._box + _BOX_WIDTH / 2
        begin, end = _TOP + _ROW * arrow.before + _BOX_HEIGHT, _TOP + _ROW * arrow.after
        label = f'<text x="{x + 6:.0f}" y="{(begin + end) / 2 + 4:.0f}">{escape(arrow.label)}</text>'
        return [self._path((x, begin), (x, end)), label]

    def _beside(self, arrow: _Arrow, lane: float, is_left: bool) -> list[str]:
        edge = self._box if is_left else self._box + _BOX_WIDTH
        begin, end = self._port(arrow.before, is_left), self._end_port(arrow, is_left)
        x = edge - _LABEL_GAP if is_left else edge + _LABEL_GAP
        side = ' class="left"' if is_left else ""
        label = f'<text{side} x="{x:.0f}" y="{begin - 3:.0f}">{escape(arrow.label)}</text>'
        return [self._path((edge, begin), (lane, begin), (lane, end), (edge, end)), label]

    def _end_port(self, arrow: _Arrow, is_left: bool) -> float:
        if not is_left and arrow.after == self._last:
            return _TOP + _ROW * arrow.after + _BOX_HEIGHT / 2
        return self._port(arrow.after, is_left)

    def _port(self, place: int, is_left: bool) -> float:
        """The next free height at a side of a state, from the top down."""
        number = self._ports.get((place, is_left), 0)
        self._ports[place, is_left] = number + 1
        return _TOP + _ROW * place + 6 + _PORT * number

    def _state(self, place: int, state: str) -> str:
        y = _TOP + _ROW * place
        return (
            f'<rect class="state" x="{self._box:.0f}" y="{y}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="8"/>'
            f'<text class="state" x="{self._box + _BOX_WIDTH / 2:.0f}" y="{y + 26}">{escape(state)}</text>'
        )

    def _path(self, *points: tuple[float, float]) -> str:
        steps = " ".join(f"{x:.0f} {y:.0f}" for x, y in points)
        return f'<path d="M{steps}" marker-end="url(#head)"/>'
