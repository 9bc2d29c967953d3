"""The candidates that a plan has finished: a log that survives an interruption."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.core.record_log import RecordLog
from arborsim.plan.provenance import settings_of
from arborsim.plan.results import CandidateResult
from arborsim.plan.workload import Workload

FORMAT, VERSION = "arborsim-plan", 1


def fingerprint(workload: Workload) -> str:
    """A digest of everything that a candidate's result depends on."""
    moments = getattr(workload.arrivals, "moments_s", ())
    everything = [repr(workload), repr(settings_of(workload)), repr(moments)]
    return hashlib.sha256("\n".join(everything).encode()).hexdigest()


class PlanLog(RecordLog[CandidateResult]):
    """The log of one workload's plan.

    Parameters
    ----------
    path : Path
    workload : Workload
    """

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
