"""The page about a validation.  It needs no script and no network: its figures are small SVGs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from arborsim.core.outputs import write_text
from arborsim.products.validate import results
from arborsim.products.validate.compare import PARTS
from arborsim.products.validate.tables import COLUMNS, MEANINGS, sentences, term_name, verdict
from arborsim.report import page
from arborsim.report.table import LABEL, Column, Table, name_column
from arborsim.report.words import percent

_PARTS = {
    part: part.replace("hbm", "HBM").replace("ddr", "DDR").replace("_", ", ") for part in PARTS
}
_COLOURS = ("--hbm", "--quantised", "--ddr", "--ddr-quantised", "--staging")
_BUDGET_COLOURS = ("--c5", "--c2", "--c3", "--c4", "--c6", "--c1", "--c7")
_MOST_DRAWN = 6
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 22, 44
_ERRORS: tuple[Column[results.TermError], ...] = (
    name_column("term", term_name),
    Column("lines", "policies and budgets", "count", lambda error: error.lines,
           text=lambda error: str(error.lines)),
    Column("median", "median error", "count", lambda error: error.median,
           text=lambda error: percent(error.median)),
    Column("worst", "worst error", "count", lambda error: error.worst,
           text=lambda error: percent(error.worst)),
    name_column("worst", lambda error: error.worst_name, LABEL),
)  # fmt: skip


def write_page(result: results.Validation, path: Path) -> None:
    """Write the page; `UsageError` where the file cannot be written."""
    write_text(path, render(result))


def render(result: results.Validation) -> str:
    """The whole page as text; the same result gives the same bytes."""
    lines = results.lines_of(result.checks)
    about = result.about
    where = [about[key] for key in ("task", "search", "device", "GPU profile") if key in about]
    infeasible = (c for c in result.checks if c.infeasible)
    return page.render(
        "validation",
        title="Simulated against measured",
        subtitle=", ".join(where),
        verdict=verdict(result.checks),
        parts_of_verdict=[
            (*said.split(": ", 1), MEANINGS[said.split(":")[0]])
            for said in sentences(result.checks)
        ],
        table=Table(lines, COLUMNS),
        bytes=_bytes(result.checks),
        parts=dict(zip(_PARTS.values(), _COLOURS, strict=True)),
        peaks=_peak_notes(result),
        time=_time(lines),
        terms=Table(results.term_errors(lines), _ERRORS),
        jaccard=_jaccard(result.checks),
        quality=_quality(result.checks, lines),
        budgets={f"budget {line.budget}": _colour(line, lines) for line in lines},
        about=dict(about),
        left_out=[
            *result.left_out,
            *(f"{c.policy} at {c.budget}, problem {c.episode}: {c.infeasible}" for c in infeasible),
        ],
    )


def _peak_notes(result: results.Validation) -> list[str]:
    """Peaks that differ, one by one; the size of tensors and of the allocator."""
    ran = [check for check in result.checks if not check.infeasible]
    said = [
        f"{check.policy} at {check.budget}, problem {check.episode}: {name} is "
        f"{simulated:,} B simulated, {live:,} B live"
        for check in ran
        for name, live, simulated in zip(
            results.PEAKS, check.live_peaks, check.simulated_peaks, strict=True
        )
        if live != simulated
    ]
    gaps = [c.allocated_bytes / c.live_peaks[0] for c in ran if c.live_peaks and c.live_peaks[0]]
    if gaps:
        said.append(
            f"The pools' tensors, gaps included, take {min(gaps):.2f} to {max(gaps):.2f} times the "
            "peak of the tokens in them."
        )
    over = [c.device_peak_bytes - c.weight_bytes - c.allocated_bytes for c in ran
            if c.device_peak_bytes]  # fmt: skip
    if over:
        said.append(
            f"The allocator's peak, less weights and pools, is {min(over):,} to {max(over):,} B: "
            "activations, and copies while pools grow."
        )
    pairs = [(c.simulated_device_bytes, c.device_peak_bytes) for c in ran]
    off = [predicted / real - 1 for predicted, real in pairs if predicted and real]
    if off:
        said.append(
            f"The allocator's peak is predicted to {min(off):+.1%} to {max(off):+.1%} of the real "
            f"one (target: 3%)."
        )
    return said


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
    strokes: list[dict[str, Any]] = field(default_factory=list, init=False)
    dots: list[dict[str, Any]] = field(default_factory=list, init=False)

    def line(
        self, x: Sequence[float], y: Sequence[float], colour: str, label: str = "",
        *, dashed: bool = False, width: float = 1.5,
    ) -> None:  # fmt: skip
        """Join points; ones that are not finite are left out."""
        known = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
        self.strokes.append({
            "points": " ".join(f"{self._across(a):.1f},{self._up(b):.1f}" for a, b in known),
            "colour": colour, "label": label, "dashed": dashed, "width": width,
        })  # fmt: skip

    def dot(self, x: float, y: float, colour: str, label: str) -> None:
        """A point with a tooltip."""
        if math.isfinite(x) and math.isfinite(y):
            self.dots.append(
                {"x": self._across(x), "y": self._up(y), "colour": colour, "label": label}
            )

    @property
    def frame(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom end of the axes."""
        return _LEFT, _TOP, self.width - _RIGHT, self.height - _BOTTOM

    def ticks(self) -> tuple[list[tuple[float, str]], list[tuple[float, str]]]:
        """Places and texts along x and along y."""
        return (
            [(self._across(value), _short(value)) for value in _ticks(*self.x, self.log)],
            [(self._up(value), _short(value)) for value in _ticks(*self.y, self.log)],
        )

    def _across(self, value: float) -> float:
        left, _, right, _ = self.frame
        return left + self._share(value, *self.x) * (right - left)

    def _up(self, value: float) -> float:
        _, top, _, bottom = self.frame
        return bottom - self._share(value, *self.y) * (bottom - top)

    def _share(self, value: float, low: float, high: float) -> float:
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.5


