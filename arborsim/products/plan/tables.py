"""The tables of a plan: columns of pages and of terminals, and frames in which nothing is rounded.

Their titles and meanings are in ``columns.toml``.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from arborsim.core.tiers import BELOW_DDR
from arborsim.core.units import Scale, scale_for
from arborsim.products.plan import words
from arborsim.products.plan.files import candidate_row, point_row
from arborsim.products.plan.results import (
    RUN_LENGTH,
    CandidateResult,
    LoadPoint,
    PlanResult,
    compared_point,
    paid,
    ranked,
)
from arborsim.report.table import LABEL, NOTHING, REMARK, UNKNOWN, Column, Table, name_column, shown
from arborsim.report.words import digits, plain_scale

if TYPE_CHECKING:
    import pandas as pd

    from arborsim.products.plan.sensitivity import Sensitivity

Range = tuple[float, float]
Columns = tuple[Column[CandidateResult], ...]
#: Why there is no larger load, where it is not the target: a mark and what it means.
BEYOND = {
    "throughput": ("=", "beyond it searches arrive faster than they end"),
    RUN_LENGTH: ("+", "runs are too short to tell: longer ones can show more or less"),
}
#: Titles and fields of what tells candidates apart.
NAMES = {"Policy": "policy", "Budget": "budget", "Recall": "recall", "GPU": "hardware"}


@cache
def texts() -> dict[str, Any]:
    """Titles, heads and meanings of columns, by their keys; ``files`` are those of CSV files."""
    file = resources.files("arborsim.products.plan").joinpath("columns.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def tables(plan: PlanResult) -> tuple[Table[CandidateResult], Table[CandidateResult]]:
    """The candidates that meet the target, with what decides, and with their use of the machine.

    Two tables: all columns side by side fit neither a screen nor a sheet of paper.
    """
    chosen = plan.recommendation
    marks = {
        chosen.candidate: ("★", "recommended"),
        chosen.alternative: ("☆", "nearest alternative"),
    }
    whole, names = _named(plan)
    whole = replace(whole, badge=lambda row: marks.get(row.number))
    main, use = (*cost_columns(plan), *_loads(plan), *_reasons()), (*_use(), *_alone())
    first, second = ((*names, *shown(columns, whole.rows)) for columns in (main, use))
    return whole.under(first), whole.under(second)


def terminal_tables(plan: PlanResult) -> list[tuple[str, Table[CandidateResult]]]:
    """The same with the candidates' numbers, and without what only a page has room for."""
    whole, names = _named(plan)
    chosen = plan.recommendation.candidate
    number: Column[CandidateResult] = Column(
        "#", "#", LABEL, text=lambda row: f"{'*' * (row.number == chosen)}{row.number}"
    )
    saturated = _column("saturated", LABEL, text=lambda row: words.saturates(row.at_largest))
    groups = (cost_columns(plan), (*_loads(plan), saturated), _use())
    return [("", whole.under((number, *names, *shown(some, whole.rows)))) for some in groups]


def _named(plan: PlanResult) -> tuple[Table[CandidateResult], Columns]:
    """The ranked candidates without figures, and the columns that tell them apart."""
    rows, chosen = ranked(plan), plan.recommendation.candidate

    def tells(part: str) -> bool:
        values = {getattr(row, part) for row in rows}
        return part == "policy" or len(values) > 1 or (part == "budget" and values != {"-"})

    def column(title: str, part: str) -> Column[CandidateResult]:
        return name_column(title, lambda row: str(getattr(row, part)))

    names = tuple(column(title, part) for title, part in NAMES.items() if tells(part))
    return Table(rows, (), look=lambda row: "chosen" if row.number == chosen else ""), names


def _column(
    key: str,
    kind: str,
    value: Callable[[CandidateResult], float] = lambda row: math.nan,
    place: Sequence[str] = ("", ""),
    **others: Any,
) -> Column[CandidateResult]:
    """A column by its key; `place` are where costs are compared, for a title and in full."""
    said = texts()[key]
    title, about = (
        said.get(text, "").format(where=place[0], place=place[1]) for text in ("title", "about")
    )
    hide = "" if kind in (LABEL, REMARK) else UNKNOWN
    others.setdefault("hide", hide)
    others.setdefault("bar", kind == "percent")
    return Column(key, title, kind, value, about, tuple(said.get("head", ())), **others)


def _largest(
    key: str, kind: str, *read: Callable[[LoadPoint], float], **others: Any
) -> Column[CandidateResult]:
    """Figures at the largest load: rows are sorted by the first, and more share a cell instead."""

    def there(figure: Callable[[LoadPoint], float]) -> Callable[[CandidateResult], float]:
        return lambda row: math.nan if row.at_largest is None else figure(row.at_largest)

    value, *parts = map(there, read)
    return _column(key, kind, value, parts=tuple(parts), **others)


def _short(values: Sequence[float]) -> Scale:
    """The unit of cells that hold several times, with no more digits than they need."""
    found = scale_for("seconds", values)
    most = max((value / found.size for value in values if math.isfinite(value)), default=0)
    return replace(found, decimals=min(found.decimals, 1 if most >= 10 else 2))


def _plainly(unit: str) -> Callable[[Sequence[float]], Scale]:
    return lambda values: plain_scale(values, unit)


