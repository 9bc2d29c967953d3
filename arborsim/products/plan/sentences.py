"""Words for a plan's figures: loads, what runs out, short names, the headline, key figures."""

from __future__ import annotations

import math
from collections.abc import Iterable

from arborsim.core.units import quantity
from arborsim.machine.fidelity import share_text
from arborsim.products.plan.results import (
    CandidateResult,
    LoadPoint,
    PlanResult,
    compared_cost,
    paid,
    paid_solved,
)
from arborsim.products.plan.runs import TIME
from arborsim.products.plan.words import RESOURCES, first_out, load_of, resource
from arborsim.report.words import digits, money

RUNS_OUT = "Runs out first"
STOPPED_BY = "More load is stopped by"
#: Names of `CandidateResult.limited_by`.
STOPPED = {
    "target": "the latency target",
    "throughput": "searches arriving faster than they end",
    "run length": "the length of the runs: longer ones can show more or less",
}


def numbered(result: PlanResult, number: int) -> CandidateResult:
    """A candidate by its number; of an interrupted plan some are missing."""
    return next(each for each in result.candidates if each.number == number)


def stated(result: PlanResult) -> str:
    """The load that the fleet is for, in three digits: it may be computed, from a log's pace."""
    assert result.stated_load is not None
    return load_of(result.stated_load, result)


def at_load(result: PlanResult) -> str:
    """Where candidates' costs are compared: `` at 5 searches/s``, or "" for their largest loads."""
    return "" if result.stated_load is None else f" at {stated(result)}"


def load_axis(result: PlanResult) -> str:
    """What an axis of loads shows."""
    return f"load offered to one machine ({result.unit})"


def stopped_by(row: CandidateResult) -> str:
    """What prevents the next larger load."""
    return STOPPED.get(row.limited_by, row.limited_by)


def saturates(point: LoadPoint | None) -> str:
    """What runs out first."""
    return "" if point is None else RESOURCES.get(point.saturated, point.saturated)


def is_least(row: CandidateResult) -> bool:
    """Whether the runs are too short to tell how much more it carries."""
    return row.limited_by == "run length"


def runs_out(row: CandidateResult) -> str:
    """What runs out first at the largest load, for a table: nothing where more may be carried."""
    point = row.at_largest
    if point is not None and is_least(row) and point.saturated in TIME:
        return f"not seen; busiest: {saturates(point)}"
    return saturates(point)


def shared_prefixes(result: PlanResult) -> str:
    """Where the recommended candidate's searches found shared prompts; "" if nothing is shared."""
    if result.recommendation.candidate is None:
        return ""
    row = numbered(result, result.recommendation.candidate)
    assert row.at_largest is not None
    found = row.at_largest.prefixes
    total = found.hbm + found.ddr + found.computed
    if not total:
        return ""

    def percent(tokens: int) -> str:
        """Whole, but neither 0 nor 100 where there is some of both."""
        share = tokens / total
        return "<1%" if 0 < share < 0.01 else ">99%" if 0.99 < share < 1 else f"{share:.0%}"

    return (
        f"Tokens of shared prompts, at the largest load of {row.name}: {percent(found.hbm)} found "
        f"in HBM, {percent(found.ddr)} copied back from DDR, {percent(found.computed)} computed."
    )


def middle(bounds: tuple[float, float] | None) -> float:
    """Of a range of prices; NaN without prices."""
    return math.nan if bounds is None else sum(bounds) / 2


def cost(row: CandidateResult) -> float:
    """What 1,000 searches cost where candidates are compared (`at_load`): the middle."""
    return middle(compared_cost(row))


def kept(row: CandidateResult) -> float:
    """Share of the attention that is kept; NaN where it was not measured."""
    quality = row.quality
    return math.nan if quality is None or quality.attention_kept is None else quality.attention_kept


def kept_note(row: CandidateResult) -> str:
    """Why the share is not known though there is attention: "not known per head"; or ""."""
    return row.quality.kept_note if row.quality else ""


def accuracy(row: CandidateResult) -> float:
    """Share of correct answers of live runs; NaN without any."""
    quality = row.quality
    return math.nan if quality is None or quality.accuracy is None else quality.accuracy.value


def load(value: float | None, unit: str) -> str:
    """``"1.25 searches/s"``, ``"12 clients"``."""
    if value is None:
        return "none"
    return f"{value:,.0f} {unit}" if unit == "clients" else f"{digits(value)} {unit}"


