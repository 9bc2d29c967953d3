"""The columns of a plan's tables: figures of a candidate at its largest load."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from arborsim.core.units import Scale, scale_for
from arborsim.plan.results import CandidateResult, LoadPoint, PlanResult
from arborsim.plan.statistics import Estimate
from arborsim.show.plan_words import RUNS_OUT, STOPPED_BY, middle, runs_out, stopped_by
from arborsim.show.table import NOTHING, REMARK, UNKNOWN, Column, Table, name_column, shown
from arborsim.show.words import plain_scale

Read = Callable[[CandidateResult], float]


def tables(result: PlanResult) -> tuple[Table[CandidateResult], Table[CandidateResult]]:
    """The candidates that meet the target, with what decides, and with their use of the machine.

    Two tables: all columns side by side fit neither a screen nor a sheet of paper.
    """
    rows = result.met()
    chosen = result.recommendation
    marks = {
        chosen.candidate: ("★", "recommended"),
        chosen.alternative: ("☆", "nearest alternative"),
    }
    whole = Table(
        rows, (), lambda row: row.hardware, True,
        look=lambda row: "chosen" if row.number == chosen.candidate else "",
        badge=lambda row: marks.get(row.number),
    )  # fmt: skip
    names = shown_names(rows)
    main = (*names, *shown(_main(result), rows), *_REASONS)
    return whole.under(main), whole.under((*names, *shown(_use(), rows)))


def shown_names(rows: Sequence[CandidateResult]) -> tuple[Column[CandidateResult], ...]:
    """What tells candidates of one GPU apart."""
    found: list[Column[CandidateResult]] = [name_column("Policy", lambda r: r.policy)]
    if any(row.budget != "-" for row in rows):
        found.append(name_column("Budget", lambda r: r.budget, REMARK))
    if len({row.recall for row in rows}) > 1:
        found.append(name_column("Recall", lambda r: r.recall, REMARK))
    return tuple(found)


def at_largest(read: Callable[[LoadPoint], float]) -> Read:
    """A figure at the largest load; NaN where there is none."""
    return lambda row: math.nan if row.at_largest is None else read(row.at_largest)


def rank(row: CandidateResult) -> tuple[float, float, int]:
    """The cheapest first; without prices, the one with the largest load."""
    point = row.at_largest
    if point is None:
        return math.inf, 0.0, row.number
    cost = middle(point.cost_per_1000)
    return math.inf if math.isnan(cost) else cost, -point.load, row.number


def kept(row: CandidateResult) -> float:
    """Attention kept, NaN where it was not measured."""
    quality = row.quality
    return math.nan if quality is None or quality.attention_kept is None else quality.attention_kept


def _solved(bounds: tuple[Estimate, Estimate] | None) -> float:
    return math.nan if bounds is None else 500 * (bounds[0].value + bounds[1].value)


def _accuracy(row: CandidateResult) -> float:
    quality = row.quality
    return math.nan if quality is None or quality.accuracy is None else quality.accuracy.value


def _percentiles(name: str, *ranks: str) -> tuple[Read, ...]:
    """Percentiles of a kind of time that share a cell."""
    return tuple(
        at_largest(lambda p, rank=rank: getattr(getattr(p, name), rank))  # type: ignore[misc]
        for rank in ranks
    )


def _short(values: Sequence[float]) -> Scale:
    """One cell for several: no more digits than they need."""
    found = scale_for("seconds", values)
    most = max((value / found.size for value in values if math.isfinite(value)), default=0)
    return replace(found, decimals=min(found.decimals, 1 if most >= 10 else 2))


def _plainly(unit: str) -> Callable[[Sequence[float]], Scale]:
    return lambda values: plain_scale(values, unit)


def _main(result: PlanResult) -> tuple[Column[CandidateResult], ...]:
    def load(values: Sequence[float]) -> Scale:
        return Scale("clients", 1.0, 0) if result.unit == "clients" else plain_scale(
            values, result.unit)  # fmt: skip

    money, several = _plainly(result.currency), "p50 / p95 / p99"
    return (
        Column("largest", "Largest load, offered", "count",
               lambda r: math.nan if r.largest is None else r.largest,
               "The largest load offered to one machine (what arrives there) at which every run "
               "met the target. What is in the way of the next one, about 2 % above it, differs "
               f"by row: see {STOPPED_BY}.", scale=load, hide=UNKNOWN),
        Column("cost_stated", "Cost per 1,000, stated load", "count",
               lambda r: math.nan if r.fleet is None else middle(r.fleet.cost_per_1000),
               "Price of 1,000 searches at the stated load of all machines, with their idle time; "
               "the middle of its range.", scale=money, hide=UNKNOWN),
        Column("cost", "Cost per 1,000, largest load", "count",
               at_largest(lambda p: middle(p.cost_per_1000)),
               "Price of 1,000 searches at the row's own largest load; the middle of its range.",
               scale=money, hide=UNKNOWN),
        Column("cost_solved", "Cost per 1,000 solved, largest load", "count",
               at_largest(lambda p: _solved(p.cost_per_solved)),
               "The same for 1,000 searches with a correct answer, as recorded under full "
               "retention; a policy that drops tokens may solve fewer.", scale=money,
               hide=UNKNOWN),
        Column("kept", "Attention kept", "percent", kept,
               "Share of the recorded attention on tokens that stay readable. It is not accuracy.",
               hide=UNKNOWN, bar=True),
        Column("accuracy", "Accuracy", "percent", _accuracy,
               "Share of correct answers of live runs under this policy and budget.",
               hide=UNKNOWN, bar=True),
        Column("search", f"Search {several}", "seconds", at_largest(lambda p: p.search_s.p95),
               "From arrival to answer at the largest load: median, 95th and 99th percentile; "
               "sorted by the 95th.", parts=_percentiles("search_s", "p50", "p95", "p99"),
               scale=_short, hide=UNKNOWN),
        Column("token", "Per token p50 / p95", "seconds", at_largest(lambda p: p.token_s.p95),
               "A search's mean time per output token after the first: median and 95th "
               "percentile; sorted by the 95th.", parts=_percentiles("token_s", "p50", "p95"),
               scale=_short, hide=UNKNOWN),
        Column("machines", "Machines for the load", "count",
               lambda r: math.nan if r.fleet is None else r.fleet.machines,
               "Machines that serve the stated load, each an equal part of it.", hide=UNKNOWN),
    )  # fmt: skip


def _use() -> tuple[Column[CandidateResult], ...]:
    def share(key: str, title: str, read: Callable[[LoadPoint], float], about: str,
              hide: str = UNKNOWN) -> Column[CandidateResult]:  # fmt: skip
        return Column(key, title, "percent", at_largest(read), about, hide=hide, bar=True)

    plainly = _plainly("")
    return (
        Column("served", "Served there", "count", at_largest(lambda p: p.served_per_s.value),
               "Searches that ended per second while the measured ones arrived, mean over runs. "
               "In short runs it is below what is offered, while the machine fills. Costs are per "
               "offered search, as in the long run all that is offered is served; in a closed "
               "loop per served one.", scale=_plainly("searches/s"), hide=UNKNOWN),
        Column("first", "First token, p95", "seconds", at_largest(lambda p: p.first_token_s.p95),
               "From arrival to the first token.", hide=UNKNOWN),
        Column("alone", "Alone", "seconds",
               lambda r: math.nan if r.alone is None else r.alone.seconds,
               "One search by itself on the idle machine, mean over the mix.", hide=UNKNOWN),
        Column("together", "Searches at once", "count", at_largest(lambda p: p.concurrency),
               "Mean number of searches in the machine, waiting ones left out.", scale=plainly,
               hide=UNKNOWN),
        share("use_hbm", "HBM space", lambda p: p.used.hbm,
              "Bytes held for keys and values, of those that there are for them: mean over time. "
              "It limits how many searches have a place; it is full at peaks long before it is "
              "full on average."),
        share("use_memory", "HBM bandwidth", lambda p: p.used.memory,
              "Share of the time that decode iterations need to read weights, keys and values. It "
              "limits how fast searches that have a place go on."),
        share("use_compute", "Compute", lambda p: p.used.compute,
              "Share of the time that decode iterations need to compute, with that of prompts and "
              "of recomputed tokens."),
        share("use_pcie", "PCIe", lambda p: max(p.used.pcie_down, p.used.pcie_up),
              "Share of the time that the busier direction carries something.", NOTHING),
        share("use_host", "Host memory", lambda p: p.used.host,
              "Bytes held in DDR (and NVMe), of those there are, over time.", NOTHING),
        Column("preempted", "Preempted per 1,000", "count",
               at_largest(lambda p: p.preemptions_per_1000),
               "How often a search had to give up its place to others, per 1,000 searches.",
               scale=plainly, hide=NOTHING),
        Column("refused", "Refused per 1,000", "count", at_largest(lambda p: p.refused_per_1000),
               "Searches too large to be served at all, per 1,000 searches.", scale=plainly,
               hide=NOTHING),
    )  # fmt: skip


_REASONS: tuple[Column[CandidateResult], ...] = (
    Column("runs_out", RUNS_OUT, REMARK, text=runs_out, about=(
        "Space (HBM, host memory, allowed searches), if searches spend at least 1 % of their time "
        "waiting for it, or at least 1 in 100 loses its place: that which kept one waiting first. "
        "Otherwise what is busy for the largest share of the time: compute, HBM bandwidth or "
        "PCIe. Shares of space and of time are not comparable, so it need not be the largest "
        "number. Where runs are too short to tell how much more is carried, nothing was seen to "
        "run out, and only the busiest is named.")),
    Column("stopped_by", STOPPED_BY, REMARK, text=stopped_by, about=(
        "Why the largest load is not larger: some run misses the latency target at the next one; "
        "searches arrive faster than they end, so the queue would grow for ever; or runs are too "
        "short to show a steady state there, so the candidate may serve more.")),
)  # fmt: skip
