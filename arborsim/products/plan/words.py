"""A plan's figures in words: loads, limits, candidates, what runs out first, key figures."""

from __future__ import annotations

import math
from collections.abc import Iterable

from arborsim.core.units import quantity
from arborsim.machine.fidelity import share_text
from arborsim.products.plan.costs import compared_cost, paid
from arborsim.products.plan.results import RUN_LENGTH, CandidateResult, LoadPoint, PlanResult
from arborsim.products.plan.runs import TIME
from arborsim.report.words import digits, listed

RUNS_OUT = "Runs out first"
STOPPED_BY = "More load is stopped by"
#: Names of `LoadPoint.saturated`.
RESOURCES = {
    "hbm": "HBM space",
    "host": "host memory",
    "below": "memory below DDR",
    "searches": "allowed searches",
    "compute": "compute",
    "memory": "HBM bandwidth",
    "pcie_down": "PCIe to the host",
    "pcie_up": "PCIe from the host",
}
#: Names of `CandidateResult.limited_by`.
STOPPED = {
    "target": "the latency target",
    "throughput": "searches arriving faster than they end",
    RUN_LENGTH: "the length of the runs: longer ones can show more or less",
}


def money(cost: tuple[float, float] | None, currency: str) -> str:
    """A price or a range of prices, with as many digits as they need."""
    if cost is None:
        return "no price given"
    low, high = (f"{value:.3g}" if value < 1000 else f"{value:,.0f}" for value in cost)
    return f"{low} {currency}" if low == high else f"{low} to {high} {currency}"


def named(candidate: CandidateResult) -> str:
    """`CandidateResult.name`, spelled out for a sentence."""
    budget = "" if candidate.budget == "-" else f" at a budget of {candidate.budget}"
    recall = "" if candidate.recall == "-" else f" (recall {candidate.recall})"
    return f"{candidate.policy}{budget}{recall} on {candidate.machine}"


def rented(candidate: CandidateResult, machines: tuple[int, int]) -> str:
    """These machines: ``"4 H100 (2 replicas of TP 2)"``, ``"1 to 2 H100"``."""
    shared = candidate.gpus
    gpus, replicas = (
        " to ".join(map(str, dict.fromkeys(n * each for each in machines))) for n in (shared, 1)
    )
    if shared == 1:
        return f"{gpus} {candidate.gpu}"
    several = f"{replicas} replicas of " if machines != (1, 1) else ""
    return f"{gpus} {candidate.gpu} ({several}TP {shared})"


def fleet_of(row: CandidateResult) -> str:
    """`rented`, for a cell: ``"4 H100, TP 2"``."""
    machines = row.fleet.machines if row.fleet else 1
    return f"{machines * row.gpus} {row.gpu}{f', TP {row.gpus}' * (row.gpus > 1)}"


def policy_of(row: CandidateResult) -> str:
    """The policy and its budget, for a cell."""
    return row.policy if row.budget == "-" else f"{row.policy} {row.budget}"


def tokens_per_gpu(row: CandidateResult, point: LoadPoint | None) -> float:
    """Output tokens per second of each GPU at a load."""
    if point is None or point.tokens is None:
        return math.nan
    return point.tokens.output_per_s / row.gpus


_SHORT = {"memory": "HBM speed", "hbm": "HBM space", "below": "below DDR", "searches": "places"}


def first_out_short(row: CandidateResult) -> str:
    """The resource that runs out first, for a narrow cell."""
    if row.at_largest is None or unseen(row):
        return "not seen"
    name = row.at_largest.saturated
    return _SHORT.get(name, RESOURCES[name])


def times_at(point: LoadPoint, kind: str, rank: float, plan: PlanResult) -> str:
    """A kind of time (a field of `plan.target.Times`) at a percentile of 50, 95, 99 or its own."""
    seconds = point.reached_s.get(kind, math.nan) if rank == plan.target.of(kind) else math.nan
    if math.isnan(seconds):
        spread = {"search": point.search_s, "ttft": point.first_token_s, "tpot": point.token_s}
        seconds = float(getattr(spread[kind], f"p{rank:g}", math.nan))
    return quantity("seconds", seconds)


