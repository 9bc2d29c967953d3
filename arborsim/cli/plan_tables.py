"""A plan in a terminal: what to take, a table of all candidates, and what did not work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from arborsim.cli.plan_legend import MARKS, legend
from arborsim.plan.recommend import limits_of
from arborsim.plan.results import MISSED, CandidateResult, LoadPoint, PlanResult
from arborsim.show.plan_words import headline, shared_prefixes
from arborsim.show.words import plain

_LONGEST_NAME = 22
_MOST_SLOW = 6  # candidates that are named where all are too slow
_NAMES = {
    "hbm": "HBM space", "host": "DDR space", "searches": "searches", "compute": "compute",
    "memory": "HBM speed", "pcie_down": "PCIe down", "pcie_up": "PCIe up",
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A column: its head, and what it shows of a candidate and its figures."""

    head: str
    show: Callable[[CandidateResult, LoadPoint], str]


def digits(value: float) -> str:
    """Three significant digits, without an exponent where people expect none."""
    if math.isnan(value):
        return "n/a"
    if value == 0:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def _share(value: float) -> str:
    return "-" if value < 0.0005 else f"{100 * value:.0f}" if value >= 0.01 else "<1"


def _cost(bounds: tuple[float, float] | None) -> str:
    if bounds is None:
        return "n/a"
    low, high = digits(bounds[0]), digits(bounds[1])
    return low if low == high else f"{low}-{high}"


def _load_columns(plan: PlanResult) -> list[Column]:
    clients = plan.unit == "clients"

    def largest(candidate: CandidateResult, point: LoadPoint) -> str:
        """Marked where it is not the target that stops a larger one."""
        shown = f"{point.load:,.0f}" if clients else digits(point.load)
        return shown + MARKS.get(candidate.limited_by, "")

    found = [
        Column("clients" if clients else "offered\n/s", largest),
        Column("served\n/s", lambda c, p: digits(p.served_per_s.value)),
        Column("p95\ns", lambda c, p: digits(p.search_s.p95)),
        Column("runs\nout", lambda c, p: _NAMES.get(p.saturated, p.saturated)),
    ]
    if plan.runs > 1:
        found.insert(2, Column("by\nseed", lambda c, p: _by_seed(c)))
    return found


def _by_seed(candidate: CandidateResult) -> str:
    """How far the runs' own largest loads lie apart."""
    low, high = min(candidate.largest_by_seed), max(candidate.largest_by_seed)
    return f"+{100 * (high / low - 1):.0f}%"


def _cost_columns(plan: PlanResult) -> list[Column]:
    found = [
        Column(f"{plan.currency}/1000\nsearches", lambda c, p: _cost(p.cost_per_1000)),
        Column("kept\n%", lambda c, p: _kept(c)),
        Column("at\nonce", lambda c, p: digits(p.concurrency)),
        Column("p50\ns", lambda c, p: digits(p.search_s.p50)),
        Column("p99\ns", lambda c, p: digits(p.search_s.p99)),
        Column("p50\nms/tok", lambda c, p: digits(1e3 * p.token_s.p50)),
        Column("p95\nms/tok", lambda c, p: digits(1e3 * p.token_s.p95)),
    ]
    if any(each.at_largest and each.at_largest.cost_per_solved for each in plan.candidates):
        found.insert(1, Column(f"{plan.currency}/1000\nsolved", lambda c, p: _per_solved(p)))
    if any(each.fleet for each in plan.candidates):
        found.append(Column("fleet\nGPUs", lambda c, p: f"{c.fleet.gpus}" if c.fleet else ""))
    return found


def _use_columns(plan: PlanResult) -> list[Column]:
    found = [
        Column("HBM\n%", lambda c, p: _share(p.used.hbm)),
        Column("HBM\nB/s %", lambda c, p: _share(p.used.memory)),
        Column("comp.\n%", lambda c, p: _share(p.used.compute)),
        Column("PCIe\ndown %", lambda c, p: _share(p.used.pcie_down)),
        Column("PCIe\nup %", lambda c, p: _share(p.used.pcie_up)),
        Column("DDR\n%", lambda c, p: _share(p.used.host)),
        Column("pre-\nempt.", lambda c, p: digits(p.preemptions_per_1000)),
    ]
    if any(each.at_largest and each.at_largest.refused_per_1000 for each in plan.candidates):
        found.append(Column("re-\nfused", lambda c, p: digits(p.refused_per_1000)))
    return found


def _per_solved(point: LoadPoint) -> str:
    solved = point.cost_per_solved
    return "n/a" if solved is None else _cost((1000 * solved[0].value, 1000 * solved[1].value))


def _kept(candidate: CandidateResult) -> str:
    """The attention kept; all of it where no token was dropped."""
    quality = candidate.quality
    if quality is None:
        return "n/a"
    if quality.exact:
        return "100"
    if quality.attention_kept is None:
        return "n/a"
    return f"{100 * quality.attention_kept:.1f}"


