"""A plan's files: its results, the log of finished candidates, and logs of live runs.

Results are a data frame or JSON; names carry their units, and the same plan gives the same bytes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.core import documents
from arborsim.core.documents import RecordLog, plain, strict
from arborsim.core.errors import UsageError
from arborsim.core.statistics import clopper_pearson
from arborsim.play.results import ANY
from arborsim.products.plan.provenance import settings_of
from arborsim.products.plan.results import CandidateResult, PlanResult
from arborsim.products.plan.statistics import Estimate
from arborsim.products.plan.workload import Workload
from arborsim.products.replay.answers import counted_in, read_log

if TYPE_CHECKING:
    import pandas as pd

_GROUPS = (
    "quality",
    "alone",
    "pool",
    "at_largest",
    "fleet",
    "evidence",
)  # their fields become columns
_LEFT_OUT = ("curve", "largest_by_seed", "at_stated")


def to_frame(plan: PlanResult) -> pd.DataFrame:
    """One row per candidate; what is not known is missing."""
    import pandas as pd

    found = [_flat(candidate, plan) for candidate in plan.candidates]
    names = dict.fromkeys(name for row in found for name in row)
    # All rows have all names: pandas would make NaN of what is missing, whatever its type.
    return pd.DataFrame([{name: row.get(name) for name in names} for row in found])


def _flat(candidate: CandidateResult, plan: PlanResult) -> dict[str, Any]:
    row: dict[str, Any] = {"recommended": candidate.number == plan.recommendation.candidate}
    for name, value in strict(candidate).items():
        if name not in _LEFT_OUT and not (value is None and name in _GROUPS):
            _spread(row, "", value if name == "at_largest" else {name: value})
    row["largest_by_seed"] = " ".join(repr(load) for load in candidate.largest_by_seed)
    return row


def _spread(row: dict[str, Any], prefix: str, values: dict[str, Any]) -> None:
    """Nested records become names with underscores, ranges the names of their ends."""
    for name, value in values.items():
        if isinstance(value, dict):
            _spread(row, f"{prefix}{name}_", value)
        elif isinstance(value, list):
            ends = ("low", "high") if len(value) == 2 else range(len(value))
            _spread(row, f"{prefix}{name}_", dict(zip(map(str, ends), value, strict=True)))
        else:
            row[f"{prefix}{name}"] = value


def to_json(plan: PlanResult) -> str:
    """Everything but the timeline, as strict JSON (unknown numbers are null)."""
    document = plain(replace(plan, timeline=None))
    del document["timeline"]
    return documents.to_json(document)


_LOG_FORMAT, _LOG_VERSION = "arborsim-plan", 1


def fingerprint(workload: Workload) -> str:
    """A digest of everything that a candidate's result depends on."""
    moments = getattr(workload.arrivals, "moments_s", ())
    everything = [repr(workload), repr(settings_of(workload)), repr(moments)]
    return hashlib.sha256("\n".join(everything).encode()).hexdigest()


class PlanLog(RecordLog[CandidateResult]):
    """The log of one workload's plan."""

    def __init__(self, path: Path, workload: Workload) -> None:
        super().__init__(path, CandidateResult, _LOG_FORMAT, _LOG_VERSION)
        self._plan = fingerprint(workload)
        self._held: set[int] = set()

    def resume(self) -> dict[int, CandidateResult]:
        """The candidates that an interrupted plan has finished, by number; none without a file.

        Refuses a file that is damaged or of another plan.
        """
        if not self.path.exists():  # killed before a candidate was finished, or never begun
            return {}
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


def problems_of(paths: Iterable[Path]) -> str:
    """What the logs' answers are of: ``"game24 by arborsim-game24"``; "" where they do not say."""
    searched = (each.searched for path in paths for each in counted_in(path))
    names = dict.fromkeys(f"{s.task} by {s.model}" for s in searched if s.task and s.model)
    return " and ".join(names)


def read_accuracies(paths: Iterable[Path]) -> dict[tuple[str, str], Estimate]:
    """Accuracy by policy and budget, of all the logs that ``arborsim live --out`` wrote.

    That is the share of judged answers that are right, with Clopper and Pearson's 95% interval.
    The budget of a policy that ignores budgets is "-".  Searches that a budget could not hold count
    as wrong.
    """
    verdicts: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for path in paths:
        _, results = read_log(path, "--answers")
        for result in results:
            if result.correct is not None or result.infeasible:
                budget = "-" if result.budget == ANY else result.budget
                verdicts[result.policy, budget].append(bool(result.correct))
    found = {}
    for key, right in verdicts.items():
        ends = clopper_pearson(sum(right), len(right))
        found[key] = Estimate(sum(right) / len(right), *ends, len(right))
    return found
