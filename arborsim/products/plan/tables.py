"""The tables of a plan: the columns of its page, and CSV files in which nothing is rounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from arborsim.core.tables import csv_text
from arborsim.core.tiers import BELOW_DDR
from arborsim.core.units import Scale, scale_for
from arborsim.products.plan import sentences as plan_words
from arborsim.products.plan.results import (
    CandidateResult,
    LoadPoint,
    PlanResult,
    middle_solved,
    ranked,
)
from arborsim.products.plan.statistics import Estimate
from arborsim.report.table import NOTHING, REMARK, UNKNOWN, Column, Table, name_column, shown
from arborsim.report.words import plain_scale

if TYPE_CHECKING:
    from arborsim.products.plan.sensitivity import Sensitivity


def tables(result: PlanResult) -> tuple[Table[CandidateResult], Table[CandidateResult]]:
    """The candidates that meet the target, with what decides, and with their use of the machine.

    Two tables: all columns side by side fit neither a screen nor a sheet of paper.
    """
    rows = ranked(result)
    chosen = result.recommendation
    marks = {
        chosen.candidate: ("★", "recommended"),
        chosen.alternative: ("☆", "nearest alternative"),
    }
    names: list[Column[CandidateResult]] = [name_column("Policy", lambda r: r.policy)]
    if len({row.hardware for row in rows}) > 1:
        names.append(name_column("GPU", lambda r: r.hardware, REMARK))
    if any(row.budget != "-" for row in rows):
        names.append(name_column("Budget", lambda r: r.budget, REMARK))
    if len({row.recall for row in rows}) > 1:
        names.append(name_column("Recall", lambda r: r.recall, REMARK))
    whole = Table(
        rows, (),
        look=lambda row: "chosen" if row.number == chosen.candidate else "",
        badge=lambda row: marks.get(row.number),
    )  # fmt: skip
    main = (*names, *shown(_main(result), rows), *_REASONS)
    return whole.under(main), whole.under((*names, *shown(_USE, rows)))


def at_largest(read: Callable[[LoadPoint], float]) -> Callable[[CandidateResult], float]:
    """A figure at the largest load; NaN where there is none."""
    return lambda row: math.nan if row.at_largest is None else read(row.at_largest)


def _largest(key: str, title: str, kind: str, read: Callable[[LoadPoint], float], about: str,
             hide: str = UNKNOWN, **others: Any) -> Column[CandidateResult]:  # fmt: skip
    return Column(key, title, kind, at_largest(read), about, hide=hide, **others)


def _share(key: str, title: str, read: Callable[[LoadPoint], float], about: str,
           hide: str = UNKNOWN) -> Column[CandidateResult]:  # fmt: skip
    return _largest(key, title, "percent", read, about, hide, bar=True)


def _known_cost(cost: float) -> float:
    """NaN where it is infinite: of what solves nothing, or is not known to."""
    return cost if math.isfinite(cost) else math.nan


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

    money = _plainly(result.currency)
    where, place = "stated load", "the stated load of all machines, with their idle time"
    if result.stated_load is None:
        where, place = "largest load", "the row's own largest load, as none is stated"
    return (
        Column("cost_solved", f"Cost per 1,000 solved, {where}", "count",
               lambda r: _known_cost(middle_solved(r)),
               "Price of 1,000 searches with a correct answer, where candidates are compared: "
               f"{place}; the middle of its range. Not known for a policy that drops or rounds "
               "tokens, or leaves some unread, unless live runs say how many answers stay right.",
               scale=money, hide=UNKNOWN),
        Column("cost", f"Cost per 1,000, {where}", "count", plan_words.cost,
               f"Price of 1,000 searches, solved or not, {place}; the middle of its range.",
               scale=money, hide=UNKNOWN),
        Column("hour", "Cost per hour", "count",
               lambda r: plan_words.middle(r.fleet.price_per_hour if r.fleet else r.price_per_hour),
               "Price of an hour of all machines for the stated load, or of one machine where none "
               "is stated; the middle of its range.", scale=money, hide=UNKNOWN),
        Column("machines", "Machines for the load", "count",
               lambda r: math.nan if r.fleet is None else r.fleet.machines,
               "Machines that serve the stated load, each an equal part of it.", hide=UNKNOWN),
        Column("largest", "Largest load, offered", "count",
               lambda r: math.nan if r.largest is None else r.largest,
               "The largest load offered to one machine (what arrives there) at which every run "
               "met the target. What is in the way of the next one, about 2 % above it, differs "
               f"by row: see {plan_words.STOPPED_BY}.", scale=load, hide=UNKNOWN),
        Column("kept", "Attention kept", "percent", plan_words.kept,
               "Share of the recorded attention on tokens that stay readable. It is not accuracy.",
               hide=UNKNOWN, bar=True, words=plan_words.kept_note),
        Column("accuracy", "Accuracy", "percent", plan_words.accuracy,
               "Share of correct answers of live runs under this policy and budget.",
               hide=UNKNOWN, bar=True),
        _largest("search", "Search p50 / p95 / p99", "seconds", lambda p: p.search_s.p95,
                 "From arrival to answer at the largest load: median, 95th and 99th percentile; "
                 "sorted by the 95th.", parts=(at_largest(lambda p: p.search_s.p50),
                 at_largest(lambda p: p.search_s.p95), at_largest(lambda p: p.search_s.p99)),
                 scale=_short),
        _largest("token", "Per token p50 / p95", "seconds", lambda p: p.token_s.p95,
                 "A search's mean time per output token after the first: median and 95th "
                 "percentile; sorted by the 95th.", parts=(at_largest(lambda p: p.token_s.p50),
                 at_largest(lambda p: p.token_s.p95)),
                 scale=_short),
    )  # fmt: skip


def _of_memory(what: str, memory: str) -> Callable[[LoadPoint], float]:
    """Reads a share of a memory below DDR; 0 on machines without it."""
    return lambda point: float(getattr(point.used, what).get(memory, 0.0))


def _alone_in(memory: str) -> Callable[[CandidateResult], float]:
    return lambda row: row.alone.peak_stored_bytes.get(memory, 0.0) if row.alone else 0.0


_USE: tuple[Column[CandidateResult], ...] = (
    _largest("served", "Served there", "count", lambda p: p.served_per_s.value,
             "Searches that ended per second while the measured ones arrived, mean over runs. In "
             "short runs it is below what is offered, while the machine fills. Costs are per "
             "offered search, as in the long run all that is offered is served; in a closed loop "
             "per served one.", scale=_plainly("searches/s")),
    _largest("first", "First token, p95", "seconds", lambda p: p.first_token_s.p95,
             "From arrival to the first token."),
    Column("alone", "Alone", "seconds",
           lambda r: math.nan if r.alone is None else r.alone.seconds,
           "One search by itself on the idle machine, mean over the mix.", hide=UNKNOWN),
    _largest("together", "Searches at once", "count", lambda p: p.concurrency,
             "Mean number of searches in the machine, waiting ones left out.",
             scale=_plainly("")),
    _share("use_hbm", "HBM space", lambda p: p.used.hbm,
           "Bytes held for keys and values, of those that there are for them: mean over time. It "
           "limits how many searches have a place; it is full at peaks long before it is full on "
           "average."),
    _share("use_memory", "HBM bandwidth", lambda p: p.used.memory,
           "Share of the time that decode iterations need to read weights, keys and values. It "
           "limits how fast searches that have a place go on."),
    _share("use_compute", "Compute", lambda p: p.used.compute,
           "Share of the time that decode iterations need to compute, with that of prompts and of "
           "recomputed tokens."),
    _share("use_pcie", "PCIe", lambda p: max(p.used.pcie_down, p.used.pcie_up),
           "Share of the time that the busier direction carries something.", NOTHING),
    _share("use_host", "Host memory", lambda p: p.used.host,
           "Bytes held in DDR (and NVMe), of those there are, over time.", NOTHING),
    *(column for name in BELOW_DDR for column in (
        Column(f"alone_{name.lower()}", f"{name} peak, alone", "bytes", _alone_in(name),
               f"Bytes in {name} of one search by itself, at most: mean over the mix.",
               hide=NOTHING),
        _share(f"use_{name.lower()}", name, _of_memory("below", name),
               f"Bytes held in {name}, of those there are, over time.", NOTHING),
        _share(f"use_{name.lower()}_link", f"{name} link", _of_memory("links", name),
               "Share of the time that the busier direction of its link carries something.",
               NOTHING))),
    _largest("preempted", "Preempted per 1,000", "count", lambda p: p.preemptions_per_1000,
             "How often a search had to give up its place to others, per 1,000 searches.", NOTHING,
             scale=_plainly("")),
    _largest("refused", "Refused per 1,000", "count", lambda p: p.refused_per_1000,
             "Searches too large to be served at all, per 1,000 searches.", NOTHING,
             scale=_plainly("")),
)  # fmt: skip
_REASONS: tuple[Column[CandidateResult], ...] = (
    Column("runs_out", plan_words.RUNS_OUT, REMARK, text=plan_words.runs_out, about=(
        "Space (HBM, host memory, allowed searches), if searches spend at least 1 % of their time "
        "waiting for it, or at least 1 in 100 loses its place: that which kept one waiting first. "
        "Otherwise what is busy for the largest share of the time: compute, HBM bandwidth or "
        "PCIe. Shares of space and of time are not comparable, so it need not be the largest "
        "number. Where runs are too short to tell how much more is carried, nothing was seen to "
        "run out, and only the busiest is named.")),
    Column("stopped_by", plan_words.STOPPED_BY, REMARK, text=plan_words.stopped_by, about=(
        "Why the largest load is not larger: some run misses the latency target at the next one; "
        "searches arrive faster than they end, so the queue would grow for ever; or runs are too "
        "short to show a steady state there, so the candidate may serve more.")),
)  # fmt: skip


#: What the names of columns of CSV files do not tell; units and shares are in the names.
ABOUT = {
    "load, largest_load": "Offered to one machine: searches that arrive per second, or clients.",
    "refuted_load": "The next load, which limited_by rules out; it was served only "
    "if limited_by is target.",
    "limited_by": "target: some run missed it; throughput: searches arrive faster than they end; "
    "run length: runs are too short to tell.",
    "served_per_s": "Searches that ended per second of the measured part of the runs; below the "
    "load while the machine fills.",
    "cost_per_1000": "Of 1,000 searches offered at that load, at the lowest and highest price.",
    "saturated": "What runs out first: hbm, host or searches (space), compute, memory (HBM "
    "bandwidth), pcie_down or pcie_up (time).",
    "used_...": "hbm and host: mean share of the bytes; others: share of the time.",
    "prefix_tokens_...": "Of shared prefixes, over all runs: found in hbm, copied back from ddr, "
    "or computed.",
    "evidence_...": "What seconds rest on. basis: kind (published runs of this GPU, engine and "
    "type of weights were compared), all (only others were), or a roofline (none); "
    "median and high: of the errors of these runs. Costs here are not widened by them.",
    "..._low, ..._high": "Ends of the 95 % interval, or of the range of prices.",
}
_NAMES = ("number", "hardware", "policy", "budget", "recall", "gpus", "status", "reason")
_UNKNOWN = Estimate(math.nan, math.nan, math.nan, 0)


def candidates(result: PlanResult) -> str:
    """CSV: one row per candidate, at its largest load."""
    return to_csv(
        {**_who(row), **_known(row), **_point(row.at_largest)} for row in result.candidates
    )


def curves(result: PlanResult) -> str:
    """CSV: one row per candidate and load that was served."""
    return to_csv(
        {**_who(row), "meets": point.meets, **_point(point)}
        for row in result.candidates
        for point in row.curve
    )


def sensitivity(found: Sequence[Sensitivity]) -> str:
    """CSV: one row per candidate, assumption and factor."""
    return to_csv(
        {
            "assumption": each.assumption.title,
            "factor": variant.factor,
            "value": each.base * variant.factor,
            "unit": "" if each.assumption.kind == "factor" else each.assumption.kind,
            **_who(variant.result),
            "number": each.candidate,
            "largest_load": variant.result.largest,
            **_point(variant.result.at_largest),
        }
        for each in found
        for variant in each.variants
    )


def to_csv(records: Iterable[dict[str, Any]]) -> str:
    """With the columns of all rows; what is not known is empty."""
    import pandas as pd

    rows = [{name: _cell(value) for name, value in row.items()} for row in records]
    return csv_text(pd.DataFrame(rows, dtype=object))


def _cell(value: Any) -> Any:
    unknown = value is None or (isinstance(value, float) and not math.isfinite(value))
    return "" if unknown else value


def _who(row: CandidateResult) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _NAMES}


def _known(row: CandidateResult) -> dict[str, Any]:
    quality, alone, fleet = row.quality, row.alone, row.fleet
    return _flat({
        "price_per_hour": row.price_per_hour or (None, None),
        "largest_load": row.largest,
        "refuted_load": row.refuted,
        "limited_by": row.limited_by,
        "largest_mean": row.spread or _UNKNOWN,
        "attention_kept": quality and quality.attention_kept,
        "attention_kept_note": plan_words.kept_note(row),
        "accuracy": (quality and quality.accuracy) or _UNKNOWN,
        **{name: getattr(quality, name, None) for name in ("evicted", "quantised", "offloaded")},
        "alone_s": alone and alone.seconds,
        "alone_at_percentile_s": alone and alone.at_percentile_s,
        "alone_peak_hbm_bytes": alone and alone.peak_hbm_bytes,
        **{
            f"alone_peak_{name.lower()}_bytes": size
            for name, size in (alone.peak_stored_bytes if alone else {}).items()
        },
        "fleet_machines": fleet and fleet.machines,
        "fleet_gpus": fleet and fleet.gpus,
        "fleet_price_per_hour": (fleet and fleet.price_per_hour) or (None, None),
        "fleet_cost_per_1000": (fleet and fleet.cost_per_1000) or (None, None),
        **{
            f"fleet_cost_per_solved_at_{end}_price": found
            for end, found in zip(
                ("lowest", "highest"), (fleet and fleet.cost_per_solved) or (_UNKNOWN, _UNKNOWN),
                strict=True,
            )
        },
        **({"evidence": row.evidence} if row.evidence else {}),
    })  # fmt: skip


def _point(point: LoadPoint | None) -> dict[str, Any]:
    if point is None:
        return {}
    lowest, highest = point.cost_per_solved or (_UNKNOWN, _UNKNOWN)
    same = ("served_per_s", "search_s", "first_token_s", "token_s", "waiting_s", "concurrency",
            "queue", "peak_concurrency", "total_s", "saturated", "preemptions_per_1000",
            "refused_per_1000", "used", "busy")  # fmt: skip
    return _flat({
        "load": point.load,
        "at_percentile_s": point.at_percentile,
        **{name: getattr(point, name) for name in same},
        "prefix_tokens": point.prefixes,
        "cost_per_1000": point.cost_per_1000 or (None, None),
        "cost_per_solved_at_lowest_price": lowest,
        "cost_per_solved_at_highest_price": highest,
    })  # fmt: skip


def _flat(figures: dict[str, Any]) -> dict[str, Any]:
    """With a name for each end of a range, and for each field of a record."""
    found: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, Estimate):
            ends = {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
        elif isinstance(value, tuple):
            ends = {f"{name}_low": value[0], f"{name}_high": value[1]}
        elif is_dataclass(value):
            ends = {}
            for each in fields(value):
                own = getattr(value, each.name)
                parts = own if isinstance(own, Mapping) else {"": own}
                ends |= {f"{name}_{each.name}_{key.lower()}".rstrip("_"): v
                         for key, v in parts.items()}  # fmt: skip
        else:
            ends = {name: value}
        found |= ends
    return found
