"""The page about a plan.

The recommendation in words, cost against quality and latency, all candidates, and what the answer
rests on: what runs out as the load grows, single assumptions changed, one machine over time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from arborsim.core.errors import UsageError
from arborsim.core.outputs import write_text
from arborsim.products.plan import figures as plan_figures
from arborsim.products.plan import pareto as plan_pareto
from arborsim.products.plan import sensitivity_page as plan_sensitivity
from arborsim.products.plan import tables as plan_tables
from arborsim.products.plan import words as plan_words
from arborsim.products.plan.results import MET, PlanResult
from arborsim.products.plan.sensitivity import Sensitivity, break_even
from arborsim.report import page
from arborsim.report.words import digits


@dataclass(frozen=True, eq=False)
class PlanReport:
    """The contents of the page."""

    result: PlanResult
    #: Of the recommended candidate, and of others to compare it with; may be empty.
    sensitivities: tuple[Sensitivity, ...] = ()
    sensitivity_note: str = ""  #: how they were found


def write_plan_page(report: PlanReport, path: str | Path) -> None:
    """Write the page; `UsageError` where it cannot be written, or there is nothing to report."""
    if not report.result.candidates:
        raise UsageError("no candidate was finished: there is nothing to report")
    write_text(path, render(report))


def render(report: PlanReport) -> str:
    """The whole page as text; the same plan gives the same bytes."""
    result, found = report.result, report.sensitivities
    main, use = plan_tables.tables(result)
    line, line_note = plan_figures.timeline(result)
    watched = "No run was watched."
    if run := result.timeline:
        name = plan_words.numbered(result, run.candidate).name
        watched = f"{name}, at {plan_words.load_of(run.load, result)}, seed {run.seed}."
    bars, bars_note = plan_sensitivity.overview(result, found)
    heads, figures = plan_words.key_figures(result)
    pareto = plan_pareto.figures(result)
    curves = plan_figures.with_curves(result)
    data = {
        "pareto": pareto,
        "load": plan_figures.against_load(result),
        "saturation": plan_figures.saturation(result),
        "memory": plan_figures.memory(result),
        "timeline": line,
        "time": plan_figures.time_split(result),
        "overview": bars,
        "sliders": plan_sensitivity.sliders(result, found),
        "csv": {
            "candidates": plan_tables.candidates(result),
            **({"curves": plan_tables.curves(result)} if curves else {}),
            **({"sensitivity": plan_tables.sensitivity(found)} if found else {}),
        },
    }
    return page.render(
        "plan",
        ("plan.js",),
        data,
        title=f"Capacity plan: {result.workload}",
        subtitle=_subtitle(result),
        result=result,
        heads=heads,
        figures=figures,
        notes=[text for text in (plan_words.shared_prefixes(result), *result.notes) if text],
        pareto=pareto,
        table=main,
        usage=use,
        cost_head=f"Cost per 1,000{plan_words.at_load(result)}",
        failures=[row for row in result.candidates if row.status != MET],
        more_lines=len(curves) - plan_figures.MOST_LINES,
        more_bars=len(main.rows) - page.MOST_BARS,
        watched=watched,
        timeline_note=line_note,
        overview_note=bars_note,
        sensitivity_note=_sensitivity_note(report),
        file_columns=plan_tables.texts()["files"],
    )


def _subtitle(result: PlanResult) -> str:
    limits = {"answers": result.search_limit_s, "output tokens": result.token_limit_s}
    within = [
        f"{what} within {f'{s:g} s' if s >= 1 else f'{1000 * s:g} ms'}"
        for what, s in limits.items()
        if s is not None
    ]
    load_text = (
        ""
        if result.stated_load is None
        else f" Load: {plan_words.load_of(result.stated_load, result)}."
    )
    model = f" Model: {result.settings['model']}." if "model" in result.settings else ""
    target = f"Target: {' and '.join(within)} for {result.percentile:g} % of the searches."
    return f"{target}{load_text}{model}"


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
            f"What is cheapest changes to {rival[0].name} once {chosen.hardware} costs "
            f"{digits(rival[1])} times as much (middles of the price ranges)."
        )
    return " ".join(notes)
