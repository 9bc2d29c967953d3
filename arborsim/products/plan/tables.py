"""The tables of a plan: columns of pages and of terminals, and frames in which nothing is rounded.

``columns.toml`` declares what of them no plan decides.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from arborsim.core.tiers import BELOW_DDR
from arborsim.core.units import Scale, scale_for
from arborsim.products.plan import words
from arborsim.products.plan.costs import compared_point, cost_per_million, paid, ranked
from arborsim.products.plan.files import candidate_row, point_row
from arborsim.products.plan.results import RUN_LENGTH, CandidateResult, PlanResult
from arborsim.report.table import LABEL, Column, Table, name_column, read_columns, shown
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


def _by_seed(row: CandidateResult) -> float:
    loads = row.largest_by_seed
    return max(loads) / min(loads) - 1 if len(loads) > 1 else math.nan


def _short(values: Sequence[float]) -> Scale:
    """The unit of cells that hold several times, with no more digits than they need."""
    found = scale_for("seconds", values)
    most = max((value / found.size for value in values if math.isfinite(value)), default=0)
    return replace(found, decimals=min(found.decimals, 1 if most >= 10 else 2))


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "kept": lambda row: 1.0 if row.quality and row.quality.exact else words.kept(row),
    "kept note": words.kept_note,
    "accuracy": words.accuracy,
    "unfinished": words.unfinished,
    "growth": words.growth,
    "by seed": _by_seed,
    "saturated": lambda row: words.saturates(row.at_largest),
    "first out": words.first_out_short,
    "carries": lambda row: (row.largest or math.nan) * (row.fleet.machines if row.fleet else 1),
    "answer": lambda row: row.shown_point.search_s.p95 if row.shown_point else math.nan,
    "per gpu": lambda row: words.tokens_per_gpu(row, row.shown_point),
    "runs out": words.runs_out,
    "stopped by": words.stopped_by,
    "short": _short,
    "plain": partial(plain_scale, unit=""),
    "searches/s": partial(plain_scale, unit="searches/s"),
}
#: Columns by group: ``columns.toml`` declares them.
GROUPS = read_columns("arborsim.products.plan", _FUNCTIONS)


def file_columns() -> dict[str, str]:
    """Meanings of the columns of CSV files."""
    return tomllib.loads((files("arborsim.products.plan") / "files.toml").read_text("utf-8"))


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
    main = (*cost_columns(plan), *_loads(plan), *GROUPS["reasons"])
    use = (*_USE, *GROUPS["alone"], *_of_memories("stored"))
    first, second = ((*names, *shown(columns, whole.rows)) for columns in (main, use))
    return whole.under(first), whole.under(second)


#: Columns of the screen that go where a terminal is narrow, the first of them first.
NARROW = ("goodput", "input_cost", "per_user", "per_gpu", "output_cost", "hour", "answer")


def screen_table(plan: PlanResult) -> Table[CandidateResult]:
    """One row per candidate that meets the target, by cost, with what decides."""
    whole, names = _named(plan)
    number: Column[CandidateResult] = Column(
        "#", "#", LABEL, text=lambda row: f"{'*' * (row.number == chosen)}{row.number}"
    )
    chosen = plan.recommendation.candidate
    machines = name_column("Rent", partial(words.fleet_of))
    kept = [each for each in names if each.key not in ("gpu", "budget", "policy")]
    policy = name_column("Policy", words.policy_of)
    solved, cost, hour, _ = cost_columns(plan)
    paid_for = (cost if solved.silent(whole.rows) else solved, hour)
    columns = (*paid_for, *(_of_plan(each, plan) for each in GROUPS["screen"]))
    leading = [
        number,
        machines,
        *([policy] if any(each.key == "policy" for each in names) else []),
        *kept,
    ]
    return whole.under((*leading, *shown(columns, whole.rows)))


def _of_plan(column: Column[CandidateResult], plan: PlanResult) -> Column[CandidateResult]:
    """A column of the screen with the plan's currency and unit in its head."""
    unit = "clients" if plan.unit == "clients" else "per s"
    said = {"currency": plan.currency, "unit": unit}
    column = replace(column, head=tuple(line.format(**said) for line in column.head))
    if column.key == "carries" and plan.unit == "clients":
        return replace(column, text=lambda row: f"{column.value(row):,.0f}")
    if not column.key.endswith("_cost"):
        return column
    output = column.key == "output_cost"

    def bounds(row: CandidateResult) -> Range | None:
        point = compared_point(row)
        return None if point is None else cost_per_million(row, point, plan.unit, output)

    def text(row: CandidateResult) -> str:
        found = bounds(row)
        return "-".join(dict.fromkeys(map(digits, found))) if found else "n/a"

    return replace(column, value=lambda row: words.middle(bounds(row)), text=text)


