"""What a plan's candidates are weighed by: cost, quality and latency, where they are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from arborsim.core.units import quantity
from arborsim.plan.results import CandidateResult, PlanResult
from arborsim.plan.sensitivity import compared_cost
from arborsim.show.plan_words import at_load, load, load_axis, middle, stated
from arborsim.show.words import money


@dataclass(frozen=True)
class Measure:
    """Something to weigh candidates by.

    Attributes
    ----------
    title, axis : str
    value : callable
        CandidateResult -> float; NaN where it is not known.
    higher : bool
        Whether more is better.
    show : callable
        CandidateResult -> str
    """

    title: str
    axis: str
    value: Callable[[CandidateResult], float]
    higher: bool
    show: Callable[[CandidateResult], str]


def measures(result: PlanResult) -> tuple[Measure | None, Measure | None, Measure]:
    """Cost, quality and latency; None for what is not known, or the same for all candidates.

    Without prices the largest load stands for the cost.  Quality is the accuracy of live runs where
    every candidate has one, else attention kept, else the share of tokens that is never evicted.
    """
    rows = result.met()
    return _cost(result), _quality(rows), _latency(result)


def _cost(result: PlanResult) -> Measure | None:
    def cost(row: CandidateResult) -> float:
        return middle(compared_cost(row))

    def largest(row: CandidateResult) -> float:
        return math.nan if row.largest is None else row.largest

    if any(not math.isnan(cost(row)) for row in result.met()):
        axis = f"cost of 1,000 searches{at_load(result)} ({result.currency})"
        return Measure("cost", axis, cost, False, lambda row: (
            f"{money(compared_cost(row), result.currency)} per 1,000 searches"
        ))  # fmt: skip
    axis = f"largest {load_axis(result)}"
    return Measure("load", axis, largest, True, lambda row: load(row.largest, result.unit))


def _quality(rows: Sequence[CandidateResult]) -> Measure | None:
    def accuracy(row: CandidateResult) -> float:
        known = row.quality and row.quality.accuracy
        return 100 * known.value if known else math.nan

    def kept(row: CandidateResult) -> float:
        known = row.quality.attention_kept if row.quality else None
        return math.nan if known is None else 100 * known

    def whole(row: CandidateResult) -> float:
        return 100 * max(0.0, 1 - row.quality.evicted) if row.quality else math.nan

    for title, axis, value in (
        ("accuracy", "accuracy of live runs (%)", accuracy),
        ("attention kept", "attention kept (%)", kept),
        ("tokens never evicted", "tokens never evicted (%)", whole),
    ):
        if rows and not any(math.isnan(value(row)) for row in rows):
            if len({value(row) for row in rows}) == 1:
                return None  # nothing to weigh
            return _share(title, axis, value)
    return None


def _share(title: str, axis: str, value: Callable[[CandidateResult], float]) -> Measure:
    return Measure(title, axis, value, True, lambda row: f"{title} {value(row):.1f} %")


def _latency(result: PlanResult) -> Measure:
    """In a fleet for the stated load where it is known of every candidate, else alone."""
    rows = result.met()
    rank = f"{result.percentile:g}"
    served = bool(rows) and all(row.at_stated is not None for row in rows)

    def at_stated(row: CandidateResult) -> float:
        return math.nan if row.at_stated is None else row.at_stated.at_percentile.value

    def alone(row: CandidateResult) -> float:
        return math.nan if row.alone is None else row.alone.at_percentile_s

    value = at_stated if served else alone
    where = "alone"
    if served and result.stated_load is not None:
        where = f"in a fleet for {stated(result)}"
    return Measure(
        "latency", f"time per search {where}, {rank}th percentile (s)", value, False,
        lambda row: f"{quantity('seconds', value(row))} {where}",
    )  # fmt: skip
