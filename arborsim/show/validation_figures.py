"""The figures of a validation's page: small SVG plots without a script, a few kilobytes each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from arborsim.validate.dual import PARTS
from arborsim.validate.results import CellCheck
from arborsim.validate.summary import Line, rank_agreements

_COLOURS = dict(
    zip(PARTS, ("--hbm", "--quantised", "--ddr", "--ddr-quantised", "--staging"), strict=True)
)
_MOST_DRAWN = 6
_BUDGET_COLOURS = ("--c5", "--c2", "--c3", "--c4", "--c6", "--c1", "--c7")
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 22, 44


@dataclass(frozen=True)
class Stroke:
    """A line of a plot, in pixels: ``"x,y x,y"``."""

    points: str
    colour: str
    width: float
    dashed: bool
    label: str


@dataclass(frozen=True)
class Dot:
    """A point with a tooltip, in pixels."""

    x: float
    y: float
    colour: str
    label: str


@dataclass
class Plot:
    """One pair of axes and what is drawn in them; ``validation.html`` writes the SVG."""

    #: Ends of the axes.
    x: tuple[float, float]
    y: tuple[float, float]
    x_title: str
    y_title: str
    title: str = ""
    log: bool = False  #: both axes logarithmic
    #: In pixels.
    width: int = 420
    height: int = 280
    strokes: list[Stroke] = field(default_factory=list, init=False)
    dots: list[Dot] = field(default_factory=list, init=False)

    def line(
        self, x: Sequence[float], y: Sequence[float], colour: str, *, dashed: bool = False,
        wide: float = 1.5, label: str = "",
    ) -> None:  # fmt: skip
        """Join points; ones that are not finite are left out."""
        known = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
        at = " ".join(f"{self._at_x(a):.1f},{self._at_y(b):.1f}" for a, b in known)
        self.strokes.append(Stroke(at, colour, wide, dashed, label))

    def dot(self, x: float, y: float, colour: str, label: str) -> None:
        """A point with a tooltip."""
        if math.isfinite(x) and math.isfinite(y):
            self.dots.append(Dot(self._at_x(x), self._at_y(y), colour, label))

    @property
    def frame(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom end of the axes."""
        return _LEFT, _TOP, self.width - _RIGHT, self.height - _BOTTOM

    def ticks(self) -> tuple[list[tuple[float, str]], list[tuple[float, str]]]:
        """Places and texts along x and along y."""
        return (
            [(self._at_x(value), short(value)) for value in ticks(*self.x, self.log)],
            [(self._at_y(value), short(value)) for value in ticks(*self.y, self.log)],
        )

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


def bytes_figures(checks: Sequence[CellCheck]) -> list[Plot]:
    """Live and simulated bytes over the iterations: those that use most tiers, then most bytes."""
    drawn = [check for check in checks if check.bytes_over_time]
    tables = {check.key: _over_time(check) for check in drawn}
    drawn.sort(key=lambda check: -int(tables[check.key][:, 1:].any(axis=0).sum()))
    shown = list({check.policy: check for check in reversed(drawn[: 4 * _MOST_DRAWN])}.values())
    found = []
    for check in shown[::-1][:_MOST_DRAWN]:
        table = tables[check.key]
        top = max(1.0, float(table[:, 1:].max()))
        plot = Plot((0.0, max(1.0, float(table[-1, 0]))), (0.0, 1.05 * top), "iteration", "bytes",
                    title=f"{check.policy} {check.budget}")  # fmt: skip
        for i, part in enumerate(PARTS):
            live, simulated = table[:, 1 + i], table[:, 1 + len(PARTS) + i]
            if live.any() or simulated.any():
                name, at = part.replace("_", " "), table[:, 0].tolist()
                plot.line(at, live.tolist(), _COLOURS[part], wide=5, label=f"{name}, live")
                plot.line(at, simulated.tolist(), "--ink", dashed=True, label=f"{name}, simulated")
        found.append(plot)
    return found


def parts_legend() -> dict[str, str]:
    """Colours of the bytes' parts."""
    return {part.replace("_", " "): colour for part, colour in _COLOURS.items()}