def rate_of(load: float, plan: PlanResult) -> str:
    """`load_of`, short: ``"4.8/s"``, ``"12 clients"``."""
    return load_of(load, plan).replace(f" {plan.noun}/s", "/s")


def numbered(plan: PlanResult, number: int) -> CandidateResult:
    """A candidate by its number; of an interrupted plan some are missing."""
    return next(each for each in plan.candidates if each.number == number)


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
        return ", ".join(filter(None, (text, row.machine if hardware else "")))

    names = {row.number: short(row) for row in rows}
    if len(set(names.values())) < len(names):
        return {row.number: row.name for row in rows}
    return names


def load_of(load: float | None, plan: PlanResult) -> str:
    """``"1.25 searches/s"``, ``"12 clients"``."""
    if load is None:
        return "none"
    return f"{load:,.0f} clients" if plan.unit == "clients" else f"{load:.3g} {plan.unit}"


def at_load(plan: PlanResult) -> str:
    """Where candidates' costs are compared: `` at 5 searches/s``, or "" for their largest loads."""
    return "" if plan.stated_load is None else f" at {load_of(plan.stated_load, plan)}"


def load_axis(plan: PlanResult) -> str:
    """The title of an axis of loads."""
    return f"load offered to one machine ({plan.unit})"


def limits_of(plan: PlanResult) -> str:
    """The target: ``"TTFT within 500 ms and answer within 60 s for 95% of the requests"``."""
    groups = [
        (group[0].percentile, listed(each.text for each in group)) for group in plan.target.groups
    ]
    return listed(f"{text} for {rank:g}% of the {plan.noun}" for rank, text in groups)


def stopped_by(row: CandidateResult) -> str:
    """The reason why the next larger load is out of reach."""
    return STOPPED.get(row.limited_by, row.limited_by)


def saturates(point: LoadPoint | None) -> str:
    """The name of what runs out first."""
    return "" if point is None else RESOURCES.get(point.saturated, point.saturated)


def unseen(row: CandidateResult) -> bool:
    """Whether the runs are too short to show that the busiest part runs out."""
    return row.is_open and row.at_largest is not None and row.at_largest.saturated in TIME


def runs_out(row: CandidateResult) -> str:
    """The cell of a table: nothing runs out where more may be carried."""
    busiest = saturates(row.at_largest)
    return f"not seen; busiest: {busiest}" if unseen(row) else busiest


def first_out(row: CandidateResult) -> str:
    """A sentence's version, with shares: one of space is none of time, so each is named."""
    point = row.at_largest
    assert point is not None

    def busy(name: str) -> str:
        return f"{getattr(point.used, name):.0%} of the time"

    name = point.saturated
    if unseen(row):
        seen = f"busiest is {RESOURCES[name]} ({busy(name)})"
        return f"not seen in runs of this length; {seen}"
    if name in TIME:
        return f"{RESOURCES[name]} (busy {busy(name)})"
    held = ""
    if name != "searches":
        share = max(point.used.below.values()) if name == "below" else getattr(point.used, name)
        held = f" (on average {share:.0%} held, but full at peaks)"
    busiest = max(TIME, key=lambda other: float(getattr(point.used, other)))
    return (
        f"{RESOURCES[name]}{held}, which limits how many searches have a place; "
        f"{RESOURCES[busiest]} is busy {busy(busiest)}, which limits how fast these go on"
    )


def shared_prefixes(plan: PlanResult) -> str:
    """Where the recommended candidate's searches found shared prompts; "" if nothing is shared."""
    row = next(iter(plan.named()), None)
    if row is None or row.at_largest is None:
        return ""
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
    """The middle of a range of prices; NaN without prices."""
    return math.nan if bounds is None else sum(bounds) / 2


