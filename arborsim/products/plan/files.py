"""A plan's files: its results, and the log of finished candidates.

Results are a data frame or JSON; names carry their units, and the same plan gives the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.core import documents
from arborsim.core.documents import RecordLog, plain, strict
from arborsim.core.errors import UsageError
from arborsim.products.plan.provenance import settings_of
from arborsim.products.plan.results import CandidateResult, LoadPoint, PlanResult
from arborsim.products.plan.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

#: Records whose fields become columns.
_GROUPS = ("quality", "alone", "pool", "at_largest", "fleet", "evidence")
_LEFT_OUT = ("curve", "largest_by_seed", "at_stated")


def to_frame(plan: PlanResult) -> pd.DataFrame:
    """One row per candidate; what is not known is missing."""
    import pandas as pd

    found = [candidate_row(candidate, plan) for candidate in plan.candidates]
    names = dict.fromkeys(name for row in found for name in row)
    # All rows have all names: pandas would make NaN of what is missing, whatever its type.
    return pd.DataFrame([{name: row.get(name) for name in names} for row in found])


def candidate_row(candidate: CandidateResult, plan: PlanResult) -> dict[str, Any]:
    """The fields of a candidate and of its records as columns; those it lacks are left out."""
    row: dict[str, Any] = {"recommended": candidate.number == plan.recommendation.candidate}
    for name, value in strict(candidate).items():
        if name not in _LEFT_OUT and not (value is None and name in _GROUPS):
            _spread(row, "", value if name == "at_largest" else {name: value})
    row["largest_by_seed"] = " ".join(repr(load) for load in candidate.largest_by_seed)
    return row


def point_row(point: LoadPoint | None) -> dict[str, Any]:
    """The figures of one load as columns; none where there is no load."""
    row: dict[str, Any] = {}
    _spread(row, "", strict(point) if point else {})
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


def fingerprint(workload: Workload, growth: Mapping[tuple[str, str], float] | None = None) -> str:
    """A digest of everything that a candidate's result depends on.

    `growth` is how much longer answers are under a policy and budget (`Planner.growth`).
    """
    moments = getattr(workload.arrivals, "moments_s", ())
    # Where a log was imported to is another folder in every process.
    plain = tuple(
        replace(each, source=each.log) if each.log is not None else each for each in workload.mix
    )
    everything = [repr(replace(workload, mix=plain)), repr(settings_of(workload)), repr(moments)]
    everything += [repr(sorted(growth.items()))] if growth else []
    return hashlib.sha256("\n".join(everything).encode()).hexdigest()


class PlanLog(RecordLog[CandidateResult]):
    """The log of one workload's plan."""

    def __init__(
        self, path: Path, workload: Workload, growth: Mapping[tuple[str, str], float] | None = None
    ) -> None:
        super().__init__(path, CandidateResult, _LOG_FORMAT, _LOG_VERSION)
        self._plan = fingerprint(workload, growth)
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
