"""Cells of a sweep side by side: those that are asked for, their groups, as tables to export."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from arborsim.core import documents
from arborsim.core.errors import UnknownName
from arborsim.core.settings import setting_text
from arborsim.play.results import related
from arborsim.policies.registry import available, build, resolved
from arborsim.products.sweep.arms import settings_in
from arborsim.products.sweep.cells import DONE, FIGURES, HEAD, ORIGIN, CellRow, figures_of

if TYPE_CHECKING:
    import pandas as pd

    from arborsim.products.fidelity.known import KnownFidelity

#: What follows from other cells and files: columns after those of the files.
RELATIVE = ("hbm_vs_full", "time_vs_full", "speed_vs_full", "oracle_gap", "kl")
_NO_PARAMETER = ("address", "status", "left_out", "settings", "more")  # or several of them
COLUMNS_OF_CELLS = {**HEAD, **FIGURES, **ORIGIN}
GROUPED = ("policy", "settings", "budget")  #: what groups share unless they are told


@dataclass(frozen=True)
class SweepReport:
    """Cells of a folder, those that were asked for."""

    folder: str
    rows: tuple[CellRow, ...]
    by: tuple[str, ...] = ()  #: columns that groups share; none for no groups
    superseded: int = 0  #: cells of other inputs or code that were put aside

    @property
    def done(self) -> list[CellRow]:
        """Cells that have figures."""
        return [row for row in self.rows if row.status == DONE]


@dataclass(frozen=True)
class Grouped:
    """Cells that share some parameters, and are of one kind: replayed, or run live.

    Answers are sums; shares and ratios, which compare across traces, are means over the cells that
    know them.
    """

    shared: tuple[str, ...]
    cells: int
    without: int  #: cells that were left out or failed
    hbm_vs_full: float
    time_vs_full: float
    kl: float  #: mean KL(full || policy), nats
    attention_kept: float
    oracle_gap: float
    output_error: float
    right: float
    answered: float


GROUP_FIGURES = tuple(each.name for each in fields(Grouped) if each.name != "shared")


def compared(rows: Iterable[CellRow]) -> list[CellRow]:
    """Rows in the order of their places, with what is relative to full retention there."""
    known = related(list(rows), lambda row: row.place)

    def order(row: CellRow) -> tuple[Any, ...]:
        return row.place, _budget(row.budget), row.policy, row.settings

    ordered = sorted(known, key=order)
    full = {row.place: row.answers for row in ordered if row.is_baseline and row.answers}
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


def with_fidelity(rows: Sequence[CellRow], known: KnownFidelity) -> list[CellRow]:
    """Cells with the fidelity that was measured of their policies, with their settings."""
    names = {row.policy for row in known.rows} & set(available())

    def measured(row: CellRow) -> CellRow:
        if row.policy not in names:
            return row
        settings = resolved(build(row.policy, settings_in(row.settings)))
        return replace(row, fidelity=known.of(row.policy, settings, row.budget))

    return [measured(row) for row in rows]


def kept(rows: Iterable[CellRow], where: Mapping[str, Sequence[str]]) -> list[CellRow]:
    """Rows whose columns have one of the given values, as text; names know their nearest."""
    rows = list(rows)
    _check(where, rows)
    tests = where.items()
    return [row for row in rows if all(text_of(row, name) in values for name, values in tests)]


def _check(names: Iterable[str], rows: Iterable[CellRow]) -> None:
    if unknown := [name for name in names if name not in HEAD]:
        known = dict.fromkeys(name for row in rows for name in _settings(row))
        for name in unknown:
            if name not in known:
                raise UnknownName("parameter of cells", name, {**HEAD, **known})


def text_of(row: CellRow, name: str) -> str:
    """A parameter of a cell as text, also one in `settings` or `more`; "" if it has none."""
    return setting_text(getattr(row, name)) if name in HEAD else _settings(row).get(name, "")


def _settings(row: CellRow) -> dict[str, str]:
    """Settings of the policy, and of a live run."""
    return {**settings_in(row.settings), **settings_in(row.more)}


def grouping(report: SweepReport) -> tuple[str, ...]:
    """The columns that groups share: as asked, else policy, settings that are given, and budget.

    Cells that were replayed and those that were run live do not mix: seconds of the former are
    simulated.
    """
    given = any(row.settings for row in report.rows)
    by = report.by or tuple(name for name in GROUPED if given or name != "settings")
    mixed = len({row.kind for row in report.rows}) > 1 and "kind" not in by
    return (*by, "kind") if mixed else by


def averaged(report: SweepReport, by: Sequence[str]) -> list[str]:
    """Parameters that differ in a group."""
    settings = {name: "" for row in report.rows for name in _settings(row)}
    names = [name for name in {**HEAD, **settings} if name not in (*by, *_NO_PARAMETER)]
    shared = sharing(report.rows, by).values()

    def differs(name: str) -> bool:
        return any(len({text_of(row, name) for row in own}) > 1 for own in shared)

    return [name for name in names if differs(name)]


def groups(report: SweepReport, by: Sequence[str]) -> list[Grouped]:
    """A record per combination of values of these columns, in the order of these."""
    _check(by, report.rows)
    found = sharing(report.rows, by)
    ordered = sorted(found.items(), key=lambda group: [_budget(text) for text in group[0]])
    return [group_of(shared, rows) for shared, rows in ordered]


def sharing(rows: Iterable[CellRow], by: Sequence[str]) -> dict[tuple[str, ...], list[CellRow]]:
    """Rows by their values of these columns, as text."""
    found: dict[tuple[str, ...], list[CellRow]] = {}
    for row in rows:
        found.setdefault(tuple(text_of(row, name) for name in by), []).append(row)
    return found


def group_of(shared: tuple[str, ...], rows: Sequence[CellRow]) -> Grouped:
    """The record of a group's rows."""
    done = [row for row in rows if row.status == DONE]
    scores = [row.answers for row in done if row.answers is not None]
    return Grouped(
        shared=shared,
        cells=len(rows),
        without=len(rows) - len(done),
        hbm_vs_full=_mean(row.relative.peak_hbm for row in done),
        time_vs_full=_mean(row.relative.time for row in done),
        kl=_mean(map(divergence, done)),
        attention_kept=_mean(row.attention_kept for row in done),
        oracle_gap=_mean(row.oracle_gap for row in done),
        output_error=_mean(row.output_error for row in done),
        right=sum(score.right for score in scores) if scores else math.nan,
        answered=sum(score.n for score in scores) if scores else math.nan,
    )