def cost(row: CandidateResult) -> float:
    """The middle of the costs of 1,000 searches where candidates are compared (`at_load`)."""
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


def unfinished(row: CandidateResult) -> float:
    """Share of answers that were cut off; NaN where none were counted, or none was."""
    found = row.quality.unfinished if row.quality else None
    return found.value if found is not None and found.value else math.nan


def growth(row: CandidateResult) -> float:
    """By how much answers are longer than under full retention; NaN where they are not."""
    quality = row.quality
    return math.nan if quality is None or quality.growth == 1 else quality.growth - 1


def key_figures(plan: PlanResult) -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """Heads and names of the recommended candidate and its alternative, and texts by figure.

    Both are empty if nothing is recommended; figures that are known of none are left out.
    """
    rows = plan.named()
    facts = [_facts(row, plan) for row in rows]
    texts = {name: [each[name] for each in facts] for name in (facts[0] if facts else ())}
    heads = zip(("Recommended", "Nearest alternative"), (row.name for row in rows), strict=False)
    return list(heads), {name: each for name, each in texts.items() if any(each)}


def _facts(row: CandidateResult, plan: PlanResult) -> dict[str, str]:
    """The figures that decide, by their names; "" where one is not known."""
    point, fleet, unit, currency = row.at_largest, row.fleet, plan.unit, plan.currency
    assert point is not None  # it meets the target
    there, largest = f" at {load_of(point.load, plan)}", load_of(row.largest, plan)
    if len(row.largest_by_seed) > 1:
        least, most = (load_of(end(row.largest_by_seed), plan) for end in (min, max))
        largest += f" (by seed: {least.split()[0]} to {most.split()[0]})"
    of_fleet = machines = solved = ""
    if fleet is not None:
        of_fleet = money(paid(row, fleet, unit), currency)
        solved = money(paid(row, fleet, unit, True), currency) if fleet.cost_per_solved else ""
        machines = (
            f"{fleet.machines} ({load_of(fleet.load, plan)}, {fleet.gpus} "
            f"GPU{'s' * (fleet.gpus > 1)}, {money(fleet.price_per_hour, currency)} per hour)"
        )
    solved_there = money(paid(row, point, unit, True), currency) + there
    return {
        f"Cost per 1,000 solved{at_load(plan)}": solved,
        "Price per hour": money(row.price_per_hour, currency),
        "Largest load offered to one machine": largest,
        "Served there": f"{digits(point.served_per_s.value)} {plan.noun}/s in runs of "
        f"{plan.searches:,} {plan.noun}, which begin empty",
        f"Cost per 1,000 {plan.noun}{at_load(plan)}": of_fleet,
        f"Cost per 1,000 {plan.noun} at the largest load": money(paid(row, point, unit), currency)
        + there,
        "Cost per 1,000 solved there": solved_there if point.cost_per_solved else "",
        "Error of simulated seconds in these costs": _error(row),
        "Arrival to answer (p50, p95, p99)": _seconds(*vars(point.search_s).values()),
        "Time per output token (p50, p95)": _seconds(point.token_s.p50, point.token_s.p95),
        f"{plan.noun.capitalize()} at once": f"{digits(point.concurrency)} on average, "
        f"{point.peak_concurrency} at most",
        RUNS_OUT: first_out(row),
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
            f"live accuracy {100 * found.value:.1f}% (n = {found.n}, 95% interval "
            f"{100 * found.low:.1f} to {100 * found.high:.1f}%)"
        )
    if quality.attention_kept is None:
        known = quality.kept_note or "not known"
        if quality.unread and not quality.evicted:
            return f"{known}: not every token is read"
        return f"{known}: {100 * quality.evicted:.0f}% of the tokens are evicted"
    return f"{100 * quality.attention_kept:.1f}% of the attention kept"
