"""The report of a plan.

The recommendation in words, cost against quality and latency, all candidates, and what the answer
rests on: what runs out as the load grows, single assumptions changed, one machine over time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from arborsim.products.plan import capacity as plan_capacity
from arborsim.products.plan import figures as plan_figures
from arborsim.products.plan import pareto as plan_pareto
from arborsim.products.plan import printed as plan_printed
from arborsim.products.plan import sensitivity_page as plan_sensitivity
from arborsim.products.plan import tables as plan_tables
from arborsim.products.plan import words as plan_words
from arborsim.products.plan.costs import ranked
from arborsim.products.plan.results import PlanResult
from arborsim.products.plan.sensitivity import Sensitivity, break_even
from arborsim.report import page
from arborsim.report.page import Figure
from arborsim.report.report import (
    Answer,
    Block,
    Choice,
    Facts,
    Figures,
    Heading,
    Listed,
    Printed,
    Report,
    Section,
    Shown,
    Warned,
)
from arborsim.report.table import REMARK, Column, Table, name_column
from arborsim.report.words import digits, sentences_of

_STATED = (
    "At the stated load, or where none is stated at the largest: what to rent, what it costs and "
    "how fast it is. By cost, the recommended one first."
)
_TABLE = (
    "★ recommended, ☆ nearest alternative. Click a column to sort by it; what it means is "
    "explained at the end."
)
_PARETO = (
    "One marker per candidate that meets the target: its colour is the GPU, its shape the policy. "
    "Numbered ones are efficient: no other one is at least as good in {by} and better in one of "
    "them."
)
_LOAD = (
    "All candidates serve the same searches; more load moves the same arrivals closer together. "
    "Beyond the largest load the shape of a point says why it is beyond."
)
_SATURATION = (
    "Space (HBM, host memory) limits how many searches have a place; HBM bandwidth, compute and "
    "PCIe are shares of the time, and limit how fast those that have a place go on. Space counts "
    "as running out once waiting for it takes 1% of searches' time, or 1 in 100 loses its place; "
    "else what is busy for the largest share of the time does."
)
_SENSITIVITY = "One number is changed at a time, and the machine serves the same searches again."


@dataclass(frozen=True, eq=False)
class PlanReport:
    """A plan, and what its page shows beyond it."""

    result: PlanResult
    #: Of the recommended candidate, and of others to compare it with; may be empty.
    sensitivities: tuple[Sensitivity, ...] = ()
    sensitivity_note: str = ""  #: how they were found


def report_of(report: PlanReport) -> Report:
    """Make the report of a plan."""
    result, found = report.result, report.sensitivities
    main, use = plan_tables.tables(result)
    candidates = Shown(
        main,
        printed=partial(_printed, result),
        implied=plan_tables.NARROW,
        legend=plan_printed.legend(result) if main.rows else (),
    )
    used = Shown(
        use,
        "usage",
        "Use of the machine",
        printed=partial(_printed_use, result),
        noted=True,
    )
    table_of_load = plan_tables.screen_table(result)
    keys = [each.key for each in table_of_load.columns if each.key not in ("hour", "input_cost")]
    shown = replace(table_of_load, leading=keys)  # the others are behind a box to tick
    stated = Shown(shown, "stated", "At the stated load", printed=_nowhere)
    table: list[Block] = [
        _STATED,
        stated,
        Heading("At the largest load offered to each"),
        _TABLE,
        candidates,
        Heading("What each uses of its machine"),
        used,
    ]
    failed = Listed(plan_printed.failures(result), printed=True)
    counted = plan_printed.counted(result)
    closing = plan_printed.closing_table(result, counted)
    solved = [Shown(closing, "solved", noted=True)] if counted else []
    sections = (
        Section("answer", "The answer", list(_answer(result))),
        Section("table", "All candidates that meet the target", table if main.rows else []),
        Section("solved", "Searches solved under each policy", solved),
        Section("failures", "Candidates that do not meet it", [failed] if failed.texts else []),
    )
    files = {"candidates": partial(plan_tables.candidates, result)}
    if plan_figures.with_curves(result):
        files["curves"] = partial(plan_tables.curves, result)
    if found:
        files["sensitivity"] = partial(plan_tables.sensitivity, found)
    return Report(
        "plan",
        f"Capacity plan: {result.workload}",
        _subtitle(result),
        sections,
        partial(_pictures, report),
        (
            Facts("Settings", result.settings),
            Listed(result.assumed, "Assumed, without a measurement or source"),
            Facts(
                "Columns",
                stated.table.definitions() | main.definitions() | use.definitions(),
            ),
            Facts("Columns of the files", plan_tables.file_columns()),
        ),
        {f"arborsim-plan-{name}.csv": frame for name, frame in files.items()},
        nothing="" if result.candidates else "no candidate was finished",
        leading=result.recommendation.answer,
        telling=plan_printed.telling(result),
    )


def _nowhere(width: int) -> Sequence[Printed]:
    """Show nothing: only a page has room for the table."""
    return ()


def _printed(result: PlanResult, width: int) -> Iterator[Printed]:
    if ranked(result):
        table = plan_tables.screen_table(result)
        table = replace(table, rows=table.rows[: plan_printed.MOST_ROWS])
        yield result.workload, "by cost", [("", table)]


def _printed_use(result: PlanResult, width: int) -> Iterator[Printed]:
    if ranked(result):
        yield "", "", plan_tables.use_tables(result)


def _answer(result: PlanResult) -> Iterator[Block]:
    said, missing = result.recommendation, "Candidates that were not finished are missing."
    if not result.complete:
        yield Warned("The plan was interrupted.", missing)
    if said.answer or said.text:
        yield Answer(said.answer or [said.text])
    heads, figures = plan_words.key_figures(result)
    if heads:
        columns: list[Column[tuple[str, list[str]]]] = [name_column("Figure", lambda row: row[0])]
        for place, head in enumerate(heads):
            text = partial(_cell, place)
            columns.append(Column(str(place), ": ".join(head), REMARK, text=text))
        label = "Recommended and alternative"
        yield Shown(Table(list(figures.items()), columns), "facts", label, False, _nowhere)
    if counted := plan_printed.counted(result):
        yield plan_printed.finding(result, counted)
    if said.unknown:
        yield Listed(said.unknown, "What this plan does not know")
    if said.answer and said.text:
        yield Listed(sentences_of(said.text), "Why this one")
    yield Listed([text for text in (plan_words.shared_prefixes(result), *result.notes) if text])


def _cell(place: int, row: tuple[str, list[str]]) -> str:
    return row[1][place]


def _pictures(report: PlanReport) -> Iterator[Section]:
    result, found = report.result, report.sensitivities
    yield from _capacity(result)
    choices, by, priced = plan_pareto.figures(result)
    note = _PARETO.format(by=by) + " Their bars are ranges of prices." * priced
    pareto = Figures("pareto", [each for each in choices if _worth(each)], ("Compared",))
    yield Section("pareto", "Cost, quality and latency", (note, pareto))
    load = Figures("load", plan_figures.against_load(result), ("Time",))
    curves = len(plan_figures.with_curves(result)) - plan_figures.MOST_LINES
    more = f" {curves} more candidates are in the table." if curves > 0 else ""
    yield Section("load", "Time against load", (_LOAD + more, load))
    saturation = Figures("saturation", plan_figures.saturation(result), ("Candidate",))
    yield Section("saturation", "What runs out first", (_SATURATION, saturation))
    bars, bars_note = plan_sensitivity.overview(result, found)
    changed = plan_sensitivity.choices(result, found)
    sensitivity = (
        f"{_SENSITIVITY} {_sensitivity_note(report)}",
        Figures("overview", [Choice(bars, note=bars_note)] if bars else []),
        Figures("moved", changed, ("Assumption", "Number")),
    )
    yield Section("sensitivity", "What if an assumption is wrong", sensitivity)
    watched = "No run was watched."
    if run := result.timeline:
        name = plan_words.numbered(result, run.candidate).name
        watched = f"{name}, at {plan_words.load_of(run.load, result)}, seed {run.seed}."
    line, line_note = plan_figures.timeline(result)
    bars_left = len(ranked(result)) - page.MOST_BARS
    more = f" {bars_left} more candidates are in the table." if bars_left > 0 else ""
    drawn: dict[str, tuple[str, Figure | None, str]] = {
        "memory": (
            "Memory over time",
            plan_figures.memory(result),
            f"{watched} The dashed line is the size of the HBM.",
        ),
        "timeline": (
            "One machine at work",
            line,
            f"{watched} {line_note} A row is a place that one search after the other takes. Drag "
            "to zoom.",
        ),
        "time": (
            "Where the time goes",
            plan_figures.time_split(result),
            f"At the largest load of each candidate, cheapest first.{more}",
        ),
    }
    for name, (title, figure, note) in drawn.items():
        one = Figures(name, [Choice(figure)] if figure else [])
        yield Section(name, title, (note, one))


def _worth(choice: Choice) -> bool:
    """Whether a chart has enough different points to say more than sentences do."""
    pairs = {
        pair for line in choice.figure["data"] for pair in zip(line["x"], line["y"], strict=True)
    }
    return len({pair for pair in pairs if None not in pair}) >= plan_capacity.FEWEST


def _capacity(result: PlanResult) -> Iterator[Section]:
    """Machines by throughput and price."""
    leading = (
        (
            "costs",
            "Cost of each",
            plan_capacity.costs(result),
            "Lines are ranges: of prices, and of the error of seconds where that is known.",
        ),
        (
            "throughput",
            "Throughput against speed for a user",
            plan_capacity.throughput(result),
            plan_capacity.throughput_note(result),
        ),
        (
            "room",
            "What fills the memory",
            plan_capacity.memory_parts(result),
            "One GPU of each machine, at the largest load that it carries.",
        ),
    )
    for name, title, figure, note in leading:
        one = Figures(name, [Choice(figure)] if figure else [])
        yield Section(name, title, (note, one))


def _subtitle(result: PlanResult) -> str:
    load_text = (
        ""
        if result.stated_load is None
        else f" Load: {plan_words.load_of(result.stated_load, result)}."
    )
    model = f" Model: {result.settings['model']}." if "model" in result.settings else ""
    return f"Target: {plan_words.limits_of(result)}.{load_text}{model}"


def _sensitivity_note(report: PlanReport) -> str:
    notes = [report.sensitivity_note] if report.sensitivity_note else []
    served = [variant.result for each in report.sensitivities for variant in each.variants]
    if any(row.is_open for row in served):
        notes.append(
            "Loads “or more” are what runs of this length can show: with longer ones they may be "
            "larger, so compare them with care."
        )
    rival = break_even(report.result)
    if rival is not None and rival[1] > 1:
        chosen, *_ = report.result.named()
        notes.append(
            f"What is cheapest changes to {rival[0].name} once {chosen.gpu} costs "
            f"{digits(rival[1])} times as much (middles of the price ranges)."
        )
    return " ".join(notes)
