"""What runs out first on a machine under load: space for searches, or time.

Space (HBM, host memory, the allowed number of searches) limits how many searches have a place at a
time; it is full at peaks long before it is full on average.  Time (of compute, HBM bandwidth and
PCIe) limits how fast those that have a place go on.  Both have shares between 0 and 1, but a share
of space says nothing about a share of time, so what runs out is not simply the larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from arborsim.machine.report import ServingReport, Utilisation
from arborsim.plan.runs import Run

SPACE = ("hbm", "host", "searches")
TIME = ("compute", "memory", "pcie_down", "pcie_up")
#: Space counts as having run out if searches are without a place for at least this share of their
#: time, or lose a place at least so often per search.  A single burst in a long run does not.
WAITING = 0.01


def runs_out(runs: Sequence[Run]) -> str:
    """What there is too little of first, over all runs of a load: a name of `SPACE` or `TIME`.

    It is the space that kept somebody waiting first, if waiting matters (`WAITING`); else what is
    in use for the largest share of the time (`mean_shares`).
    """
    lacking = {name for run in runs for name in run.report.first_s}
    if lacking and _wait(runs):
        return min(sorted(lacking), key=lambda name: _first_s(name, runs))
    used = mean_shares(runs)
    return max(TIME, key=lambda name: float(getattr(used, name)))


def _wait(runs: Sequence[Run]) -> bool:
    """Whether waiting matters; by Little's law, mean numbers of searches are as mean times."""
    queue = sum(run.queue for run in runs)
    there = queue + sum(run.concurrency for run in runs)
    preemptions = sum(run.preemptions for run in runs)
    measured = sum(len(run.arrival_s) + run.refused for run in runs)
    return queue >= WAITING * there > 0 or preemptions >= WAITING * measured > 0


def _first_s(name: str, runs: Sequence[Run]) -> float:
    """When it ran out, summed over the runs; where it did not, the run's end."""
    return sum(run.report.first_s.get(name, run.report.total_s) for run in runs)


def mean_shares(runs: Sequence[Run]) -> Utilisation:
    """`used_shares`: the mean over runs."""
    each = [used_shares(run.report) for run in runs]
    names = [field.name for field in fields(Utilisation)]
    return Utilisation(*(float(np.mean([getattr(one, name) for one in each])) for name in names))


def used_shares(report: ServingReport) -> Utilisation:
    """The report's shares, with prompts and recomputed tokens as time of computing.

    They are passes of their own between decode iterations, and computing bounds them.
    """
    if not report.total_s:
        return report.used
    passes = (report.busy.prefill_s + report.busy.recompute_s) / report.total_s
    return replace(report.used, compute=report.used.compute + passes)