def _ticks(low: float, high: float, log: bool) -> list[float]:
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


def _short(value: float) -> str:
    """A number with a decimal prefix."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value * 1e6:g}µ" if value and abs(value) < 1e-3 else f"{value:.6g}"


def _bytes(checks: Sequence[results.CellCheck]) -> list[Plot]:
    """Live and simulated bytes over the iterations: those that use most tiers, then most bytes."""
    drawn = [
        (check, np.array(check.bytes_over_time, dtype=np.int64).reshape(-1, 1 + 2 * len(PARTS)))
        for check in checks
        if check.bytes_over_time
    ]
    drawn.sort(key=lambda item: -int(item[1][:, 1:].any(axis=0).sum()))
    first = {item[0].policy: item for item in reversed(drawn[: 4 * _MOST_DRAWN])}
    found = []
    for check, table in list(first.values())[::-1][:_MOST_DRAWN]:
        at, top = table[:, 0].tolist(), max(1.0, float(table[:, 1:].max()))
        plot = Plot((0.0, max(1.0, at[-1])), (0.0, 1.05 * top), "iteration", "bytes",
                    title=f"{check.policy} {check.budget}")  # fmt: skip
        sides = table[:, 1:].T.tolist()
        for name, colour, live, simulated in zip(
            _PARTS.values(), _COLOURS, sides[: len(PARTS)], sides[len(PARTS) :], strict=True
        ):
            if any(live) or any(simulated):
                plot.line(at, live, colour, f"{name}, live", width=5)
                plot.line(at, simulated, "--ink", f"{name}, simulated", dashed=True)
        found.append(plot)
    return found


def _time(lines: Sequence[results.Line]) -> list[Plot]:
    """Measured against simulated seconds per token."""
    known = [(line, *line.per_token_s()) for line in lines if line.searches]
    known = [item for item in known if item[1] > 0 and item[2] > 0]
    if not known:
        return []
    low = 0.8 * min(min(live, simulated) for _, live, simulated in known)
    high = 1.25 * max(max(live, simulated) for _, live, simulated in known)
    plot = Plot((low, high), (low, high), "measured, s per token", "simulated, s per token",
                title="Time per token", log=True, width=520, height=420)  # fmt: skip
    plot.line([low, high], [low, high], "--edge")
    for line, live, simulated in known:
        tip = f"{line.name}: {1e3 * live:.3f} ms measured, {1e3 * simulated:.3f} ms simulated"
        plot.dot(live, simulated, _colour(line, lines), tip)
    return [plot]


def _jaccard(checks: Sequence[results.CellCheck]) -> list[Plot]:
    """A panel per budget: every policy's line over the iterations of the first search."""
    drawn = [check for check in checks if check.jaccard and check.shadow_moves]
    first = min((check.episode for check in drawn), default=0)
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
            colour = _BUDGET_COLOURS[i % len(_BUDGET_COLOURS)]
            at, value = check.jaccard_iteration, check.jaccard
            same = sum(iteration <= check.same_iterations for iteration in at)
            plot.line(at[:same], value[:same], colour, check.policy)
            if same < len(at):
                rest = slice(max(0, same - 1), None)
                plot.line(at[rest], value[rest], colour, check.policy, dashed=True)
        found.append(plot)
    return found


def _quality(checks: Sequence[results.CellCheck], lines: Sequence[results.Line]) -> list[Plot]:
    """Attention kept and output error against live accuracy, if there are enough problems."""
    judged = [line for line in lines if line.judged] if results.rank_agreements(checks) else []
    found = []
    for figure in ("attention_kept", "output_error"):
        values = [getattr(line, figure) for line in judged]
        known = [value for value in values if not math.isnan(value)]
        if not known:
            continue
        title = figure.replace("_", " ")
        spread = max(known) - min(known) or 1.0
        ends = (min(known) - 0.03 * spread, max(known) + 0.03 * spread)
        plot = Plot(ends, (0.0, 1.0), f"{title} (replay)", "share right (live)",
                    title=f"{title.capitalize()} and accuracy", width=520, height=360)  # fmt: skip
        for line, value in zip(judged, values, strict=True):
            if math.isnan(value):
                continue
            tip = f"{line.name}: {value:.4f}, {line.correct} of {line.judged} right"
            plot.dot(value, line.correct / line.judged, _colour(line, lines), tip)
        found.append(plot)
    return found


def _colour(line: results.Line, lines: Sequence[results.Line]) -> str:
    """Of the line's budget."""
    budgets = list(dict.fromkeys(each.budget for each in lines))
    return _BUDGET_COLOURS[budgets.index(line.budget) % len(_BUDGET_COLOURS)]
