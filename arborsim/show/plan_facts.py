"""The recommended candidate of a plan and its alternative, side by side."""

from __future__ import annotations

from arborsim.core.units import quantity
from arborsim.plan.load_point import TIME
from arborsim.plan.results import CandidateResult, PlanResult
from arborsim.show.plan_columns import RUNS_OUT, STOPPED_BY
from arborsim.show.plan_words import (
    SATURATED,
    at_load,
    is_least,
    load,
    numbered,
    saturates,
    stated,
    stopped_by,
)
from arborsim.show.words import digits, money


def key_figures(result: PlanResult) -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """The recommended candidate and its alternative.

    Returns
    -------
    list of (str, str)
        Head and name of each; empty if nothing is recommended.
    dict
        Name of a figure -> its text for each; without what is known of none.
    """
    numbers = (result.recommendation.candidate, result.recommendation.alternative)
    rows = [numbered(result, number) for number in numbers if number is not None]
    heads = ("Recommended", "Nearest alternative")
    facts = [_facts(row, result) for row in rows]
    names = facts[0] if facts else {}
    return [(head, row.name) for head, row in zip(heads, rows, strict=False)], {
        name: [each[name] for each in facts] for name in names if any(each[name] for each in facts)
    }


def _facts(row: CandidateResult, result: PlanResult) -> dict[str, str]:
    """What decides, in the words of a meeting; "" where it is not known."""
    point, fleet = row.at_largest, row.fleet
    at_stated = f"Cost per 1,000 searches{at_load(result)}"
    largest, solved = "Cost per 1,000 searches at the largest load", "Cost per 1,000 solved there"
    found = {
        "Price per hour": money(row.price_per_hour, result.currency),
        "Largest load offered to one machine": _spread(row, result),
        "Served there": "",
        at_stated: "",
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
            "Served there": f"{load(point.served_per_s.value, 'searches/s')} in runs of "
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
        found[at_stated] = money(fleet.cost_per_1000, result.currency)
        found["Machines for the stated load"] = (
            f"{fleet.machines} ({stated(result)}, {fleet.gpus} "
            f"GPU{'s' if fleet.gpus > 1 else ''}, {money(fleet.price_per_hour, result.currency)} "
            "per hour)"
        )
    return found


def _first(row: CandidateResult) -> str:
    """What runs out first, and what is busiest if that is something else."""
    point = row.at_largest
    if point is None:
        return ""
    shares = {name: f"{100 * getattr(point.used, name):.0f} %" for name in (*TIME, "hbm", "host")}
    if point.saturated in TIME:
        if is_least(row):  # nothing runs out where more load may be carried
            share = shares[point.saturated]
            return f"not seen in so short runs; busiest is {saturates(point)} ({share} of the time)"
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
    low, high = (load(each(row.largest_by_seed), result.unit) for each in (min, max))
    return f"{text} (by seed: {low.split()[0]} to {high.split()[0]})"


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