def use_tables(plan: PlanResult) -> list[tuple[str, Table[CandidateResult]]]:
    """Further figures of each, for a terminal that is asked for all notes."""
    whole, _ = _named(plan)
    number: Column[CandidateResult] = Column("#", "#", LABEL, text=lambda row: str(row.number))
    groups = ((*_loads(plan), *GROUPS["busiest"]), _USE)
    return [("", whole.under((number, *shown(some, whole.rows)))) for some in groups]


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


def cost_columns(plan: PlanResult) -> Columns:
    """Costs of solved searches and of all, of an hour, and how many GPUs: at the stated load."""
    place = ("stated load", "the stated load of all machines, with their idle time")
    if plan.stated_load is None:
        place = ("largest load", "the row's own largest load, as none is stated")

    def of_searches(row: CandidateResult, solved: bool = False) -> Range | None:
        point = compared_point(row)
        return None if point is None else paid(row, point, plan.unit, solved)

    ranges: dict[str, Callable[[CandidateResult], Range | None]] = {
        "cost_solved": partial(of_searches, solved=True),
        "cost": of_searches,
        "hour": lambda row: (row.fleet or row).price_per_hour,
    }

    def priced(column: Column[CandidateResult]) -> Column[CandidateResult]:
        bounds = ranges[column.key]

        def text(row: CandidateResult) -> str:
            found = bounds(row)
            return "-".join(dict.fromkeys(map(digits, found))) if found else "n/a"

        return replace(
            column,
            title=column.title.format(where=place[0]),
            about=column.about.format(place=place[1]),
            head=tuple(line.format(noun=plan.noun) for line in column.head),
            value=lambda row: words.middle(bounds(row)),
            text=text,
            scale=partial(plain_scale, unit=plan.currency),
        )

    *costs, gpus = GROUPS["costs"]
    return *map(priced, costs), gpus


def _loads(plan: PlanResult) -> Columns:
    def largest(row: CandidateResult) -> str:
        """Marked where it is not the target that stops a larger one."""
        mark, _ = BEYOND.get(row.limited_by, ("", ""))
        load = row.largest or math.nan
        return (f"{load:,.0f}" if plan.unit == "clients" else digits(load)) + mark

    first, *others = GROUPS["loads"]
    return replace(first, text=largest, scale=partial(plain_scale, unit=plan.unit)), *others


def _of_memories(group: str) -> Iterator[Column[CandidateResult]]:
    """Columns of a group for each memory below DDR, with its name in place of ``MEMORY``."""
    for name in BELOW_DDR:
        for each in GROUPS[group]:
            title, about, *head = (
                text.replace("MEMORY", name) for text in (each.title, each.about, *each.head)
            )
            key, value = f"{each.key}_{name.lower()}", partial(_stored, each, name)
            yield replace(each, key=key, title=title, about=about, head=tuple(head), value=value)


def _stored(column: Column[CandidateResult], memory: str, row: CandidateResult) -> float:
    """A figure of one memory; 0 on machines without it."""
    found: Any = column.value(row)
    return float(found.get(memory, 0.0)) if isinstance(found, dict) else 0.0


_USE = (*GROUPS["use"], *_of_memories("memories"), *GROUPS["preempted"])


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
