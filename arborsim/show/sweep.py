"""What a sweep found: tables of cells or of groups of them, and one page to compare."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.core import documents
from arborsim.core.errors import UnknownName
from arborsim.core.tables import csv_text
from arborsim.run.results import ANY, related
from arborsim.show import images, replay_figures
from arborsim.show.images import Plot
from arborsim.show.replay import ANSWERS, COLUMNS, NAMES
from arborsim.show.table import (
    LABEL,
    NAME,
    NOTHING,
    UNKNOWN,
    Column,
    Table,
    print_heading,
    print_tables,
    shown,
)
from arborsim.show.words import counted, listed, plain
from arborsim.sweep.cells import DONE, FIGURES, HEAD, ORIGIN, WENT_WRONG, CellRow

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

#: What follows from other cells: columns after those of the files.
RELATIVE = ("hbm_vs_full", "time_vs_full", "speed_vs_full", "oracle_gap")
COLUMNS_OF_CELLS = {**HEAD, **FIGURES, **ORIGIN}
#: Parameters that a place is named by, and what those that say nothing have.
_PLACE = {
    "kind": "replay", "trace": "", "gpu": "", "host": "", "engine": "", "model": "",
    "kv_dtype": "", "weights": "", "recall": "stage", "page_size": 1, "tree_attention": True,
    "first": 0, "episodes": 0, "quality": True, "more": "",
}  # fmt: skip
_LEADING = (
    "right", "right_interval", "peak_hbm", "hbm_vs_full", "peak_ddr", "total", "time_vs_full",
    "kept", "gap", "error",
)  # fmt: skip
#: With more cells than this, a terminal shows groups unless it is told which.
MOST_CELLS = 200
GROUPED = ("policy", "budget")


@dataclass(frozen=True)
class SweepReport:
    """Cells of a folder, those that were asked for."""

    folder: str
    rows: tuple[CellRow, ...]
    by: tuple[str, ...] = ()  #: columns that groups share; none for no groups
    superseded: int = 0  #: cells that later ones with the same parameters take the place of

    @property
    def done(self) -> list[CellRow]:
        """Cells that have figures."""
        return [row for row in self.rows if row.status == DONE]


@dataclass(frozen=True)
class Grouped:
    """Cells that share some parameters.

    Answers are sums; shares and ratios, which compare across traces, are means over the cells that
    know them.
    """

    shared: tuple[str, ...]
    cells: int
    without: int  #: cells that were left out or failed
    hbm_vs_full: float
    time_vs_full: float
    attention_kept: float
    oracle_gap: float
    output_error: float
    right: float
    answered: float


GROUP_FIGURES = tuple(each.name for each in fields(Grouped) if each.name != "shared")


def compared(rows: Iterable[CellRow]) -> list[CellRow]:
    """Rows in the order of their places, with what is relative to full retention there."""
    known = related(list(rows), lambda row: row.place)
    ordered = sorted(
        known,
        key=lambda row: (
            # Cells of other versions lack some parameters: they come first.
            [(each is not None, each) for each in row.place],
            _budget(row.budget), row.policy, row.settings,
        ),
    )  # fmt: skip
    full = {
        row.place: row.answers for row in ordered if row.is_baseline and row.answers is not None
    }
    return [_answered(row, full.get(row.place)) for row in ordered]


def _budget(text: str) -> tuple[float, str]:
    try:
        return float(text), text
    except ValueError:
        return -1.0, text


def _answered(row: CellRow, full: Any) -> CellRow:
    """With the answers of full retention on the same problems."""
    own = row.answers
    if own is None or full is None or full.n != own.n:
        return row
    return replace(row, answers=replace(own, full_right=full.right))


def kept(rows: Iterable[CellRow], where: Mapping[str, Sequence[str]]) -> list[CellRow]:
    """Rows whose columns have one of the given values, as text; names know their nearest."""
    for name in where:
        _check(name)
    return [
        row for row in rows
        if all(_text(row, name) in values for name, values in where.items())
    ]  # fmt: skip


def _check(name: str) -> None:
    if name not in HEAD:
        raise UnknownName("parameter of cells", name, HEAD)


def _text(row: CellRow, name: str) -> str:
    value = getattr(row, name)
    return str(value).lower() if isinstance(value, bool) else str(value)


def groups(report: SweepReport, by: Sequence[str]) -> list[Grouped]:
    """A record per combination of values of these columns, in the order of these."""
    for name in by:
        _check(name)
    found = _sharing(report.rows, by)
    ordered = sorted(found.items(), key=lambda group: [_budget(text) for text in group[0]])
    return [_grouped(shared, rows) for shared, rows in ordered]


def _sharing(
    rows: Iterable[CellRow], by: Sequence[str]
) -> dict[tuple[str, ...], list[CellRow]]:  # fmt: skip
    found: dict[tuple[str, ...], list[CellRow]] = {}
    for row in rows:
        found.setdefault(tuple(_text(row, name) for name in by), []).append(row)
    return found


def _grouped(shared: tuple[str, ...], rows: Sequence[CellRow]) -> Grouped:
    done = [row for row in rows if row.status == DONE]
    scores = [row.answers for row in done if row.answers is not None]
    return Grouped(
        shared, len(rows), len(rows) - len(done),
        _mean(row.relative.peak_hbm for row in done),
        _mean(row.relative.time for row in done),
        _mean(row.attention_kept for row in done),
        _mean(row.oracle_gap for row in done),
        _mean(row.output_error for row in done),
        sum(score.right for score in scores) if scores else math.nan,
        sum(score.n for score in scores) if scores else math.nan,
    )  # fmt: skip


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


# ------------------------------------------------------------------------- files


def to_frame(report: SweepReport) -> pd.DataFrame:
    """A row per cell: the columns of its file, then those relative to full retention."""
    import pandas as pd

    types = {"str": "str", "int": "Int64", "float": "float64", "bool": "boolean"}
    columns = COLUMNS_OF_CELLS
    records = [_flat(row) for row in report.rows]
    frame = pd.DataFrame(records, columns=[*columns, *RELATIVE])
    return frame.astype({name: types[kind] for name, kind in columns.items()})


def _flat(row: CellRow) -> dict[str, Any]:
    score = row.answers
    found = {
        **{name: getattr(row, name, None) for name in (*HEAD, *FIGURES)},
        **vars(row.time), "total_s": row.total_s, "tokens_per_s": row.tokens_per_s,
        "right": score.right if score else None, "answered": score.n if score else None,
        "infeasible": score.infeasible if score else None,
        "code": row.code, "inputs": row.inputs,
        "hbm_vs_full": row.relative.peak_hbm, "time_vs_full": row.relative.time,
        "speed_vs_full": row.relative.tokens_per_s, "oracle_gap": row.oracle_gap,
    }  # fmt: skip
    unknown = {name for name, kind in FIGURES.items() if kind != "str" and _nan(found[name])}
    return {name: None if name in unknown else value for name, value in found.items()}


def _nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def group_frame(report: SweepReport, by: Sequence[str]) -> pd.DataFrame:
    """A row per group."""
    import pandas as pd

    names = GROUP_FIGURES
    return pd.DataFrame(
        [
            {**dict(zip(by, each.shared, strict=True)), **{n: getattr(each, n) for n in names}}
            for each in groups(report, by)
        ],
        columns=[*by, *names],
    )


def to_json(report: SweepReport) -> str:
    """Everything as strict JSON; groups if there are any, else cells."""
    frame = group_frame(report, report.by) if report.by else to_frame(report)
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return documents.to_json({
        "folder": report.folder, "cells": len(report.rows), "superseded": report.superseded,
        "by": list(report.by), "rows": rows,
    })  # fmt: skip


# ------------------------------------------------------------------------- tables


def _columns() -> list[Column[Any]]:
    total = replace(COLUMNS["total"], value=lambda r: r.total_s)
    found = [total if key == "total" else COLUMNS[key] for key in _LEADING]
    return [replace(c, hide=NOTHING) if c.key == "peak_ddr" else c for c in found]


def table(rows: Sequence[CellRow], **more: Any) -> Table[CellRow]:
    """Cells under the figures that decide; one that has none says why."""
    done = [row for row in rows if row.status == DONE]
    return Table(
        rows, (*NAMES, *shown(_columns(), done)), look=_look,
        reason=lambda row: f"{row.status}: {row.left_out}" if row.status != DONE else "", **more,
    )  # fmt: skip


def _look(row: CellRow) -> str:
    return "baseline" if row.is_baseline else ""


def places(rows: Iterable[CellRow]) -> dict[str, list[CellRow]]:
    """Cells that are compared, by what they share in words; what all share is said in `notes`."""
    own: dict[tuple[object, ...], list[CellRow]] = {}
    for row in rows:
        own.setdefault(row.place, []).append(row)
    differ = _differing([each[0] for each in own.values()])
    return {
        ": ".join(filter(None, (each[0].trace, _place(each[0], differ)))): each
        for each in own.values()
    }


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
        plainly = isinstance(value, str) and name not in ("recall", "kv_dtype", "weights")
        said.append(str(value) if plainly else f"{name.replace('_', ' ')} {_text(row, name)}")
    return ", ".join(said)


def group_table(report: SweepReport, by: Sequence[str]) -> Table[Grouped]:
    """Groups under the figures that decide."""
    rows = groups(report, by)
    names = [
        Column(name, name.replace("_", " ").capitalize(), LABEL, text=_shared(place),
               head=(name.replace("_", " "),))
        for place, name in enumerate(by)
    ]  # fmt: skip
    names[:1] = [replace(each, kind=NAME) for each in names[:1]]
    figures: list[Column[Grouped]] = [
        Column("cells", "Cells", "count", lambda r: r.cells, "Cells of the group.", ("cells",)),
        Column("without", "Without figures", "count", lambda r: r.without,
               "Cells that were left out or failed.", ("left", "out"), hide=NOTHING),
    ]  # fmt: skip
    for key, name in (("hbm_vs_full", "hbm_vs_full"), ("time_vs_full", "time_vs_full"),
                      ("kept", "attention_kept"), ("gap", "oracle_gap"),
                      ("error", "output_error")):  # fmt: skip
        column: Column[Any] = COLUMNS[key]
        figures.append(replace(column, value=_figure(name), hide=UNKNOWN, words=lambda r: ""))
    right = Column[Grouped]("right", "Right answers", "count", _figure("right"), ANSWERS[0].about,
                            ("right",), text=_right, hide=UNKNOWN)  # fmt: skip
    return Table(rows, (*names, *shown([right, *figures], rows)))


def _shared(place: int) -> Any:
    return lambda row: row.shared[place]


def _figure(name: str) -> Any:
    return lambda row: getattr(row, name)


def _right(row: Grouped) -> str:
    return "" if math.isnan(row.right) else f"{row.right:.0f}/{row.answered:.0f}"


def shown_by(report: SweepReport) -> tuple[str, ...]:
    """By what a terminal shows groups: as asked for, or if there are many cells; () for cells."""
    return report.by or (GROUPED if len(report.rows) > MOST_CELLS else ())


def tables(report: SweepReport) -> Iterator[tuple[str, Table[Any]]]:
    """What is shown: groups if they were asked for or there are many cells, else the cells."""
    if by := shown_by(report):
        yield _title(report, by), group_table(report, by)
        return
    for place, rows in places(report.rows).items():
        yield place, table(rows)


def _title(report: SweepReport, by: Sequence[str]) -> str:
    return f"Means of {counted(len(report.rows), 'cell')} by {', '.join(by)}"


def print_sweep(report: SweepReport, console: Console | None = None) -> None:
    """Print the tables at the width of the terminal, and what could not run."""
    from rich.console import Console

    console = console or Console(highlight=False)
    for place, each in tables(report):
        print_heading(console, place, "")
        print_tables(console, [("", each)], implied=("right_interval", "total"))
    for line in notes(report, shown_by(report)):
        console.print(plain(line), style="dim", markup=False)


def notes(report: SweepReport, by: Sequence[str] = ()) -> list[str]:
    """What to know about the cells, and about their groups."""
    found = []
    if best := overall(report):
        found.append(best)
    if by:
        found += _about_means(groups(report, by), report)
    failed = sum(row.status == WENT_WRONG for row in report.rows)
    if failed:
        found.append(f"{counted(failed, 'cell')} failed: arborsim sweep tries them again.")
    if by and not report.by:
        found.append("Groups are shown: --by chooses others, --csv and --parquet write the cells.")
    if report.superseded:
        found.append(
            f"{counted(report.superseded, 'cell')} of earlier inputs or versions of arborsim are "
            "left out."
        )
    unfit = sum(not row.fits for row in report.done)
    if unfit:
        found.append(
            f"{counted(unfit, 'cell')} do not fit the machine (column fits): figures are those of "
            "one with enough memory."
        )
    same = [name for name in _PLACE if name not in _differing(report.rows)]
    if shared := _place(report.rows[0], same):
        found.append(f"All cells: {shared}.")
    if any(row.kind == "replay" for row in report.done):
        found.append("Bytes and seconds of replays are simulated.")
    return found


def overall(report: SweepReport) -> str:
    """Which policies and budgets need little memory on all traces and machines; "" if none can.

    Those are compared that have figures on all traces and machines.  Quality is right answers if
    all count them, else attention kept; nothing with less memory has more of it.
    """
    rows = [row for row in report.rows if not (row.is_bound or row.is_baseline)]
    own = _sharing(rows, ("policy", "settings", "budget", "recall"))
    grounds = {_by_recall(row).place for row in rows}
    able = [
        _grouped(shared, cells) for shared, cells in own.items()
        if {_by_recall(row).place for row in cells if row.status == DONE} == grounds
    ]  # fmt: skip
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


def _about_means(rows: Sequence[Grouped], report: SweepReport) -> Iterator[str]:
    """Where means are over fewer cells than the table says."""
    if any(each.without for each in rows):
        yield (
            "Means are over the cells that have figures, so groups with some left out do not "
            "compare with others: --where takes cells that all have."
        )
    for key in ("kept", "error"):
        known = sum(not math.isnan(COLUMNS[key].value(row)) for row in report.done)
        if 0 < known < len(report.done):
            yield f"{COLUMNS[key].title} is known of {known} of {len(report.done)} cells."


# ------------------------------------------------------------------------- the page


def write_page(report: SweepReport, path: Path, command: str) -> None:
    """One page: a table of groups or cells that sorts, and memory against what each place knows."""
    rows = report.rows
    by_place = places(rows)
    sections = {id(row): place for place, own in by_place.items() for row in own}
    cells = replace(
        table(rows, leading=None), section=lambda row: sections[id(row)], titled=True
    )  # fmt: skip
    by = report.by
    images.write(
        list(_plots(rows)), path, command=command,
        title=_title(report, by) if by else "A sweep compared",
        table=group_table(report, by) if by else cells, notes=notes(report, by),
        csv=csv_text(group_frame(report, by) if by else to_frame(report)),
        settings={"folder": report.folder, "cells": str(len(rows))},
    )  # fmt: skip


def _plots(rows: Iterable[CellRow]) -> Iterator[Plot]:
    """Memory against answers, attention kept or time, of each place; ways to recall in one plot."""
    for place, own in places(map(_by_recall, rows)).items():
        # Once of those that recall nothing.
        done = list({(row.policy, row.settings, row.budget): row for row in own
                     if row.status == DONE}.values())  # fmt: skip
        for metric in (replay_figures.RIGHT, replay_figures.KEPT, replay_figures.TIMES):
            if len(done) > 1 and replay_figures.known(metric, done):
                drawn = replay_figures.pareto(done, metric)
                efficient = (f"{n}  {text}" for n, text in enumerate(drawn["efficient"], 1))
                title = f"{place}: {metric.title.lower()} against memory"
                yield Plot(title, drawn["figure"], tuple(efficient))
                break


def _by_recall(row: CellRow) -> CellRow:
    """The cell where all are that differ in the way to recall alone, named by that if it does."""
    usual = str(_PLACE["recall"])
    recalls = row.recall != usual and COLUMNS["peak_ddr"].value(row) > 0
    policy = f"{row.policy}, {row.recall}" if recalls else row.policy
    return replace(row, recall=usual, policy=policy)
