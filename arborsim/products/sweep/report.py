"""Results of a sweep: tables of cells or of groups of them, and one page to compare."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from arborsim.play.results import ANY
from arborsim.products.replay import answers_words
from arborsim.products.replay import figures as replay_figures
from arborsim.products.replay.report import lead
from arborsim.products.replay.tables import COLUMNS, GROUPS, NAMES
from arborsim.products.sweep.cells import DONE, WENT_WRONG, CellRow
from arborsim.products.sweep.compare import (
    Grouped,
    SweepReport,
    averaged,
    group_frame,
    group_of,
    grouping,
    groups,
    sharing,
    text_of,
    to_frame,
)
from arborsim.products.sweep.grid import MACHINE
from arborsim.report import images
from arborsim.report.images import Plot
from arborsim.report.report import Answer, Facts, Listed, Printed, Report, Section, Shown
from arborsim.report.table import LABEL, NAME, Column, Table, read_columns, shown
from arborsim.report.words import counted, listed, nats

#: Parameters that a place is named by, and what those that say nothing have.
_PLACE = {
    "kind": "replay",
    "trace": "",
    **MACHINE,
    "gpu": "",
    "engine": "",
    "first": 0,
    "episodes": 0,
    "quality": True,
    "more": "",
}
#: What live runs do not have.
_OF_REPLAYS = {"page_size", "quality"}
#: With more cells than this, of several places, a terminal shows groups unless it is told which.
MOST_CELLS = 36


def table(rows: Sequence[CellRow]) -> Table[CellRow]:
    """Cells under the figures that decide; one that has none says why."""
    done = [row for row in rows if row.status == DONE]
    columns: tuple[Column[Any], ...] = GROUPS["short"]
    return Table(
        rows,
        (*NAMES, *shown([column for column in columns if column.key != "moved"], done)),
        look=lambda row: "baseline" if row.is_baseline else "",
        reason=lambda row: f"{row.status}: {row.left_out}" if row.status != DONE else "",
    )


def places(rows: Iterable[CellRow]) -> dict[str, list[CellRow]]:
    """Cells that are compared, by what they share in words; what all share is said in `notes`."""
    own: dict[tuple[object, ...], list[CellRow]] = {}
    for row in rows:
        own.setdefault(row.place, []).append(row)
    differ = _differing([each[0] for each in own.values()])
    found: dict[str, list[CellRow]] = {}
    for each in own.values():
        title = ": ".join(filter(None, (each[0].trace, _place(each[0], differ))))
        if title in found:  # of other inputs or another version
            title = f"{title} ({each[0].origin})"
        found[title] = each
    return found


def _differing(rows: Sequence[CellRow]) -> list[str]:
    """Parameters of a place that are not the same in all rows."""
    return [name for name in _PLACE if len({getattr(row, name) for row in rows}) > 1]


def _place(row: CellRow, names: Iterable[str]) -> str:
    """``"h100, recall stream"``."""
    said = []
    for name in names:
        value = getattr(row, name)
        if name == "trace" or value in (_PLACE[name], ""):
            continue
        if row.kind == "live" and name in _OF_REPLAYS and not value:
            continue
        plainly = isinstance(value, str) and name not in ("recall", "kv_dtype", "weights")
        said.append(str(value) if plainly else f"{name.replace('_', ' ')} {text_of(row, name)}")
    return ", ".join(said)


def group_table(report: SweepReport, by: Sequence[str]) -> Table[Grouped]:
    """Groups under the figures that decide."""
    rows = groups(report, by)
    heads = [name.replace("_", " ") for name in by]
    names = [
        Column(name, head.capitalize(), LABEL if place else NAME, text=_shared(place), head=(head,))
        for place, (name, head) in enumerate(zip(by, heads, strict=True))
    ]
    found = read_columns(
        "arborsim.products.sweep",
        {"right_text": _right, "kl_text": _kl, "unsaid": lambda row: ""},
        COLUMNS,
    )["groups"]
    return Table(rows, (*names, *shown(found, rows)))


def _shared(place: int) -> Callable[[Grouped], str]:
    return lambda row: row.shared[place]


def _right(row: Grouped) -> str:
    return "" if math.isnan(row.right) else f"{row.right:.0f}/{row.answered:.0f}"


def _kl(row: Grouped) -> str:
    return "" if math.isnan(row.kl) else nats(row.kl)


def shown_by(report: SweepReport) -> tuple[str, ...]:
    """By what a terminal shows groups: as asked for, or for many cells; () shows the cells."""
    many = len(report.rows) > MOST_CELLS and len(places(report.rows)) > 1
    return grouping(report) if report.by or many else ()


def _printed(report: SweepReport, cells: Table[CellRow], width: int) -> Iterator[Printed]:
    """Groups if they were asked for or there are many cells, else the cells."""
    by = shown_by(report)
    yield _title(report, by) if by else "", "", [("", group_table(report, by) if by else cells)]


def _title(report: SweepReport, by: Sequence[str]) -> str:
    return f"Means of {counted(len(report.rows), 'cell')} by {', '.join(by)}"


def notes(report: SweepReport, by: Sequence[str] = ()) -> list[str]:
    """Notes on the cells and on their groups, those that can change a decision first."""
    found = answers_words.fidelity_notes(report.done)
    failed = sum(row.status == WENT_WRONG for row in report.rows)
    if failed:
        found.append(f"{counted(failed, 'cell')} failed: arborsim sweep tries them again.")
    mixed = Counter(place[:-1] for place in {row.place for row in report.rows})
    if any(number > 1 for number in mixed.values()):
        found.append(
            "Some cells of one trace and machine are of other inputs or versions of arborsim, and "
            "do not compare: sweep their grids again."
        )
    unfit = sum(not row.fits for row in report.done)
    if unfit:
        found.append(
            f"{counted(unfit, 'cell')} do not fit the machine (column fits): figures are those of "
            "one with enough memory."
        )
    if by:
        found += _about_means(groups(report, by), report, by)
    if by and not report.by:
        found.append("Groups are shown: --by chooses others, --csv and --parquet write the cells.")
    if any(row.kind == "replay" for row in report.done):
        found.append("Bytes and seconds of replays are simulated.")
    if report.superseded:
        found.append(
            f"{counted(report.superseded, 'cell')} of other inputs or versions of arborsim, put "
            f"aside in {report.folder}/earlier, are left out."
        )
    return found


def _leading(report: SweepReport, own: Mapping[str, Sequence[CellRow]]) -> list[str]:
    """The answer that holds on all traces and machines, else what is best on each."""
    if best := overall(report):
        return [best]
    done = {place: [row for row in rows if row.status == DONE] for place, rows in own.items()}
    return lead({place: rows for place, rows in done.items() if rows})


def overall(report: SweepReport) -> str:
    """Which policies and budgets need little memory on all traces and machines; "" if none can.

    Those are compared that have figures on all traces and machines.  Quality is right answers if
    all count them, else attention kept; nothing with less memory has more of it.
    """
    rows = [row for row in report.rows if not (row.is_bound or row.is_baseline)]
    if len({row.kind for row in rows}) > 1:
        return ""  # seconds and bytes of both kinds have no mean
    own = sharing(rows, ("policy", "settings", "budget", "recall"))
    grounds = {_by_recall(row).place for row in rows}
    able = [
        group_of(shared, cells)
        for shared, cells in own.items()
        if {_by_recall(row).place for row in cells if row.status == DONE} == grounds
    ]
    counts = all(each.answered > 0 for each in able)
    known = [
        (each.hbm_vs_full, -(each.right / each.answered if counts else each.attention_kept), each)
        for each in able
    ]
    known = [each for each in known if not (math.isnan(each[0]) or math.isnan(each[1]))]
    if len(grounds) < 2 or len(known) < 2:
        return ""
    said, best = [], math.inf
    for memory, lost, each in sorted(known, key=lambda k: k[:2]):
        if lost < best:
            best = lost
            usual = ("", ANY, _PLACE["recall"])
            name = " ".join(part for part in each.shared if part not in usual)
            said.append(f"{name} ({memory:.2f} of full retention's HBM, {-lost:.1%})")
    what = "right answers" if counts else "attention kept"
    return (
        f"On average over {counted(len(grounds), 'cell')} each, nothing with less memory has more "
        f"{what} than {listed(said)}."
    )


def _about_means(rows: Sequence[Grouped], report: SweepReport, by: Sequence[str]) -> Iterator[str]:
    """Say what means are over, and where over fewer cells than the table says."""
    if differing := averaged(report, by):
        names = listed([name.replace("_", " ") for name in differing])
        yield f"Groups are over all there is of {names}: --by tells those apart."
    if any(each.without for each in rows):
        yield (
            "Means are over the cells that have figures, so groups with some left out do not "
            "compare with others: --where takes cells that all have."
        )
    for key in ("kept", "error"):
        known = sum(not math.isnan(COLUMNS[key].value(row)) for row in report.done)
        if 0 < known < len(report.done):
            yield f"{COLUMNS[key].title} is known of {known} of {len(report.done)} cells."


def report_of(report: SweepReport, command: str) -> Report:
    """The answer, groups or cells, and memory against what each knows."""
    rows = report.rows
    by = grouping(report) if report.by else ()
    found = places(rows)
    sections = {id(row): place for place, own in found.items() for row in own}
    cells = replace(table(rows), section=lambda row: sections[id(row)], titled=len(found) > 1)
    compared = Shown(
        group_table(report, by) if by else cells,
        printed=partial(_printed, report, cells),
        implied=("right_interval", "total"),
    )
    said, known = _leading(report, found), notes(report, shown_by(report))
    same = [name for name in _PLACE if name not in _differing(rows)]
    shared = _place(rows[0], same)
    made = {"command": command, "folder": report.folder, "cells": str(len(rows))}
    return Report(
        "sweep",
        _title(report, by) if by else "A sweep compared",
        f"All cells: {shared}." if shared else "",
        (
            Section("answer", "The answer", [*[Answer(said)] * bool(said), Listed(known)]),
            Section("cells", "Groups" if by else "Cells", (compared,)),
        ),
        lambda: images.sections(list(_plots(rows))),
        (Facts("Settings", made),),
        {"cells.csv": partial(group_frame, report, by) if by else partial(to_frame, report)},
        leading=said,
        telling=known,
    )


def _plots(rows: Iterable[CellRow]) -> Iterator[Plot]:
    """Memory against quality or time, of each place; ways to recall in one plot."""
    for place, own in places(map(_by_recall, rows)).items():
        # Once of those that recall nothing.
        known = {(row.policy, row.settings, row.budget): row for row in own if row.status == DONE}
        done = list(known.values())
        metrics = (
            replay_figures.RIGHT,
            replay_figures.KL,
            replay_figures.KEPT,
            replay_figures.TIMES,
        )
        for metric in replay_figures.known_of(done, metrics)[: len(done) > 1]:
            drawn = replay_figures.pareto(done, metric)
            title = f"{place}: {metric.title.lower()} against memory"
            yield Plot(title, drawn.figure, tuple(drawn.numbered()))


def _by_recall(row: CellRow) -> CellRow:
    """The cell where all are that differ in the way to recall alone, named by that if it does."""
    usual = str(_PLACE["recall"])
    recalls = row.recall != usual and COLUMNS["peak_ddr"].value(row) > 0
    policy = f"{row.policy}, {row.recall}" if recalls else row.policy
    return replace(row, recall=usual, policy=policy)
