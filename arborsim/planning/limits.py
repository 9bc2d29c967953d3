"""What runs out first on a machine under load: space for searches, or time.

Space (HBM, host memory, the allowed number of searches) limits how many searches have a place at a
time; it is full at peaks long before it is full on average.  Time (of compute, HBM bandwidth and
PCIe) limits how fast those that have a place go on.  Both have shares between 0 and 1, but a share
of space says nothing about a share of time, so what runs out is not simply the larger one.
"""

from __future__ import annotations

from dataclasses import replace

from arborsim.planning.runs import Run
from arborsim.serving.report import ServingReport, Utilisation

SPACE = ("hbm", "host", "searches")
TIME = ("compute", "memory", "pcie_down", "pcie_up")
#: Space counts as having run out if searches are without a place for at least this share of their
#: time, or lose a place at least so often per search.  A single burst in a long run does not.
WAITING = 0.01


def runs_out(run: Run) -> str:
    """What there is too little of first: a name of `SPACE` or `TIME`.

    It is the space that kept somebody waiting first, if waiting matters (`WAITING`); else what is
    in use for the largest share of the time (`used_shares`).
    """
    report = run.report
    if report.first_s and _waits(run):
        return min(report.first_s, key=lambda name: report.first_s[name])
    used = used_shares(report)
    return max(TIME, key=lambda name: float(getattr(used, name)))


def _waits(run: Run) -> bool:
    """By Little's law the mean numbers of searches are as their mean times."""
    there = run.queue + run.concurrency
    measured = len(run.arrival_s) + run.refused
    return run.queue >= WAITING * there > 0 or run.preemptions >= WAITING * measured > 0


def used_shares(report: ServingReport) -> Utilisation:
    """The report's shares, with prompts and recomputed tokens as time of computing.

    They are passes of their own between decode iterations, and computing bounds them.
    """
    if not report.total_s:
        return report.used
    passes = (report.busy.prefill_s + report.busy.recompute_s) / report.total_s
    return replace(report.used, compute=report.used.compute + passes)