def cost_columns(plan: PlanResult) -> Columns:
    """Costs of solved searches and of all, of an hour, and how many GPUs: at the stated load."""
    place = ("stated load", "the stated load of all machines, with their idle time")
    if plan.stated_load is None:
        place = ("largest load", "the row's own largest load, as none is stated")

    def costs(
        key: str, bounds: Callable[[CandidateResult], Range | None]
    ) -> Column[CandidateResult]:
        def text(row: CandidateResult) -> str:
            found = bounds(row)
            return "-".join(dict.fromkeys(map(digits, found))) if found else "n/a"

        def value(row: CandidateResult) -> float:
            return words.middle(bounds(row))

        return _column(key, "count", value, place, text=text, scale=_plainly(plan.currency))

    def of_searches(row: CandidateResult, solved: bool = False) -> Range | None:
        point = compared_point(row)
        return None if point is None else paid(row, point, plan.unit, solved)

    return (
        costs("cost_solved", lambda row: of_searches(row, solved=True)),
        costs("cost", of_searches),
        costs("hour", lambda row: (row.fleet or row).price_per_hour),
        _column("gpus", "count", lambda row: row.fleet.gpus if row.fleet else math.nan),
    )


def _loads(plan: PlanResult) -> Columns:
    clients = plan.unit == "clients"

    def load(row: CandidateResult) -> float:
        return row.largest or math.nan

    def largest(row: CandidateResult) -> str:
        """Marked where it is not the target that stops a larger one."""
        mark, _ = BEYOND.get(row.limited_by, ("", ""))
        return (f"{load(row):,.0f}" if clients else digits(load(row))) + mark

    def kept(row: CandidateResult) -> float:
        return 1.0 if row.quality and row.quality.exact else words.kept(row)

    def quantiles(key: str, name: str, *ranks: str) -> Column[CandidateResult]:
        def read(rank: str) -> Callable[[LoadPoint], float]:
            return lambda point: getattr(getattr(point, name), rank)

        return _largest(key, "seconds", read("p95"), *map(read, ranks), scale=_short)

    return (
        _column("largest", "count", load, text=largest, scale=_plainly(plan.unit)),
        quantiles("search", "search_s", "p50", "p95", "p99"),
        quantiles("token", "token_s", "p50", "p95"),
        _column("kept", "percent", kept, words=words.kept_note),
        _column("accuracy", "percent", words.accuracy),
    )


def _by_seed(row: CandidateResult) -> float:
    loads = row.largest_by_seed
    return max(loads) / min(loads) - 1 if len(loads) > 1 else math.nan


def _read(shares: str, memory: str) -> Callable[[LoadPoint], float]:
    """Reads a share of a memory below DDR; 0 on machines without it."""
    return lambda point: float(getattr(point.used, shares).get(memory, 0.0))


def _of_memory(column: Column[CandidateResult], name: str) -> Column[CandidateResult]:
    """A column with the name of a memory in place of ``MEMORY``."""
    title, about, *head = (
        text.replace("MEMORY", name) for text in (column.title, column.about, *column.head)
    )
    return replace(
        column, key=f"{column.key}_{name.lower()}", title=title, about=about, head=tuple(head)
    )


def _use() -> Columns:
    def share(key: str, **others: Any) -> Column[CandidateResult]:
        return _largest(key, "percent", lambda point: getattr(point.used, key), **others)

    def count(key: str, name: str, hide: str = UNKNOWN, unit: str = "") -> Column[CandidateResult]:
        scale = _plainly(unit)
        return _largest(key, "count", lambda p: getattr(p, name), hide=hide, scale=scale)

    below = (
        _of_memory(_largest(key, "percent", read, hide=NOTHING), name)
        for name in BELOW_DDR
        for key, read in (("below", _read("below", name)), ("link", _read("links", name)))
    )
    return (
        _largest("served", "count", lambda p: p.served_per_s.value, scale=_plainly("searches/s")),
        _column("by_seed", "percent", _by_seed, bar=False),
        count("concurrency", "concurrency"),
        *map(share, ("hbm", "memory", "compute")),
        *(share(key, hide=NOTHING) for key in ("pcie_down", "pcie_up", "host")),
        *below,
        count("preempted", "preemptions_per_1000", NOTHING),
        count("refused", "refused_per_1000", NOTHING),
    )


def _alone() -> Columns:
    def peak(memory: str) -> Column[CandidateResult]:
        def read(row: CandidateResult) -> float:
            return row.alone.peak_stored_bytes.get(memory, 0.0) if row.alone else 0.0

        return _of_memory(_column("stored", "bytes", read, hide=NOTHING), memory)

    return (
        _largest("first", "seconds", lambda point: point.first_token_s.p95),
        _column("alone", "seconds", lambda row: row.alone.seconds if row.alone else math.nan),
        *map(peak, BELOW_DDR),
    )


def _reasons() -> Columns:
    return (
        _column("runs_out", REMARK, text=words.runs_out),
        _column("stopped_by", REMARK, text=words.stopped_by),
    )


def candidates(plan: PlanResult) -> pd.DataFrame:
    """One row per candidate, at its largest load."""
    return _frame(candidate_row(row, plan) for row in plan.candidates)


def curves(plan: PlanResult) -> pd.DataFrame:
    """One row per candidate and load that was served."""
    return _frame(_who(row) | point_row(point) for row in plan.candidates for point in row.curve)


def sensitivity(found: Sequence[Sensitivity]) -> pd.DataFrame:
    """One row per candidate, assumption and factor."""
    return _frame(
        {
            "assumption": each.assumption.title,
            "factor": variant.factor,
            "value": each.base * variant.factor,
            "unit": "" if each.assumption.kind == "factor" else each.assumption.kind,
            **_who(variant.result),
            "number": each.candidate,
            "largest": variant.result.largest,
            **point_row(variant.result.at_largest),
        }
        for each in found
        for variant in each.variants
    )


def _who(row: CandidateResult) -> dict[str, Any]:
    parts = ("number", *NAMES.values(), "gpus", "status", "reason")
    return {name: getattr(row, name) for name in parts}


def _frame(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """The columns of all rows; what is not known is empty."""
    import pandas as pd

    return pd.DataFrame(list(records), dtype=object)
