"""The columns of a plan's tables: figures of a candidate at its largest load."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from arborsim.core.units import Scale, scale_for
from arborsim.plan.results import CandidateResult, LoadPoint, PlanResult
from arborsim.plan.statistics import Estimate
from arborsim.show.plan_words import middle, plain_scale


@dataclass(frozen=True)
class PlanColumn:
    """One figure of a candidate.

    Attributes
    ----------
    key, title : str
    kind : str
        A key of `arborsim.core.units.UNITS`, or "load" or "money", which have no prefixes.
    value : callable
        CandidateResult -> float, NaN where it is not known.
    about : str
        What it means, for the appendix.
    part : str
        Of which table: "main", or "use" of the machine.
    parts : tuple of callable
        Figures that share a cell; rows are sorted by `value` all the same.
    """

    key: str
    title: str
    kind: str
    value: Callable[[CandidateResult], float]
    about: str
    part: str = "main"
    parts: tuple[Callable[[CandidateResult], float], ...] = ()

    def figures(self, row: CandidateResult) -> list[float]:
        """What stands in the row's cell."""
        return [read(row) for read in self.parts or (self.value,)]

    def scale(self, rows: Sequence[CandidateResult], result: PlanResult) -> Scale:
        """One unit for the column."""
        values = [value for row in rows for value in self.figures(row)]
        if self.key == "largest" and result.unit == "clients":
            return Scale(result.unit, 1.0, 0)
        if self.kind == "load":
            units = {"largest": result.unit, "served": "searches/s"}
            return plain_scale(values, units.get(self.key, ""))
        if self.kind == "money":
            return plain_scale(values, result.currency)
        found = scale_for(self.kind, values)
        if self.parts:  # one cell for several: no more digits than they need
            most = max((value / found.size for value in values if math.isfinite(value)), default=0)
            return replace(found, decimals=min(found.decimals, 1 if most >= 10 else 2))
        return found


def _at(read: Callable[[LoadPoint], float]) -> Callable[[CandidateResult], float]:
    """A figure at the largest load."""
    return lambda row: math.nan if row.at_largest is None else read(row.at_largest)


def _solved(bounds: tuple[Estimate, Estimate] | None) -> float:
    return math.nan if bounds is None else (bounds[0].value + bounds[1].value) / 2


def _kept(row: CandidateResult) -> float:
    quality = row.quality
    return math.nan if quality is None or quality.attention_kept is None else quality.attention_kept


def _accuracy(row: CandidateResult) -> float:
    quality = row.quality
    return math.nan if quality is None or quality.accuracy is None else quality.accuracy.value


RUNS_OUT = "Runs out first"
RUNS_OUT_ABOUT = (
    "Space (HBM, host memory, allowed searches), if searches spend at least 1 % of their time "
    "waiting for it, or at least 1 in 100 loses its place: that which kept one waiting first. "
    "Otherwise what is busy for the largest share of the time: compute, HBM bandwidth or PCIe. "
    "Shares of space and of time are not comparable, so it need not be the largest number. Where "
    "runs are too short to tell how much more is carried, nothing was seen to run out, and only "
    "the busiest is named."
)
STOPPED_BY = "More load is stopped by"

