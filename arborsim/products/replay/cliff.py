"""The eviction cliff: right answers by budget, counted live, a line per policy and settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from arborsim.play.results import BASELINE, ReplayResult
from arborsim.products.replay.answers import Answers, Counted, Searched, shipped
from arborsim.products.replay.answers_words import score
from arborsim.report import page
from arborsim.report.report import Choice
from arborsim.report.words import counted

#: Lines in colour; the others are grey.
MOST = page.COLOURS - 2  # the last is a grey
#: Budgets that could not hold more than this share of the searches have no point: what is left are
#: the short searches, of which more are right.
MOST_INFEASIBLE = 0.1
#: Points that make a figure: fewer show nothing that the table does not.
FEWEST = 3
_MOST_NAMED = 4
_APART = 0.35  # per cent of the budget, between the whiskers of two lines


@dataclass(frozen=True)
class Line:
    """One policy with its settings, by budget, the smallest first."""

    label: str
    policy: str
    points: tuple[Counted, ...]


@dataclass(frozen=True)
class Cliff:
    """Answers counted on one kind of problems with one search and model."""

    searched: Searched
    lines: tuple[Line, ...]  #: those with most points first
    full: Counted | None  #: full retention on the same problems
    left_out: tuple[Counted, ...] = ()  #: whose budget could not hold too many searches

    @property
    def title(self) -> str:
        """``"chain (lines 32), linear"``."""
        return f"{self.searched.problems}, {self.searched.search}"

    @property
    def note(self) -> str:
        """The model, the problems and the intervals of the figure."""
        ns = [point.n for line in self.lines for point in line.points]
        most = counted(max(ns), "problem")
        few = f", or as many as the budget could hold ({min(ns)} at least)"
        some = any(point.masked for line in self.lines for point in line.points)
        masked = ", with tokens removed or masked," if some else ""
        missing = [
            f"{each.label} at {each.budget} ({each.infeasible} of {each.n + each.infeasible})"
            for each in self.left_out[:_MOST_NAMED]
        ]
        named = ", ".join(missing) + (", ..." if len(self.left_out) > _MOST_NAMED else "")
        unfit = f" Not drawn, for the budget could not hold many: {named}." if missing else ""
        return (
            f"Live runs of {self.searched.model}{masked} on {self.title}, temperature "
            f"{self.searched.temperature:g}: {most} a point{few if min(ns) < max(ns) else ''}, "
            "whiskers are 95% Clopper-Pearson intervals. Grey: other policies and settings."
            f"{unfit}"
        )

    def chosen(self, settings: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> list[str]:
        """Labels of the lines to colour.

        Of each policy in `settings` the line with these settings, else all of its lines; without
        any of them those with most points.
        """
        found: list[str] = []
        for policy, own in settings.items():
            lines = [line for line in self.lines if line.policy == policy]
            same = [line for line in lines if line.points[0].settings == own]
            found += [line.label for line in same or lines]
        return (found or [line.label for line in self.lines])[:MOST]

    def figure(self, coloured: Sequence[str]) -> page.Figure:
        """Accuracy against budget, with the lines of these labels in colour."""
        chosen = [line for label in coloured for line in self.lines if line.label == label]
        others = [line for line in self.lines if line not in chosen]
        data = [_grey(line, number == 0) for number, line in enumerate(others)]
        for number, line in enumerate(chosen):
            away = _APART * (number - (len(chosen) - 1) / 2)
            data.append(_coloured(line, number + 1, away))
        limit = page.limit_line(
            f"full retention, {self.full.right}/{self.full.n}" if self.full else "",
            round(100 * self.full.accuracy, 4) if self.full else None,
        )
        shares = [point.share for line in self.lines for point in line.points]
        low = 100 * min(shares, default=0.0) - 3
        x = page.axis("budget (% of what full retention holds)", range=[low, 101])
        y = {**page.ACCURACY_AXIS, "title": {"text": "right answers (%)"}}
        return page.figure(data, x, y, 460, **limit)


def cliffs(rows: Iterable[Counted]) -> list[Cliff]:
    """One per kind of problems, search and model, that with most points first.

    Of settings that were counted twice the first is taken, as where a setting is looked up; those
    that know no budget, or keep all, are on no line.
    """
    kinds: list[tuple[Searched, list[Counted]]] = []
    for row in rows:
        own = next((found for searched, found in kinds if searched == row.searched), None)
        if own is None:
            own = []
            kinds.append((row.searched, own))
        own.append(row)
    drawn = []
    for searched, own in kinds:
        unfit = tuple(row for row in own if row.share < 1 and not _drawn(row))
        if lines := _lines(own):
            drawn.append(Cliff(searched, lines, _full(own), unfit))
    return sorted(drawn, key=lambda each: -sum(len(line.points) for line in each.lines))


def _lines(rows: Sequence[Counted]) -> tuple[Line, ...]:
    points: dict[str, dict[str, Counted]] = {}
    for row in rows:
        if row.share < 1 and _drawn(row):
            points.setdefault(row.label, {}).setdefault(f"{row.share:.9f}", row)
    lines = []
    for label, own in points.items():
        by_share = tuple(sorted(own.values(), key=lambda row: row.share))
        lines.append(Line(label, by_share[0].policy, by_share))
    return tuple(sorted(lines, key=lambda line: -len(line.points)))


def _drawn(row: Counted) -> bool:
    return bool(row.n) and row.infeasible <= MOST_INFEASIBLE * (row.n + row.infeasible)


def _full(rows: Sequence[Counted]) -> Counted | None:
    return next((row for row in rows if row.policy == BASELINE and row.n), None)


def points(found: Iterable[Cliff]) -> list[tuple[str, str, str, int, int]]:
    """The points drawn, as problems, label, budget, right answers and problems."""
    return [
        (each.title, line.label, point.budget, point.right, point.n)
        for each in found
        for line in each.lines
        for point in line.points
    ]


def _texts(line: Line) -> list[str]:
    return [
        page.label(f"{line.label} at budget {point.budget}: {score(point)}")
        for point in line.points
    ]


def _grey(line: Line, first: bool) -> page.Figure:
    dot = "var(--dot)"
    look: page.Figure = {
        "mode": "lines+markers",
        "line": {"color": dot, "width": 1},
        "legendgroup": "others",
    }
    look |= {"marker": {"color": dot, "size": 4}, "showlegend": first}
    return page.accuracies("others", line.points, _x(line), dot, 0, _texts(line), False, **look)


def _coloured(line: Line, number: int, away: float) -> page.Figure:
    paint = page.colour(number)
    x = [each + away for each in _x(line)]
    look: page.Figure = {"mode": "lines+markers", "line": {"color": paint, "width": 2}}
    return page.accuracies(line.label, line.points, x, paint, number, _texts(line), **look)


def _x(line: Line) -> list[float]:
    return [round(100 * point.share, 4) for point in line.points]


def of_replay(result: ReplayResult, trace: str, known: Answers | None = None) -> list[Choice]:
    """For the page of a replay: what was counted for the trace's task, search and model.

    Its own kind of problems comes first.  The policies of the replay are in colour, and any line
    can be highlighted.
    """
    if trace not in result.recordings:
        return []
    searched = Searched.of_recording(result.recordings[trace])
    found = cliffs((known or shipped()).of(searched))
    found.sort(key=lambda each: len(searched.differs(each.searched)))
    made = []
    for each in found:
        if sum(len(line.points) for line in each.lines) < FEWEST:
            continue
        note = each.note
        title = each.title
        if other := ", ".join(searched.differs(each.searched)):
            note += f" Other problems than this trace's, which has {other}."
            title = f"other problems: {title}"
        figure = each.figure(each.chosen(result.policies))
        lines = {line.label: [_coloured(line, 2, 0.0)] for line in each.lines}
        made.append(Choice(figure, (trace, title), note, lines=lines))
    return made