def short_names(candidates: Iterable[CandidateResult]) -> dict[int, str]:
    """A short name for each, with only what differs among them.

    On one GPU that is policy and budget, for one policy the GPU.
    """
    rows = list(candidates)
    policy, budget, recall, hardware = (
        len({getattr(row, part) for row in rows}) > 1
        for part in ("policy", "budget", "recall", "hardware")
    )

    def short(row: CandidateResult) -> str:
        text = row.policy if policy or not hardware else ""
        if budget and row.budget != "-":
            text = f"{text} at {row.budget}" if text else f"budget {row.budget}"
        if recall and row.recall != "-":
            text = f"{text} ({row.recall})".strip()
        return ", ".join(filter(None, (text, row.hardware if hardware else "")))

    names = {row.number: short(row) for row in rows}
    if len(set(names.values())) < len(names):
        return {row.number: row.name for row in rows}
    return names


def key_figures(result: PlanResult) -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """Of the recommended candidate and its alternative: heads and names, and texts by figure.

    Both are empty if nothing is recommended; figures that are known of none are left out.
    """
    chosen = (result.recommendation.candidate, result.recommendation.alternative)
    rows = [numbered(result, number) for number in chosen if number is not None]
    facts = [_facts(row, result) for row in rows]
    texts = {name: [each[name] for each in facts] for name in (facts[0] if facts else ())}
    heads = zip(("Recommended", "Nearest alternative"), (row.name for row in rows), strict=False)
    return list(heads), {name: each for name, each in texts.items() if any(each)}


def _facts(row: CandidateResult, result: PlanResult) -> dict[str, str]:
    """What decides, in the words of a meeting; "" where it is not known."""
    point, fleet, currency = row.at_largest, row.fleet, result.currency
    assert point is not None  # it meets the target
    times, tokens, there = point.search_s, point.token_s, load(point.load, result.unit)
    solved = machines = ""
    first, largest = first_out(point), load(row.largest, result.unit)
    if is_least(row) and point.saturated in TIME:
        first = f"not seen in runs of this length; {resource(point, row.limited_by)}"
    if len(row.largest_by_seed) > 1:
        ends = [load(each(row.largest_by_seed), result.unit).split()[0] for each in (min, max)]
        largest += f" (by seed: {' to '.join(ends)})"
    unit = result.unit
    stated_solved = paid_solved(row, fleet, unit) if fleet else None
    if point.cost_per_solved is not None:
        solved = f"{money(paid_solved(row, point, unit), currency)} at {there}"
    if fleet is not None:
        machines = (
            f"{fleet.machines} ({stated(result)}, {fleet.gpus} GPU{'s' if fleet.gpus > 1 else ''}, "
            f"{money(fleet.price_per_hour, currency)} per hour)"
        )
    return {
        f"Cost per 1,000 solved{at_load(result)}": (
            money(stated_solved, currency) if stated_solved else ""
        ),
        "Price per hour": money(row.price_per_hour, currency),
        "Largest load offered to one machine": largest,
        "Served there": f"{load(point.served_per_s.value, 'searches/s')} in runs of "
        f"{result.searches:,} searches, which begin empty",
        f"Cost per 1,000 searches{at_load(result)}": (
            money(paid(row, fleet, unit), currency) if fleet else ""
        ),
        "Cost per 1,000 searches at the largest load": (
            f"{money(paid(row, point, unit), currency)} at {there}"
        ),
        "Cost per 1,000 solved there": solved,
        "Error of simulated seconds in these costs": _error(row),
        "Time per search (p50, p95, p99)": _seconds(times.p50, times.p95, times.p99),
        "Time per output token (p50, p95)": _seconds(tokens.p50, tokens.p95),
        "Searches at once": f"{digits(point.concurrency)} on average, "
        f"{point.peak_concurrency} at most",
        RUNS_OUT: first,
        STOPPED_BY: stopped_by(row),
        "Quality": _quality(row),
        "Machines for the stated load": machines,
        "Evidence for seconds": "" if row.evidence is None else row.evidence.sentence(),
    }


def _error(row: CandidateResult) -> str:
    """By how much the ranges of costs are widened."""
    if row.evidence is None or row.price_per_hour is None:
        return ""
    return "not known, not included" if row.error is None else f"{share_text(row.error)} either way"


def _seconds(*values: float) -> str:
    return ", ".join(quantity("seconds", value) for value in values)


def _quality(row: CandidateResult) -> str:
    quality = row.quality
    if quality is None:
        return ""
    if quality.exact:
        return "as full retention: nothing is dropped, rounded or left unread"
    if (found := quality.accuracy) is not None:
        return (
            f"live accuracy {100 * found.value:.1f} % (n = {found.n}, 95 % interval "
            f"{100 * found.low:.1f} to {100 * found.high:.1f} %)"
        )
    if quality.attention_kept is None:
        known = quality.kept_note or "not known"
        if quality.unread and not quality.evicted:
            return f"{known}: not every token is read"
        return f"{known}: {100 * quality.evicted:.0f} % of the tokens are evicted"
    return f"{100 * quality.attention_kept:.1f} % of the attention kept"
