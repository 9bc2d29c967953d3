"""Policies on engines, simulated against measured: signs, ratios, requests in flight, every row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.core.tables import made_by, write_table
from arborsim.products.validate.policies import SMALLEST_EFFECT, PlayedPolicy, SimulatedArm
from arborsim.products.validate.published_errors import Errors
from arborsim.products.validate.published_report import not_played
from arborsim.report import page
from arborsim.report.report import (
    Answer,
    Choice,
    Facts,
    Figures,
    Listed,
    Report,
    Section,
    Shown,
)
from arborsim.report.table import LABEL, REMARK, Column, Table, name_column
from arborsim.report.words import counted, percent

if TYPE_CHECKING:
    import pandas as pd

_GROUPS = (
    "Rows in one setting that no constant was fitted on. A sign is judged where the policy is more "
    f"than {SMALLEST_EFFECT:.0%} faster or slower. Errors are of the ratio of both throughputs."
)
_SCATTER = (
    "Throughput of the policy over that of full retention, measured against simulated. On the line "
    "both are the same. Upper right and lower left, the sign is right. Rows that constants may be "
    "fitted on are hidden until you click them in the legend."
)
#: Aims for the ratio: its error in the median and at the 90th percentile
MEDIAN_AIM, HIGH_AIM = 0.10, 0.20


@dataclass(frozen=True)
class MeasuredPolicies:
    """Rows that were compared, in the order of their file, and what made the numbers."""

    rows: tuple[PlayedPolicy, ...]
    about: Mapping[str, str]


@dataclass(frozen=True)
class Line:
    """How far off a group of rows is."""

    group: str  #: what the rows of the section's lines differ in
    name: str
    right: int  #: rows with the measured sign ...
    signs: int  #: ... of those in which it is judged
    ratio: Errors
    peaks: Errors  #: of requests in flight at most, of both arms

    @classmethod
    def of(cls, group: str, name: str, rows: Sequence[PlayedPolicy]) -> Line:
        signs = [each.sign for each in rows if each.sign is not None]
        ratio = Errors.of(each.error for each in rows)
        peaks = Errors.of(error for each in rows for error in peak_errors(each))
        return cls(group, name, sum(signs), len(signs), ratio, peaks)


def peak_errors(each: PlayedPolicy) -> list[float]:
    """Errors of the most requests in flight, of the arms for which it was measured."""
    arms = (each.policy, "peak_concurrency"), (each.baseline, "baseline_peak_concurrency")
    found = []
    for arm, column in arms:
        measured = each.run.number(column)
        if arm is not None and measured > 0:
            found.append(arm.peak_concurrency / measured - 1)
    return found


def judged(rows: Sequence[PlayedPolicy]) -> list[PlayedPolicy]:
    """Rows that were played, in one setting, and that no constant was fitted on."""
    return [each for each in rows if each.policy and each.run.same_setting and not each.run.fitted]


def lines(rows: Sequence[PlayedPolicy]) -> list[Line]:
    """All judged rows, then by policy, engine and memory pressure; then the others."""
    mine = judged(rows)
    found = [Line.of("", "all judged", mine)]
    for group, column in (("policy", "policy"), ("engine", "engine"), ("memory", "regime")):
        names = sorted({each.run.text(column) or "not stated" for each in mine})
        for name in names:
            own = [each for each in mine if (each.run.text(column) or "not stated") == name]
            found.append(Line.of(group, name, own))
    played = [each for each in rows if each.policy]
    others = {
        "fitted": [each for each in played if each.run.fitted and each.run.same_setting],
        "other flags or batch": [each for each in played if not each.run.same_setting],
    }
    return found + [Line.of("not judged", name, own) for name, own in others.items() if own]


def _share(value: Callable[[Line], float], form: str) -> Callable[[Line], str]:
    return lambda line: "" if math.isnan(value(line)) else format(value(line), form)


def _error(key: str, title: str, means: str, read: Callable[[Line], float], form: str) -> Any:
    return Column(key, title, "count", read, means, text=_share(read, form))


LINES: tuple[Column[Line], ...] = (
    name_column("rows", lambda line: line.name),
    Column(
        "signs", "signs right", "count", lambda line: line.right,
        "rows in which the simulated policy is faster or slower as measured, of those judged",
        text=lambda line: f"{line.right} of {line.signs}" if line.signs else "",
    ),
    _error("n", "n", "rows with a ratio", lambda line: line.ratio.n, ".0f"),
    _error("median", "ratio median", "median size of its error", lambda x: x.ratio.median, ".1%"),
    _error("p90", "ratio p90", "90th percentile of that", lambda x: x.ratio.high, ".1%"),
    _error("signed", "signed", "median error; above 0, simulated is more",
           lambda x: x.ratio.signed, "+.1%"),
    _error("peaks_n", "peaks n", "arms with a peak in flight", lambda x: x.peaks.n, ".0f"),
    _error("peaks", "peaks p90", "90th percentile of the size of the error of requests in flight",
           lambda line: line.peaks.high, ".1%"),
)  # fmt: skip


def _figure(read: Callable[[PlayedPolicy], float], form: str) -> Callable[[PlayedPolicy], str]:
    return lambda each: "" if math.isnan(read(each)) else format(read(each), form)


def _number(
    key: str, title: str, read: Callable[[PlayedPolicy], float], form: str = ".3g"
) -> Column[PlayedPolicy]:
    return Column(key, title, "count", read, text=_figure(read, form))


def _setting(each: PlayedPolicy) -> str:
    run = each.run
    budget, buffer = run.number("budget_tokens"), run.number("buffer_tokens")
    kept = "" if math.isnan(budget) else f" {budget:g}"
    return f"{run.policy}{kept}" + ("" if math.isnan(buffer) else f" + {buffer:g}")


def _sign(each: PlayedPolicy) -> str:
    return {None: "", True: "right", False: "wrong"}[each.sign]


def _peak(arm: SimulatedArm | None) -> float:
    return arm.peak_concurrency if arm else math.nan


ROWS: tuple[Column[PlayedPolicy], ...] = (
    name_column("policy", _setting),
    name_column("engine", lambda each: each.run.text("engine"), LABEL),
    name_column("GPU", lambda each: each.run.text("gpu"), LABEL),
    _number("at_once", "at once", lambda each: each.run.number("concurrency")),
    _number("pool", "pool", lambda x: x.run.number("baseline_kv_pool_tokens"), ",.0f"),
    _number("measured", "measured", lambda each: each.run.ratio, ".2f"),
    _number("simulated", "simulated", lambda each: each.ratio, ".2f"),
    name_column("sign", _sign, LABEL),
    _number("peak", "in flight", lambda each: each.run.number("peak_concurrency")),
    _number("simulated_peak", "simulated", lambda each: _peak(each.policy)),
    _number("full", "full in flight", lambda x: x.run.number("baseline_peak_concurrency")),
    _number("simulated_full", "simulated", lambda each: _peak(each.baseline)),
    name_column("side", lambda each: each.side, LABEL),
    name_column("open", lambda each: each.open, REMARK),
)


def sentences(rows: Sequence[PlayedPolicy]) -> list[str]:
    """The answer, the aims, and what was not played; the first is the headline."""
    every = lines(rows)[0]
    said = ["No judged row could be played."]
    if every.ratio.n:
        said = [
            f"{every.right} of {every.signs} signs are right where the effect exceeds "
            f"{SMALLEST_EFFECT:.0%}. The ratio to full retention is off by "
            f"{percent(every.ratio.median)} in the median and {percent(every.ratio.high)} at the "
            f"90th percentile of {counted(every.ratio.n, 'judged row')}."
        ]
        aims = (
            ("every sign", every.right == every.signs),
            (f"{percent(MEDIAN_AIM)} in the median", every.ratio.median <= MEDIAN_AIM),
            (f"{percent(HIGH_AIM)} at the 90th percentile", every.ratio.high <= HIGH_AIM),
        )
        said += [f"Target {'met' if met else 'missed'}: {aim}." for aim, met in aims]
    if missing := sum(bool(each.reason) for each in rows):
        said.append(f"{missing:,} of {counted(len(rows), 'row')} could not be played.")
    return said


def wrong_signs(rows: Sequence[PlayedPolicy]) -> list[str]:
    """Rows that were simulated faster and measured slower, or the other way round."""
    return [
        f"{each.run.name}: measured {each.run.ratio:.2f}, simulated {each.ratio:.2f}"
        + (" (fitted)" if each.run.fitted else "")
        for each in rows
        if each.sign is False
    ]


def _table(rows: Sequence[PlayedPolicy]) -> Table[Line]:
    found = lines(rows)
    kept = [column for column in LINES[1:] if not column.empty(found)]
    return Table(found, (LINES[0], *kept), section=lambda line: line.group, titled=True)


def to_frame(result: MeasuredPolicies) -> pd.DataFrame:
    """The rows with all their columns, and what was simulated."""
    import pandas as pd

    return pd.DataFrame([{**each.run.cells, **_simulated(each)} for each in result.rows])


def _simulated(each: PlayedPolicy) -> dict[str, Any]:
    found: dict[str, Any] = {"simulated_ratio": each.ratio}
    for prefix, arm in (("simulated", each.policy), ("simulated_baseline", each.baseline)):
        found[f"{prefix}_tokens_per_s"] = arm.tokens_per_s if arm else math.nan
        found[f"{prefix}_peak_concurrency"] = _peak(arm)
        found[f"{prefix}_peak_mem_gib"] = arm.peak_mem_gib if arm else math.nan
        found[f"{prefix}_preemptions"] = arm.preemptions if arm else math.nan
    found["simulated_decisions"] = each.policy.decisions if each.policy else math.nan
    return found | {"side": each.side, "left_open": each.open, "not_played": each.reason}


def write_frame(result: MeasuredPolicies, path: Path) -> None:
    """Write a row per row in the format that the name ends with."""
    write_table(to_frame(result), path, made_by("policies", "arborsim validate policies"))


def report_of(result: MeasuredPolicies) -> Report:
    """Make the report of the rows."""
    rows = result.rows
    played = [each for each in rows if each.policy]
    shown = _table(rows)
    sections = [Section("answer", "The answer", (Answer(sentences(rows)),))]
    if played:
        every = Shown(Table(played, ROWS), "rows-table", "Every row", printed=lambda width: ())
        sections += [
            Section("groups", "By group", (_GROUPS, Shown(shown, "groups-table", "By group"))),
            Section("rows", "Every row", (every,)),
        ]

    def pictures() -> Iterator[Section]:
        if known := [each for each in played if not math.isnan(each.error)]:
            points = Figures("scatter", [Choice(scatter(known))])
            yield Section("scatter", "Ratio, row by row", (_SCATTER, points))

    return Report(
        "policies",
        "Policies on engines",
        f"{counted(len(played), 'row')} of {len(rows):,} played: {result.about['runs']}",
        sections,
        pictures,
        (
            Listed(wrong_signs(rows), "Wrong signs", printed=True),
            Listed(not_played(rows), "Not played", printed=True),
            Facts("Settings", dict(result.about)),
            Facts("Columns", shown.definitions()),
        ),
        {"arborsim-policies.csv": partial(to_frame, result)},
        leading=sentences(rows),
    )


def scatter(rows: Sequence[PlayedPolicy]) -> page.Figure:
    """Measured against simulated ratio: a colour per engine; fitted rows apart."""
    engines = sorted({each.run.text("engine") for each in rows})
    ends = [
        min(min(x.run.ratio, x.ratio) for x in rows),
        max(max(x.run.ratio, x.ratio) for x in rows),
    ]
    line = {"color": "var(--bound)", "width": 1.5, "dash": "dash"}
    data = [page.scatter("", ends, ends, line=line, hoverinfo="skip", showlegend=False)]
    mine = judged(rows)
    for number, engine in enumerate(engines):
        own = [each for each in mine if each.run.text("engine") == engine]
        if own:
            data.append(_markers(engine, own, page.colour(1 + number)))
    others = [each for each in rows if each not in mine]
    if others:
        data.append(
            {**_markers("fitted, or other flags", others, "var(--soft)"), "visible": "legendonly"}
        )
    x, y = (
        page.axis(f"{side} ratio to full retention") | page.size_axis(ends, 1.0)
        for side in ("measured", "simulated")
    )
    return page.figure(data, x, y, 560)


def _markers(name: str, rows: Sequence[PlayedPolicy], paint: str) -> page.Figure:
    tip = "%{customdata}<br>measured %{x:.3g}<br>simulated %{y:.3g}<extra></extra>"
    x, y = (
        [page.rounded(each.run.ratio) for each in rows],
        [page.rounded(each.ratio) for each in rows],
    )
    names = [page.label(each.run.name) for each in rows]
    tips: page.Figure = {"customdata": names, "hovertemplate": tip}
    return page.scatter(
        name, x, y, "markers", marker={"color": paint, "size": 8, "opacity": 0.8}, **tips
    )