def divergence(row: CellRow) -> float:
    """The KL to full retention that was measured, nats; NaN where it was not."""
    return row.fidelity.kl if row.fidelity else math.nan


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def to_frame(report: SweepReport) -> pd.DataFrame:
    """A row per cell: the columns of its file, then those relative to full retention."""
    import pandas as pd

    types = {"str": "str", "int": "Int64", "float": "float64", "bool": "boolean"}
    columns = COLUMNS_OF_CELLS
    records = [_flat(row) for row in report.rows]
    frame = pd.DataFrame(records, columns=[*columns, *RELATIVE])
    return frame.astype({name: types[kind] for name, kind in columns.items()})


def _flat(row: CellRow) -> dict[str, Any]:
    found = {name: getattr(row, name) for name in (*HEAD, *ORIGIN)} | figures_of(row)
    relative, gap = row.relative, row.oracle_gap
    compared = (relative.peak_hbm, relative.time, relative.tokens_per_s, gap, divergence(row))
    found |= dict(zip(RELATIVE, compared, strict=True))
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
    by = grouping(report) if report.by else ()
    frame = group_frame(report, by) if by else to_frame(report)
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    about = {"folder": report.folder, "cells": len(report.rows), "superseded": report.superseded}
    return documents.to_json(about | {"by": list(by), "rows": rows})
