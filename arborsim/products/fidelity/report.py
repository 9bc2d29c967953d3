"""The page about fidelity: the answer in words, the table, and figures by budget and position."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from arborsim.core.units import quantity
from arborsim.play.fidelity import PARTS
from arborsim.play.results import ANY
from arborsim.products.fidelity.tables import (
    DECIDING,
    FIGURES,
    IMPLIED,
    NAMES,
    ROUNDING,
    Estimate,
    FidelityReport,
    FidelityRow,
    cautions,
    closest,
    fidelity_frame,
    rows_of,
    scope,
)
from arborsim.products.provenance import parameters
from arborsim.products.replay.report import MOST_SENTENCES
from arborsim.report import page
from arborsim.report.report import Answer, Choice, Facts, Figures, Report, Section, Shown
from arborsim.report.table import Table, shown
from arborsim.report.words import listed, nats, percent

_MEANS = (
    "Means over judged tokens: all but each document's prompt and the token after it. Intervals "
    "are 95%, by a bootstrap over documents."
)


def report_of(report: FidelityReport) -> Report:
    """Make the report of a run."""
    rows, facts = rows_of(report), report.facts
    said, known = summarise(rows), cautions(report, rows)
    table = Table(
        rows,
        shown((*NAMES, *FIGURES), rows) if rows else NAMES,
        section=lambda row: row.budget_label,
        look=lambda row: "baseline" if row.is_baseline else "",
    )
    legend = (_MEANS,) if rows else ()
    decide = (*(column.key for column in NAMES), *DECIDING)
    figures = Shown(table, "fidelity", "Fidelity", deciding=decide, implied=IMPLIED, legend=legend)
    sections = [
        Section("answer", "The answer", (Answer(said), *known)),
        Section("table", "All settings", (_MEANS, *[figures] * bool(rows))),
    ]
    kinds = "masked" if report.masked else "removed"
    over = f", {scope(rows)}" if rows else ""
    return Report(
        "fidelity",
        "Fidelity to full retention",
        f"{facts.model}{over} ({facts.task}), evicted tokens {kinds}, {facts.dtype} on "
        f"{facts.device}.",
        sections,
        partial(_pictures, rows),
        (Facts("Settings", _settings(report)), Facts("Columns", table.definitions())),
        {"arborsim-fidelity.csv": partial(fidelity_frame, report)},
        leading=said[:MOST_SENTENCES],
        telling=known,
    )


def _settings(report: FidelityReport) -> dict[str, str]:
    found = {"command": report.command, "versions": report.facts.about}
    plain = (
        "tokens",
        "document_tokens",
        "prefill",
        "max_tokens",
        "masked",
        "seed",
        "texts",
        "stop",
    )
    for name in plain:
        if value := report.request.get(name):
            found[name.replace("_", " ")] = value if isinstance(value, str) else json.dumps(value)
    held = quantity("bytes", report.facts.kv_bytes_per_token)
    found["keys and values"] = f"{held} per token"
    for cell in report.request["cells"]:
        found[f"policy {cell['policy']}"] = parameters(cell["settings"])
    return {name: text for name, text in found.items() if text}


# --- the answer ---


def summarise(rows: Sequence[FidelityRow]) -> list[str]:
    """Sentences about the rows: budget by budget which policy is closest, and full's perplexity."""
    others = [row for row in rows if not row.is_baseline]
    if not rows:
        return ["No budget could hold a document."]
    whole = scope(rows)

    def over(some: Sequence[FidelityRow]) -> str:
        """On what they rest, where that is less than what the run rests on."""
        return "" if scope(some) == whole else f" over {scope(some)}"

    said = [_at(own, over(own)) for own in _by_budget(others).values()]
    said += [
        f"{row.label} keeps no budget: {_figures(row)}{over([row])}."
        for row in others
        if row.budget == ANY
    ]
    most = max(rows, key=lambda row: row.tokens)
    said.append(f"Full retention's perplexity is {most.full_perplexity:,.3g}.")
    return said


def _by_budget(rows: Sequence[FidelityRow]) -> dict[str, list[FidelityRow]]:
    found: dict[str, list[FidelityRow]] = {}
    for row in sorted(rows, key=lambda row: _size(row.budget)):
        if row.budget != ANY:
            found.setdefault(row.budget, []).append(row)
    return found


def _size(budget: str) -> float:
    return 0.0 if budget == ANY else float(budget)


def _at(rows: Sequence[FidelityRow], over: str) -> str:
    """Which policy is closest at a budget, or which cannot be distinguished."""
    place, best = f"At budget {rows[0].budget}", closest(rows)
    if best is not None:
        return f"{place} {best.label} is closest to full retention: {_figures(best)}{over}."
    able = sorted((row for row in rows if row.bounded), key=lambda row: row.kl.value)
    if len(able) < 2:
        row = (able or rows)[0]
        return f"{place} {row.label} has {_figures(row)}{over}."
    if able[0].documents < 2:
        return f"{place} no policy is called closest, as one document gives no intervals{over}."
    least = max(able[0].kl.high, ROUNDING)
    tied = [row.label for row in able if row.kl.low <= least]
    return (
        f"{place} {listed(tied)} cannot be distinguished (their intervals overlap): {tied[0]} has "
        f"{_figures(able[0])}{over}."
    )


