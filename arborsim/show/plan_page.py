"""The page about a plan.

The recommendation in words, cost against quality and latency, all candidates, and what the answer
rests on: what runs out as the load grows, single assumptions changed, one machine over time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.plan.results import PlanResult
from arborsim.plan.sensitivity import Sensitivity, break_even
from arborsim.show import page, plan_export, plan_figures, plan_pareto, plan_timeline
from arborsim.show.plan_columns import tables
from arborsim.show.plan_sensitivity import overview, overview_note, sliders
from arborsim.show.plan_words import (
    at_load,
    failures,
    headline,
    key_figures,
    load,
    numbered,
    shared_prefixes,
    stated,
)
from arborsim.show.words import digits


@dataclass(frozen=True, eq=False)
class PlanReport:
    """What the page tells."""

    result: PlanResult
    #: Of the recommended candidate, and of others to compare it with; may be empty.
    sensitivities: tuple[Sensitivity, ...] = ()
    sensitivity_note: str = ""  #: how they were found


def write_plan_page(report: PlanReport, path: str | Path) -> None:
    """Write the page; the same plan gives the same bytes.

    Raises
    ------
    UsageError
        The file cannot be written, or there is nothing to report.
    """
    if not report.result.candidates:
        raise UsageError("no candidate was finished: there is nothing to report")
    page.write(render(report), path)


def render(report: PlanReport) -> str:
    """The whole page as text."""
    result = report.result
    main, use = tables(result)
    line, line_note = plan_timeline.timeline(result)
    data = _data(report, line)
    heads, figures = key_figures(result)
    return page.render(
        "plan",
        ("plan.js",),
        data,
        title=f"Capacity plan: {result.workload}",
        subtitle=_subtitle(result),
        complete=result.complete,
        headline=headline(result),
        answer=result.recommendation.text,
        heads=heads,
        figures=figures,
        unknown=result.recommendation.unknown,
        notes=[text for text in (shared_prefixes(result), *result.notes) if text],
        pareto=data["pareto"],
        table=main,
        usage=use,
        cost_head=f"Cost per 1,000{at_load(result)}",
        failures=failures(result),
        time_note=plan_figures.time_note(result),
        load_note=plan_figures.load_note(result),
        watched=_watched(result),
        timeline_note=line_note,
        overview_note=overview_note(result, report.sensitivities),
        sensitivity_note=_sensitivity_note(report),
        settings=result.settings,
        assumed=result.assumed,
        file_columns=plan_export.ABOUT,
    )


def _data(report: PlanReport, line: dict[str, Any] | None) -> dict[str, Any]:
    result, found = report.result, report.sensitivities
    files = {
        "candidates": plan_export.candidates(result),
        "curves": plan_export.curves(result) if plan_figures.with_curves(result) else "",
        "sensitivity": plan_export.sensitivity(found) if found else "",
    }
    return {
        "pareto": plan_pareto.figures(result),
        "load": plan_figures.against_load(result),
        "saturation": plan_figures.saturation(result),
        "memory": plan_timeline.memory(result),
        "timeline": line,
        "time": plan_figures.time_split(result),
        "overview": overview(result, found),
        "sliders": sliders(result, found),
        "csv": {name: text for name, text in files.items() if text},
    }


def _subtitle(result: PlanResult) -> str:
    limits = []
    if result.search_limit_s is not None:
        limits.append(f"answers within {_stated(result.search_limit_s)}")
    if result.token_limit_s is not None:
        limits.append(f"output tokens within {_stated(result.token_limit_s)}")
    target = f"Target: {' and '.join(limits)} for {result.percentile:g} % of the searches."
    load_text = ""
    if result.stated_load is not None:
        load_text = f" Load: {stated(result)}."
    model = f" Model: {result.settings['model']}." if "model" in result.settings else ""
    return f"{target}{load_text}{model}"


def _stated(seconds: float) -> str:
    """A limit as people write it."""
    return f"{seconds:g} s" if seconds >= 1 else f"{1000 * seconds:g} ms"


def _watched(result: PlanResult) -> str:
    line = result.timeline
    if line is None:
        return "No run was watched."
    who = numbered(result, line.candidate)
    return f"{who.name}, at {load(line.load, result.unit)}, seed {line.seed}."


def _sensitivity_note(report: PlanReport) -> str:
    notes = [report.sensitivity_note] if report.sensitivity_note else []
    served = [variant.result for each in report.sensitivities for variant in each.variants]
    if any(row.limited_by == "run length" for row in served):
        notes.append(
            "Loads “or more” are what runs of this length can show: with longer ones they may be "
            "larger, so compare them with care."
        )
    chosen, rival = report.result.recommendation.candidate, break_even(report.result)
    if chosen is not None and rival is not None and rival[1] > 1:
        row = numbered(report.result, chosen)
        notes.append(
            f"What is cheapest changes to {rival[0].name} once {row.hardware} costs "
            f"{digits(rival[1])} times as much (middles of the price ranges)."
        )
    return " ".join(notes)
