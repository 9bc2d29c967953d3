"""Logs that a plan keeps of its finished candidates, and reads of live runs."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from arborsim.core.documents import RecordLog
from arborsim.core.errors import UsageError
from arborsim.core.records import located
from arborsim.core.statistics import clopper_pearson
from arborsim.live import log as live
from arborsim.live.request import LiveResult
from arborsim.plan.provenance import settings_of
from arborsim.plan.results import CandidateResult
from arborsim.plan.statistics import Estimate
from arborsim.plan.workload import Workload
from arborsim.run.results import ANY

FORMAT, VERSION = "arborsim-plan", 1


def fingerprint(workload: Workload) -> str:
    """A digest of everything that a candidate's result depends on."""
    moments = getattr(workload.arrivals, "moments_s", ())
    everything = [repr(workload), repr(settings_of(workload)), repr(moments)]
    return hashlib.sha256("\n".join(everything).encode()).hexdigest()


class PlanLog(RecordLog[CandidateResult]):
    """The log of one workload's plan."""

    def __init__(self, path: Path, workload: Workload) -> None:
        super().__init__(path, CandidateResult, FORMAT, VERSION)
        self._plan = fingerprint(workload)
        self._held: set[int] = set()

    def resume(self) -> dict[int, CandidateResult]:
        """The candidates that an interrupted plan has finished, by number.

        Raises
        ------
        UsageError
            There is no such file, it is damaged, or it is of another plan.
        """
        if not self.path.exists():
            raise UsageError(
                f"--resume: there is no {self.path}: nothing was interrupted there after a "
                "candidate was finished; run without --resume"
            )
        head = self.read()
        if head and head.get("plan") != self._plan:
            raise UsageError(
                f"--resume: {self.path} is of another workload or version of arborsim: delete it"
            )
        self._held = {result.number for result in self.records}
        return {result.number: result for result in self.records}

    def add(self, record: Any) -> None:
        """Append the head or a candidate, unless the log holds it already."""
        if isinstance(record, CandidateResult):
            if record.number in self._held:
                return
            self._held.add(record.number)
        super().add(record)

    def write(self, results: Iterable[CandidateResult]) -> None:
        """Open the log, if it is not open yet, and add these candidates."""
        if not self.is_open:
            self.open({"plan": self._plan})
        for result in results:
            self.add(result)


def read_accuracies(paths: Iterable[Path]) -> dict[tuple[str, str], Estimate]:
    """Accuracy by policy and budget, of all logs together.

    Parameters
    ----------
    paths : iterable of Path
        What ``arborsim live --out`` wrote.

    Returns
    -------
    dict
        (policy, budget) to the share of judged answers that are right, with Clopper and Pearson's
        95% interval.  The budget of a policy that ignores budgets is "-".  Searches that a budget
        could not hold count as wrong.

    Raises
    ------
    UsageError
        A file cannot be read or is no such log.
    """
    verdicts: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for path in paths:
        with located("--accuracy"):
            for result in _results(path):
                if result.correct is not None or result.infeasible:
                    budget = "-" if result.budget in ("", ANY, "-") else result.budget
                    verdicts[result.policy, budget].append(bool(result.correct))
    found = {}
    for key, right in verdicts.items():
        ends = clopper_pearson(sum(right), len(right))
        found[key] = Estimate(sum(right) / len(right), *ends, len(right))
    return found


def _results(path: Path) -> list[LiveResult]:
    log = RecordLog(path, LiveResult, live.FORMAT, live.VERSION)
    if log.read().get("request", {}).get("shadow"):
        raise UsageError(
            f"{path}: nothing was removed in a shadow run, so it does not say what a policy does "
            "to answers; run arborsim live without --shadow"
        )
    return log.records