def _figures(row: FidelityRow) -> str:
    kl, same = row.kl, row.agreement
    ends = "" if kl.low != kl.low else f" ({nats(kl.low)} to {nats(kl.high)})"
    return (
        f"KL {nats(kl.value)}{ends}, the same top token at {percent(same.value)}, perplexity "
        f"{row.ratio.value:.3f} times full retention's"
    )


# --- figures ---

_Of = Callable[[FidelityRow], Estimate]
_OfParts = Callable[[FidelityRow], Sequence[Estimate]]
_MEASURES: tuple[tuple[str, _Of, _OfParts], ...] = (
    ("KL(full || policy), nats", lambda row: row.kl, lambda row: row.kl_parts),
    ("same top token (%)", lambda row: row.agreement, lambda row: row.agreement_parts),
)


def _pictures(rows: Sequence[FidelityRow]) -> Iterator[Section]:
    others = [row for row in rows if not row.is_baseline]
    over = f"Over {scope(rows)}. Bars are 95% intervals." if rows else ""
    drawn = [
        Choice(_lines(_policies(others), title, partial(_alone, of), _budgets), (title,))
        for title, of, _ in _MEASURES
        if others
    ]
    yield Section("budget", "By budget", (over, Figures("budget", drawn, ("Figure",))))
    known = [row for row in rows if row.peak_kv_bytes]
    held = [
        Choice(_lines(_policies(known), title, partial(_alone, of), _bytes), (title,))
        for title, of, _ in _MEASURES
        if known
    ]
    yield Section("pareto", "By memory held", (over, Figures("pareto", held, ("Figure",))))
    parts = []
    for budget, own in _by_budget(others).items():
        own = [*own, *(row for row in others if row.budget == ANY)]
        named = {row.label: [row] for row in own}
        for title, _, of in _MEASURES:
            figure = _lines(named, title, of, _positions)
            parts.append(Choice(figure, (title, f"budget {budget}")))
    part = f"Each point is a part of {PARTS} of the judged tokens. {over}"
    place = Figures("position", parts, ("Figure", "Budget"))
    yield Section("position", "By position in the document", (part, place))


def _alone(of: _Of, row: FidelityRow) -> list[Estimate]:
    return [of(row)]


def _policies(rows: Sequence[FidelityRow]) -> dict[str, list[FidelityRow]]:
    """Rows by label, from the smallest budget on; one without a budget is at each end."""
    found: dict[str, list[FidelityRow]] = {}
    for row in sorted(rows, key=lambda row: _size(row.budget)):
        found.setdefault(row.label, []).append(row)
    return found


def _budgets(rows: Sequence[FidelityRow]) -> tuple[list[float], str]:
    return [_size(row.budget) or 1.0 for row in rows], "budget (share or tokens; none: 1)"


def _bytes(rows: Sequence[FidelityRow]) -> tuple[list[float], str]:
    return [row.peak_kv_bytes / 1e6 for row in rows], "largest keys and values in HBM (MB)"


def _positions(rows: Sequence[FidelityRow]) -> tuple[list[float], str]:
    places = [(number + 0.5) / PARTS for number in range(PARTS)]
    return places, "place among the judged tokens of a document"


def _lines(
    policies: dict[str, list[FidelityRow]],
    title: str,
    of: Callable[[FidelityRow], Sequence[Estimate]],
    places: Callable[[Sequence[FidelityRow]], tuple[list[float], str]],
) -> page.Figure:
    """A line per policy, with intervals. Divergences are on a logarithmic axis."""
    log, scale = "nats" in title, 1.0 if "nats" in title else 100.0
    data, name = [], ""
    for number, (policy, own) in enumerate(policies.items()):
        (x, name), points = places(own), [each for row in own for each in of(row)]
        kept = [i for i, each in enumerate(points) if each.value == each.value]
        least = ROUNDING if log else 0.0
        y = [page.rounded(scale * max(points[i].value, least)) for i in kept]
        paint, mark = page.colour(1 + number % (page.COLOURS - 1)), page.symbol(number)
        whiskers = {
            "type": "data",
            "symmetric": False,
            "thickness": 1.2,
            "width": 3,
            "color": paint,
            "array": [page.rounded(scale * (points[i].high - points[i].value)) for i in kept],
            "arrayminus": [page.rounded(scale * (points[i].value - points[i].low)) for i in kept],
        }
        look = {"line": {"color": paint}, "marker": {"color": paint, "symbol": mark, "size": 8}}
        at = [x[i] for i in kept]
        data.append(page.scatter(policy, at, y, "lines+markers", error_y=whiskers, **look))
    return page.figure(
        data, page.axis(name), page.axis(title, **({"type": "log"} if log else {})), 440
    )
