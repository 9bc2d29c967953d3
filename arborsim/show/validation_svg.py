"""Small figures as SVG text: no script, a few kilobytes each, colours of the page's style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 22, 44


@dataclass
class Plot:
    """One pair of axes.

    Attributes
    ----------
    x, y : tuple of float
        Ends of the axes.
    x_title, y_title, title : str
    log : bool
        Both axes logarithmic.
    width, height : int
        In pixels.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    x_title: str
    y_title: str
    title: str = ""
    log: bool = False
    width: int = 420
    height: int = 280
    _parts: list[str] = field(default_factory=list, init=False)

    def line(
        self, x: Sequence[float], y: Sequence[float], colour: str, *, dashed: bool = False,
        wide: float = 1.5, label: str = "",
    ) -> None:  # fmt: skip
        """Join points; ones that are not finite are left out."""
        known = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
        at = " ".join(f"{self._at_x(a):.1f},{self._at_y(b):.1f}" for a, b in known)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{at}" fill="none" stroke="var({colour})" '
            f'stroke-width="{wide:g}"{dash}>{_tip(label)}</polyline>'
        )

    def dot(self, x: float, y: float, colour: str, label: str) -> None:
        """A point with a tooltip."""
        if math.isfinite(x) and math.isfinite(y):
            self._parts.append(
                f'<circle cx="{self._at_x(x):.1f}" cy="{self._at_y(y):.1f}" r="4" '
                f'fill="var({colour})" fill-opacity=".7">{_tip(label)}</circle>'
            )

    def svg(self) -> str:
        """The figure."""
        right, bottom = self.width - _RIGHT, self.height - _BOTTOM
        texts = [
            _text(self.width / 2, 14, self.title, "middle", "600"),
            _text((_LEFT + right) / 2, self.height - 6, self.x_title, "middle"),
            f'<g transform="translate(12 {(_TOP + bottom) / 2:.0f}) rotate(-90)">'
            f"{_text(0, 0, self.y_title, 'middle')}</g>",
        ]
        frame = (
            f'<rect x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{bottom - _TOP}" '
            'class="frame"/>'
        )
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" aria-label="{html.escape(self.title)}" '
            f'style="max-width:100%;font-size:12px">{frame}{"".join(self._ticks(right, bottom))}'
            f"{''.join(texts)}{''.join(self._parts)}</svg>"
        )

    def _ticks(self, right: float, bottom: float) -> list[str]:
        found = []
        for value in ticks(*self.x, self.log):
            at = self._at_x(value)
            found.append(_rule(at, bottom, at, bottom + 4))
            found.append(_text(at, bottom + 17, short(value), "middle"))
        for value in ticks(*self.y, self.log):
            at = self._at_y(value)
            found.append(_rule(_LEFT - 4, at, right, at))
            found.append(_text(_LEFT - 7, at + 4, short(value), "end"))
        return found

    def _at_x(self, value: float) -> float:
        return _LEFT + self._share(value, self.x) * (self.width - _RIGHT - _LEFT)

    def _at_y(self, value: float) -> float:
        bottom = self.height - _BOTTOM
        return bottom - self._share(value, self.y) * (bottom - _TOP)

    def _share(self, value: float, ends: tuple[float, float]) -> float:
        low, high = ends
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.5


def ticks(low: float, high: float, log: bool) -> list[float]:
    """A few round numbers between two ends."""
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 2, 5) if high / low < 1000 else (1,)
        return [step * 10.0**p for p in powers for step in steps if low <= step * 10.0**p <= high]
    if high <= low:
        return [low]
    size = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= 5)
    first = math.ceil(low / step)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number with a decimal prefix."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    if value and abs(value) < 1e-3:
        return f"{value * 1e6:g}µ"
    return f"{value:.6g}"


def _tip(label: str) -> str:
    return f"<title>{html.escape(label)}</title>" if label else ""


def _rule(x0: float, y0: float, x1: float, y1: float) -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="var(--line)"/>'


def _text(x: float, y: float, text: str, anchor: str, weight: str = "400") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="var(--ink)">{html.escape(text)}</text>'
    )
