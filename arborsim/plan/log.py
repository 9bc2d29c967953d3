"""Logs that a plan keeps of its finished candidates, and reads of live runs."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.core.record_log import RecordLog
from arborsim.core.statistics import clopper_pearson
from arborsim.plan.provenance import settings_of
from arborsim.plan.results import CandidateResult
from arborsim.plan.statistics import Estimate
from arborsim.plan.workload import Workload

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
    right: dict[tuple[str, str], int] = defaultdict(int)
    judged: dict[tuple[str, str], int] = defaultdict(int)
    for path in paths:
        for policy, budget, correct in _results(path):
            right[policy, budget] += correct
            judged[policy, budget] += 1
    found = {}
    for key, n in judged.items():
        low, high = clopper_pearson(right[key], n)
        found[key] = Estimate(right[key] / n, low, high, n)
    return found


def _results(path: Path) -> list[tuple[str, str, bool]]:
    """Policy, budget, and whether the answer is right, of each judged search of a log."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"--accuracy {path}: cannot read: {reason}") from None
    found = []
    try:
        head = json.loads(lines[0])
        if head.get("format") != "arborsim-live":
            raise ValueError("not one")
        shadow = bool(head["request"].get("shadow"))
        for line in lines[1:-1]:  # what follows the last line's end may be torn
            result = json.loads(line)
            correct, infeasible = result["correct"], bool(result.get("infeasible"))
            if correct is not None or infeasible:
                budget = "-" if result["budget"] in ("", "any", "-") else str(result["budget"])
                found.append((str(result["policy"]), budget, bool(correct)))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UsageError(
            f"--accuracy {path}: this is no log of arborsim live (--out of that command)"
        ) from None
    if shadow:
        raise UsageError(
            f"--accuracy {path}: nothing was removed in a shadow run, so it does not say what a "
            "policy does to answers; run arborsim live without --shadow"
        )
    return found
