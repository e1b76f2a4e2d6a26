"""Charts as SVG, drawn without any library: the same figures give the same file."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence

__all__ = ["Axis", "BarChart", "Chart"]

_WIDTH, _HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 30, 36, 50
_BAR_LEFT, _BAR_RIGHT, _BAR_PITCH, _BAR_HEIGHT, _BAR_BOTTOM = 240, 60, 32, 22, 10
_COLOURS = ("#c0504d", "#1f77b4", "#2a9d5c", "#8e5ea2", "#d08a1d")


@dataclasses.dataclass(frozen=True)
class Axis:
    """From `low` to `high`, with labelled ticks."""

    title: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    logarithmic: bool = True

    def share(self, value: float) -> float:
        """Where a value stands, from 0 to 1."""
        place = math.log if self.logarithmic else float
        low, high = place(self.low), place(self.high)
        return min(max((place(value) - low) / (high - low), 0.0), 1.0)


@dataclasses.dataclass(frozen=True)
class Chart:
    """Lines over two axes, as SVG."""

    title: str
    x: Axis
    y: Axis
    lines: dict[str, list[tuple[float, float]]]

    def svg(self) -> str:
        parts = self._grid()
        for number, (name, points) in enumerate(self.lines.items()):
            parts += self._line(number, name, points)
        return _drawing(self.title, _HEIGHT, parts)

    def _grid(self) -> list[str]:
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        parts = []
        for value, label in self.x.ticks:
            x = self._x(value)
            parts.append(f'<path d="M{x} {_TOP}V{bottom}" stroke="#e3e3e3"/>')
            parts.append(_text(x, bottom + 16, label, "middle"))
        for value, label in self.y.ticks:
            y = self._y(value)
            parts.append(f'<path d="M{_LEFT} {y}H{right}" stroke="#e3e3e3"/>')
            parts.append(_text(_LEFT - 6, y + 4, label, "end"))
        parts.append(_text((_LEFT + right) / 2, _HEIGHT - 12, self.x.title, "middle"))
        turned = f'transform="rotate(-90 16 {_HEIGHT / 2:g})"'
        parts.append(_text(16, _HEIGHT / 2, self.y.title, "middle", turned))
        return parts

    def _line(self, number: int, name: str, points: Sequence[tuple[float, float]]) -> list[str]:
        colour = _COLOURS[number]
        path = " ".join(f"{self._x(x)},{self._y(y)}" for x, y in points)
        key = _TOP + 14 + 16 * number
        return [
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<path d="M{_LEFT + 12} {key}h18" stroke="{colour}" stroke-width="2"/>',
            _text(_LEFT + 36, key + 4, name, "start"),
        ]

    def _x(self, value: float) -> float:
        return round(_LEFT + self.x.share(value) * (_WIDTH - _LEFT - _RIGHT), 1)

    def _y(self, value: float) -> float:
        return round(_HEIGHT - _BOTTOM - self.y.share(value) * (_HEIGHT - _TOP - _BOTTOM), 1)


@dataclasses.dataclass(frozen=True)
class BarChart:
    """One bar for each name, with its value beside it, and a line at `mark`; as SVG."""

    title: str
    bars: dict[str, float]
    mark: float

    def svg(self) -> str:
        high = 1.1 * max(self.mark, *self.bars.values())
        scale = (_WIDTH - _BAR_LEFT - _BAR_RIGHT) / high
        height = _TOP + _BAR_PITCH * len(self.bars) + _BAR_BOTTOM
        parts = []
        for number, (name, value) in enumerate(self.bars.items()):
            top = _TOP + _BAR_PITCH * number
            width = round(value * scale, 1)
            place = f'x="{_BAR_LEFT}" y="{top}" width="{width:g}" height="{_BAR_HEIGHT}"'
            parts.append(f'<rect {place} fill="{_COLOURS[1]}"/>')
            parts.append(_text(_BAR_LEFT - 8, top + 16, name, "end"))
            parts.append(_text(_BAR_LEFT + width + 6, top + 16, f"{value:.2f}", "start"))
        mark = round(_BAR_LEFT + self.mark * scale, 1)
        line = f"M{mark:g} {_TOP - 6}V{height - _BAR_BOTTOM}"
        parts.append(f'<path d="{line}" stroke="#222" stroke-dasharray="4 3"/>')
        return _drawing(self.title, height, parts)


def _drawing(title: str, height: int, parts: Sequence[str]) -> str:
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img" '
        f'aria-label="{html.escape(title)}">',
        f'<rect width="{_WIDTH}" height="{height}" rx="6" fill="#fff"/>',
        f'<text x="{_LEFT}" y="20" font-size="14" fill="#222">{html.escape(title)}</text>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="#333" {more}'.strip()
    return f"<text {place}>{html.escape(text)}</text>"
