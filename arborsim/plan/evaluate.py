"""One candidate: whether it fits, the largest load that meets the target, and figures there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.plan.alone import (
    served_alone,
    too_large,
    too_many_refused,
    too_slow_alone,
    weights_too_large,
)
from arborsim.plan.demands import Variant, VariantDemands, drawn
from arborsim.plan.largest import LargestLoad
from arborsim.plan.results import INFEASIBLE, MISSED, UNFIT, CandidateResult
from arborsim.plan.runs import Bench
from arborsim.plan.statistics import Estimate, solved_share
from arborsim.plan.workload import Hardware, Workload
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Kind


def evaluate(
    workload: Workload, hardware: Hardware, found: VariantDemands, number: int = 0
) -> CandidateResult:
    """Find the largest load of one candidate.

    Parameters
    ----------
    workload : Workload
    hardware : Hardware
        Need not be one of the workload's.
    found : VariantDemands
        The demands of the workload's searches under the candidate's variant.
    number : int
        The candidate's place in a plan.
    """
    result = _without(hardware, found.variant, number, INFEASIBLE, found.infeasible)
    if found.infeasible:
        return result
    try:
        bench = Bench(workload, hardware, found)
    except UsageError:
        return replace(result, status=UNFIT, reason=too_large(workload, hardware, found))
    result = replace(
        result, pool=bench.engine.pool, quality=found.quality(_draw_counts(workload, found))
    )
    if why := too_many_refused(workload, bench):
        return replace(result, status=UNFIT, reason=why)
    alone, meets = served_alone(workload, bench)
    result = replace(result, alone=alone)
    if not meets:
        return replace(result, status=MISSED, reason=too_slow_alone(workload, alone))
    assert result.quality is not None
    # What dropping tokens does to answers is not known, so a solved search has no cost.
    share = solved(workload, found) if result.quality.exact else None
    return LargestLoad(workload, bench, result, share).found()


def unfit(
    workload: Workload, hardware: Hardware, variant: Variant, number: int = 0
) -> CandidateResult | None:
    """The candidate's result if not even the model's weights fit; None if they do."""
    why = weights_too_large(workload, hardware)
    return _without(hardware, variant, number, UNFIT, why) if why else None


def _without(
    hardware: Hardware, variant: Variant, number: int, status: str, reason: str
) -> CandidateResult:
    """A result without any figures."""
    return CandidateResult(
        number, hardware.name, variant.policy.name, variant.budget.text, variant.shown_recall,
        hardware.gpus, hardware.price_per_hour, status, reason,
    )  # fmt: skip


def _draw_counts(workload: Workload, found: VariantDemands) -> np.ndarray:
    """How often each recorded search is drawn in all runs; float64 ``[places]``."""
    counts = np.zeros(len(found.places))
    for seed in workload.seeds():
        counts += np.bincount(found.numbers(workload.draws(seed)), minlength=len(counts))
    return counts


def solved(workload: Workload, found: VariantDemands) -> Estimate | None:
    """Share of the mix's searches with a correct answer, as recorded."""
    verdicts = [recorded.demand.info.solved for recorded in found.recorded]
    return _share_solved(workload, found.places, verdicts)


def recorded_solved(workload: Workload, traces: Sequence[Path]) -> Estimate | None:
    """`solved`, from the traces themselves (`Workload.write_traces`)."""
    places, verdicts = drawn(workload), []
    for entry, number in places:
        (episode,) = TraceReader(traces[entry]).episodes((), start=number, stop=number + 1)
        answers = episode.correct[episode.kind == Kind.ANSWER]
        verdicts.append(int(answers[-1]) if len(answers) else -1)
    return _share_solved(workload, places, verdicts)


def _share_solved(
    workload: Workload, places: Sequence[tuple[int, int]], verdicts: Sequence[int]
) -> Estimate | None:
    right, judged = [0] * len(workload.mix), [0] * len(workload.mix)
    for (entry, _), verdict in zip(places, verdicts, strict=True):
        judged[entry] += verdict >= 0
        right[entry] += verdict == 1
    return solved_share([entry.weight for entry in workload.mix], right, judged)
