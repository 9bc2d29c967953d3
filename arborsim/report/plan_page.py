"""One self-contained HTML page about a plan; see `arborsim.report.html` for its rules.

The recommendation in words, cost against quality and latency, all candidates, and what the answer
rests on: what runs out as the load grows, single assumptions changed, the course of one machine.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborsim.errors import UsageError
from arborsim.planning.limits import TIME
from arborsim.planning.results import CandidateResult, PlanResult
from arborsim.planning.sensitivity import Sensitivity, break_even
from arborsim.report import plan_export, plan_figures, plan_pareto, plan_timeline
from arborsim.report.markup import asset, bullets, filled, in_script, pairs
from arborsim.report.plan_columns import RUNS_OUT, STOPPED_BY, definitions, failures, table
from arborsim.report.plan_sensitivity import overview, sliders
from arborsim.report.plan_words import (
    SATURATED,
    at_load,
    digits,
    load,
    money,
    named,
    numbered,
    saturates,
    stopped_by,
)
from arborsim.report.units import quantity

_SCRIPTS = ("page.js", "buttons.js", "plan.js")
_WARNING = '<p class="warning"><strong>{}</strong> {}</p>'


@dataclass(frozen=True, eq=False)
class PlanReport:
    """What the page tells.

    Attributes
    ----------
    result : PlanResult
    sensitivities : tuple of Sensitivity
        Of the recommended candidate, and of others to compare it with; may be empty.
    sensitivity_note : str
        How they were found.
    """

    result: PlanResult
    sensitivities: tuple[Sensitivity, ...] = ()
    sensitivity_note: str = ""


def write_plan_page(report: PlanReport, path: str | Path) -> None:
    """Write the page; the same plan gives the same bytes.

    Raises
    ------
    UsageError
        The file cannot be written, or there is nothing to report.
    """
    if not report.result.candidates:
        raise UsageError("no candidate was finished: there is nothing to report")
    try:
        Path(path).write_text(render(report), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the report {path}: {error.strerror}") from error


def render(report: PlanReport) -> str:
    """The whole page as text."""
    from plotly.offline import get_plotlyjs

    result = report.result
    comparison, columns = table(result)
    line, line_note = plan_timeline.timeline(result)
    data = _data(report, line)
    parts = {
        "style": f"{asset('report.css')}\n{asset('plan.css')}",
        "title": html.escape(result.workload),
        "subtitle": html.escape(_subtitle(result)),
        "answer": html.escape(result.recommendation.text),
        "warning": _warning(result),
        "figures": _key_figures(result),
        "unknown": bullets(result.recommendation.unknown),
        "notes": bullets(result.notes),
        "by": html.escape(data["pareto"]["by"]),
        "price_bars": " Their bars are ranges of prices." if data["pareto"]["priced"] else "",
        "table": comparison,
        "cost_head": html.escape(f"Cost per 1,000{at_load(result)}"),
        "failures": bullets(failures(result)),
        "time_note": html.escape(plan_figures.time_note(result)),
        "load_note": html.escape(plan_figures.load_note(result)),
        "watched": html.escape(_watched(result)),
        "timeline_note": html.escape(line_note),
        "sensitivity_note": html.escape(_sensitivity_note(report)),
        "settings": pairs(result.settings),
        "assumed": bullets(result.assumed),
        "definitions": pairs(definitions(columns)),
        "file_columns": pairs(plan_export.ABOUT),
        "data": in_script(data),
        "plotly": get_plotlyjs(),
        "script": "\n".join(map(asset, _SCRIPTS)),
    }
    return filled("plan.html", parts)


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
    stated = ""
    if result.stated_load is not None:
        stated = f" Load: {result.stated_load:g} {result.unit}."
    model = f" Model: {result.settings['model']}." if "model" in result.settings else ""
    return f"{target}{stated}{model}"


def _stated(seconds: float) -> str:
    """A limit as somebody would write it."""
    return f"{seconds:g} s" if seconds >= 1 else f"{1000 * seconds:g} ms"


def _warning(result: PlanResult) -> str:
    if not result.complete:
        return _WARNING.format(
            "The plan was interrupted.", "Candidates that were not finished are missing."
        )
    return ""


def _key_figures(result: PlanResult) -> str:
    """The recommended candidate and its alternative, side by side; "" if there is none."""
    numbers = (result.recommendation.candidate, result.recommendation.alternative)
    rows = [numbered(result, number) for number in numbers if number is not None]
    if not rows:
        return ""
    heads = ("Recommended", "Nearest alternative")
    head = "".join(
        f'<th scope="col">{title}<br><small>{html.escape(named(row))}</small></th>'
        for title, row in zip(heads, rows, strict=False)
    )
    facts = [_facts(row, result) for row in rows]
    lines = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>'
        + "".join(f"<td>{html.escape(each[name])}</td>" for each in facts)
        + "</tr>"
        for name in facts[0]
        if any(each[name] for each in facts)
    )
    head = f"<thead><tr><td></td>{head}</tr></thead>"
    return f'<table class="facts">{head}<tbody>{lines}</tbody></table>'


def _facts(row: CandidateResult, result: PlanResult) -> dict[str, str]:
    """What decides, in the words of a meeting; "" where it is not known."""
    point, fleet = row.at_largest, row.fleet
    stated = f"Cost per 1,000 searches{at_load(result)}"
    largest, solved = "Cost per 1,000 searches at the largest load", "Cost per 1,000 solved there"
    found = {
        "Price per hour": money(row.price_per_hour, result.currency),
        "Largest load offered to one machine": _spread(row, result),
        "Served at it": "",
        stated: "",
        largest: "",
        solved: "",
        "Time per search (p50, p95, p99)": "",
        "Time per output token (p50, p95)": "",
        "Searches at once": "",
        RUNS_OUT: _first(row),
        STOPPED_BY: stopped_by(row),
        "Quality": _quality(row),
        "Machines for the stated load": "",
    }
    if point is not None:
        times, there = point.search_s, load(point.load, result.unit)
        found |= {
            "Served at it": f"{load(point.served_per_s.value, 'searches/s')} in runs of "
            f"{result.searches:,} searches, which begin empty",
            largest: f"{money(point.cost_per_1000, result.currency)} at {there}",
            "Time per search (p50, p95, p99)": ", ".join(
                quantity("seconds", each) for each in (times.p50, times.p95, times.p99)
            ),
            "Time per output token (p50, p95)": ", ".join(
                quantity("seconds", each) for each in (point.token_s.p50, point.token_s.p95)
            ),
            "Searches at once": f"{digits(point.concurrency)} on average, "
            f"{point.peak_concurrency} at most",
        }
        if point.cost_per_solved is not None:
            low, high = point.cost_per_solved
            costs = money((1000 * low.value, 1000 * high.value), result.currency)
            found[solved] = f"{costs} at {there}"
    if fleet is not None and result.stated_load is not None:
        found[stated] = money(fleet.cost_per_1000, result.currency)
        found["Machines for the stated load"] = (
            f"{fleet.machines} ({result.stated_load:g} {result.unit}, {fleet.gpus} "
            f"GPU{'s' if fleet.gpus > 1 else ''}, {money(fleet.price_per_hour, result.currency)} "
            "per hour)"
        )
    return found


def _first(row: CandidateResult) -> str:
    """What runs out first, beside what is busiest if that is something else."""
    point = row.at_largest
    if point is None:
        return ""
    shares = {name: f"{100 * getattr(point.used, name):.0f} %" for name in (*TIME, "hbm", "host")}
    if point.saturated in TIME:
        return f"{saturates(point)} (busy {shares[point.saturated]} of the time)"
    held = f" ({shares[point.saturated]} held on average)" if point.saturated in shares else ""
    busiest = max(TIME, key=lambda name: float(getattr(point.used, name)))
    return (
        f"{saturates(point)}{held}: searches wait for a place; {SATURATED[busiest]} is busy "
        f"{shares[busiest]} of the time"
    )


def _spread(row: CandidateResult, result: PlanResult) -> str:
    text = load(row.largest, result.unit)
    if len(row.largest_by_seed) < 2:
        return text
    ends = [digits(each(row.largest_by_seed)) for each in (min, max)]
    return f"{text} (by seed: {ends[0]} to {ends[1]})"


def _quality(row: CandidateResult) -> str:
    quality = row.quality
    if quality is None:
        return ""
    if quality.exact:
        return "as full retention: nothing is dropped or rounded"
    if quality.accuracy is not None:
        found = quality.accuracy
        return (
            f"live accuracy {100 * found.value:.1f} % (n = {found.n}, 95 % interval "
            f"{100 * found.low:.1f} to {100 * found.high:.1f} %)"
        )
    if quality.attention_kept is None:
        return f"not known: {100 * quality.evicted:.0f} % of the tokens are evicted"
    return f"{100 * quality.attention_kept:.1f} % of the attention kept"


def _watched(result: PlanResult) -> str:
    line = result.timeline
    if line is None:
        return "No run was watched."
    who = numbered(result, line.candidate)
    return f"{named(who)}, at {load(line.load, result.unit)}, seed {line.seed}."


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
            f"What is cheapest changes to {named(rival[0])} once {row.hardware} costs "
            f"{digits(rival[1])} times as much (middles of the price ranges)."
        )
    return " ".join(notes)