def _over_time(check: CellCheck) -> np.ndarray:
    return np.array(check.bytes_over_time, dtype=np.int64).reshape(-1, 1 + 2 * len(PARTS))


def time_figure(lines: Sequence[Line]) -> tuple[list[Plot], dict[str, str]]:
    """Measured against simulated seconds per token."""
    known = [(line, *line.per_token_s()) for line in lines if line.searches]
    known = [item for item in known if item[1] > 0 and item[2] > 0]
    if not known:
        return [], {}
    low = 0.8 * min(min(live, simulated) for _, live, simulated in known)
    high = 1.25 * max(max(live, simulated) for _, live, simulated in known)
    plot = Plot((low, high), (low, high), "measured, s per token", "simulated, s per token",
                title="Time per token", log=True, width=520, height=420)  # fmt: skip
    plot.line([low, high], [low, high], "--edge")
    for line, live, simulated in known:
        tip = f"{line.name}: {1e3 * live:.3f} ms measured, {1e3 * simulated:.3f} ms simulated"
        plot.dot(live, simulated, _colour(line.budget, lines), tip)
    return [plot], _legend(lines)


def jaccard_figures(checks: Sequence[CellCheck]) -> list[Plot]:
    """A panel per budget: every policy's line over the iterations of the first search."""
    drawn = [check for check in checks if check.jaccard and check.shadow_moves]
    if not drawn:
        return []
    first = min(check.episode for check in drawn)
    drawn = [check for check in drawn if check.episode == first]
    found = []
    for budget in dict.fromkeys(check.budget for check in drawn):
        own = [check for check in drawn if check.budget == budget]
        last = max(max(check.jaccard_iteration) for check in own)
        least = min(0.9, min(min(check.jaccard) for check in own))
        plot = Plot((0.0, max(1.0, float(last))), (math.floor(10 * least) / 10, 1.0), "iteration",
                    "Jaccard index", title=f"budget {budget}, problem {first}",
                    width=560, height=320)  # fmt: skip
        for i, check in enumerate(own):
            at, value = np.array(check.jaccard_iteration), np.array(check.jaccard)
            same, colour = at <= check.same_iterations, _BUDGET_COLOURS[i % len(_BUDGET_COLOURS)]
            plot.line(at[same].tolist(), value[same].tolist(), colour, label=check.policy)
            after = np.flatnonzero(~same)
            if len(after):
                rest = slice(max(0, after[0] - 1), None)
                plot.line(at[rest].tolist(), value[rest].tolist(), colour, dashed=True,
                          label=check.policy)  # fmt: skip
        found.append(plot)
    return found


def quality_figures(
    checks: Sequence[CellCheck], lines: Sequence[Line]
) -> tuple[list[Plot], dict[str, str]]:
    """Attention kept and output error against live accuracy, if there are enough problems."""
    if not rank_agreements(checks):
        return [], {}
    judged = [line for line in lines if line.judged]
    found = []
    for figure, title in (("attention_kept", "attention kept"), ("output_error", "output error")):
        values = [getattr(line, figure) for line in judged]
        known = [value for value in values if value == value]
        if not known:
            continue
        spread = max(known) - min(known) or 1.0
        ends = (min(known) - 0.03 * spread, max(known) + 0.03 * spread)
        plot = Plot(ends, (0.0, 1.0), f"{title} (replay)", "share right (live)",
                    title=f"{title.capitalize()} and accuracy", width=520, height=360)  # fmt: skip
        for line, value in zip(judged, values, strict=True):
            tip = f"{line.name}: {value:.4f}, {line.correct} of {line.judged} right"
            plot.dot(value, line.correct / line.judged, _colour(line.budget, lines), tip)
        found.append(plot)
    return found, _legend(lines)


def _colour(budget: str, lines: Sequence[Line]) -> str:
    budgets = list(dict.fromkeys(line.budget for line in lines))
    return _BUDGET_COLOURS[budgets.index(budget) % len(_BUDGET_COLOURS)]


def _legend(lines: Sequence[Line]) -> dict[str, str]:
    budgets = dict.fromkeys(line.budget for line in lines)
    return {f"budget {budget}": _colour(budget, lines) for budget in budgets}