COLUMNS: tuple[PlanColumn, ...] = (
    PlanColumn("largest", "Largest load, offered", "load",
               lambda r: math.nan if r.largest is None else r.largest,
               "The largest load offered to one machine (what arrives there) at which every run "
               "met the target. What is in the way of the next one, about 2 % above it, differs by "
               "row: see More load is stopped by."),
    PlanColumn("cost_stated", "Cost per 1,000, stated load", "money",
               lambda r: math.nan if r.fleet is None else middle(r.fleet.cost_per_1000),
               "Price of 1,000 searches at the stated load of all machines, with their idle time; "
               "the middle of its range."),
    PlanColumn("cost", "Cost per 1,000, largest load", "money",
               _at(lambda p: middle(p.cost_per_1000)),
               "Price of 1,000 searches at the row's own largest load; the middle of its range."),
    PlanColumn("cost_solved", "Cost per 1,000 solved, largest load", "money",
               _at(lambda p: 1000 * _solved(p.cost_per_solved)),
               "The same for 1,000 searches with a correct answer, as recorded under full "
               "retention; a policy that drops tokens may solve fewer."),
    PlanColumn("kept", "Attention kept", "percent", _kept,
               "Share of the recorded attention on tokens that stay readable. It is not accuracy."),
    PlanColumn("accuracy", "Accuracy", "percent", _accuracy,
               "Share of correct answers of live runs under this policy and budget."),
    PlanColumn("search", "Search p50 / p95 / p99", "seconds", _at(lambda p: p.search_s.p95),
               "From arrival to answer at the largest load: median, 95th and 99th percentile; "
               "sorted by the 95th.",
               parts=(_at(lambda p: p.search_s.p50), _at(lambda p: p.search_s.p95),
                      _at(lambda p: p.search_s.p99))),
    PlanColumn("token", "Per token p50 / p95", "seconds", _at(lambda p: p.token_s.p95),
               "A search's mean time per output token after the first: median and 95th percentile; "
               "sorted by the 95th.",
               parts=(_at(lambda p: p.token_s.p50), _at(lambda p: p.token_s.p95))),
    PlanColumn("machines", "Machines for the load", "count",
               lambda r: math.nan if r.fleet is None else r.fleet.machines,
               "Machines that serve the stated load, each an equal part of it."),
    PlanColumn("served", "Served at it", "load", _at(lambda p: p.served_per_s.value),
               "Searches that ended per second while the measured ones arrived, mean over runs. "
               "In short runs it is below what is offered, while the machine fills. Costs are per "
               "offered search, as in the long run all that is offered is served; in a closed loop "
               "per served one.", "use"),
    PlanColumn("first", "First token, p95", "seconds", _at(lambda p: p.first_token_s.p95),
               "From arrival to the first token.", "use"),
    PlanColumn("alone", "Alone", "seconds",
               lambda r: math.nan if r.alone is None else r.alone.seconds,
               "One search by itself on the idle machine, mean over the mix.", "use"),
    PlanColumn("together", "Searches at once", "load", _at(lambda p: p.concurrency),
               "Mean number of searches in the machine, waiting ones left out.", "use"),
    PlanColumn("use_hbm", "HBM space", "percent", _at(lambda p: p.used.hbm),
               "Bytes held for keys and values, of those that there are for them: mean over time. "
               "It limits how many searches have a place; it is full at peaks long before it is "
               "full on average.", "use"),
    PlanColumn("use_memory", "HBM bandwidth", "percent", _at(lambda p: p.used.memory),
               "Share of the time that decode iterations need to read weights, keys and values. It "
               "limits how fast searches that have a place go on.", "use"),
    PlanColumn("use_compute", "Compute", "percent", _at(lambda p: p.used.compute),
               "Share of the time that decode iterations need to compute, with that of prompts and "
               "of recomputed tokens.", "use"),
    PlanColumn("use_pcie", "PCIe", "percent",
               _at(lambda p: max(p.used.pcie_down, p.used.pcie_up)),
               "Share of the time that the busier direction carries something.", "use"),
    PlanColumn("use_host", "Host memory", "percent", _at(lambda p: p.used.host),
               "Bytes held in DDR (and NVMe), of those there are, over time.", "use"),
    PlanColumn("preempted", "Preempted per 1,000", "load", _at(lambda p: p.preemptions_per_1000),
               "How often a search had to give up its place to others, per 1,000 searches.", "use"),
    PlanColumn("refused", "Refused per 1,000", "load", _at(lambda p: p.refused_per_1000),
               "Searches too large to be served at all, per 1,000 searches.", "use"),
)  # fmt: skip


def shown(rows: Sequence[CandidateResult]) -> list[PlanColumn]:
    """Columns that say something about some row."""
    quiet = ("preempted", "refused", "use_pcie", "use_host")  # what never happened needs no column
    return [
        column
        for column in COLUMNS
        if any(
            not math.isnan(value) and (value or column.key not in quiet)
            for value in map(column.value, rows)
        )
    ]


def definitions(columns: Sequence[PlanColumn]) -> dict[str, str]:
    """Terms and what they mean."""
    return {column.title: column.about for column in columns} | {
        RUNS_OUT: RUNS_OUT_ABOUT,
        STOPPED_BY: "Why the largest load is not larger: some run misses the latency target at the "
        "next one; searches arrive faster than they end, so the queue would grow for ever; or runs "
        "are too short to show a steady state there, so the candidate may serve more.",
    }