def print_plan(plan: PlanResult, console: Console | None = None) -> None:
    """Print the recommendation, then the candidates, the cheapest first, then what failed."""
    console = console or Console(highlight=False)
    console.print(Text(f"{plain(plan.workload)}: {_asked(plan)}", style="bold"))
    if plan.recommendation.candidate is not None:
        console.print(Text(plain(headline(plan)), style="bold"))
        console.print(Text(plain(plan.recommendation.text)))
        if told := shared_prefixes(plan):
            console.print(Text(plain(told)))
    rows = sorted(plan.met(), key=_cheapest)
    if rows:
        console.print()
        for table in _tables(console, plan, rows):
            console.print(table)
        console.print(Text("\n".join(map(plain, legend(plan))), style="dim"))
    _failures(console, plan)
    for note in (*plan.notes, *plan.recommendation.unknown):
        console.print(Text(plain(note), style="dim"))


def _asked(plan: PlanResult) -> str:
    return f"the largest load with {plan.percentile:g}% of searches within {limits_of(plan)}"


def _cheapest(candidate: CandidateResult) -> tuple[float, float, int]:
    point = candidate.at_largest
    assert point is not None
    cost = point.cost_per_1000
    return (math.inf if cost is None else sum(cost), -point.load, candidate.number)


def _tables(console: Console, plan: PlanResult, rows: Sequence[CandidateResult]) -> Iterator[Table]:
    """As few tables as the terminal is wide enough for."""
    loads, costs, use = _load_columns(plan), _cost_columns(plan), _use_columns(plan)
    for layout in ([[*loads, *costs, *use]], [loads, [*costs, *use]], [loads, costs, use]):
        found = [_fitting(console, plan, rows, columns) for columns in layout]
        if all(found):
            break
    for number, (columns, table) in enumerate(zip(layout, found, strict=True)):
        # Long names may be folded once; below, numbers stand for them.
        yield table or _table(plan, rows, columns, 1, {} if number else _identity(rows))


def _fitting(
    console: Console, plan: PlanResult, rows: Sequence[CandidateResult], columns: Sequence[Column]
) -> Table | None:
    """A table with as much air between the columns as fits; None if it does not fit at all."""
    unbounded = console.options.update(max_width=10_000)
    tables = [_table(plan, rows, columns, padding, _identity(rows)) for padding in (2, 1)]
    fitting = (t for t in tables if console.measure(t, options=unbounded).maximum <= console.width)
    return next(fitting, None)


def _table(
    plan: PlanResult,
    rows: Sequence[CandidateResult],
    columns: Sequence[Column],
    padding: int,
    identity: Mapping[str, str],
) -> Table:
    """Without the columns of `identity`, the number tells a candidate from the others."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, padding, 0, 0), pad_edge=False)
    table.add_column("#", justify="right", vertical="bottom", no_wrap=True)
    for head in identity:
        table.add_column(head, vertical="bottom", overflow="fold", max_width=_LONGEST_NAME)
    for column in columns:
        table.add_column(column.head, justify="right", vertical="bottom", no_wrap=True)
    for row in rows:
        assert row.at_largest is not None
        star = "*" if row.number == plan.recommendation.candidate else ""
        table.add_row(
            f"{star}{row.number}",
            *(Text(plain(getattr(row, name))) for name in identity.values()),
            *(column.show(row, row.at_largest) for column in columns),
            style="bold" if star else "",
        )
    return table


def _identity(rows: Sequence[CandidateResult]) -> dict[str, str]:
    """Columns that tell candidates apart, by their head."""
    found = {"policy": "policy", "budget": "budget", "recall": "recall", "GPU": "hardware"}
    empty = [h for h, name in found.items() if all(getattr(row, name) == "-" for row in rows)]
    return {head: name for head, name in found.items() if head not in empty}


def _failures(console: Console, plan: PlanResult) -> None:
    """One line per reason, with everybody that it holds for; who is too slow alone, together."""
    slow = [each for each in plan.candidates if each.status == MISSED and each.alone]
    if slow:
        console.print(Text(_too_slow(slow, plan)))
    reasons: dict[tuple[str, str], list[CandidateResult]] = {}
    for candidate in plan.candidates:
        if candidate.reason and candidate not in slow:
            reasons.setdefault((candidate.status, candidate.reason), []).append(candidate)
    for (status, reason), who in reasons.items():
        names = ", ".join(plain(each.name) for each in who[:3])
        more = f" and {len(who) - 3} more" if len(who) > 3 else ""
        console.print(Text(f"{status}: {names}{more}: {plain(reason)}"))


def _too_slow(slow: Sequence[CandidateResult], plan: PlanResult) -> str:
    """What a search takes there by itself, at the target's percentile; the fastest first."""
    found = []
    for each in sorted(slow, key=lambda one: one.alone.at_percentile_s if one.alone else 0.0):
        assert each.alone is not None
        times = []
        if plan.search_limit_s is not None:
            times.append(f"{digits(each.alone.at_percentile_s)} s")
        if plan.token_limit_s is not None:
            times.append(f"{digits(1e3 * each.alone.token_at_percentile_s)} ms/tok")
        found.append(f"{plain(each.name)} {', '.join(times)}")
    more = f"; and {len(found) - _MOST_SLOW} more" if len(found) > _MOST_SLOW else ""
    return (
        f"missed ({plan.percentile:g}% of the searches take up to, alone): "
        f"{'; '.join(found[:_MOST_SLOW])}{more}"
    )
