"""A plan as a data frame, and as JSON: names carry their units, the same plan the same bytes."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.core.documents import strict
from arborsim.core.errors import UnknownName, UsageError
from arborsim.plan.results import CandidateResult, PlanResult

if TYPE_CHECKING:
    import pandas as pd

FORMATS = (".parquet", ".json", ".csv")
_GROUPS = ("quality", "alone", "pool", "at_largest", "fleet")  # their fields become columns
_LEFT_OUT = ("curve", "largest_by_seed", "at_stated")


def rows(plan: PlanResult) -> list[dict[str, Any]]:
    """One flat record per candidate, all with the same keys; what is not known is None."""
    found = [_flat(candidate, plan) for candidate in plan.candidates]
    names = list(dict.fromkeys(name for row in found for name in row))
    return [{name: row.get(name) for name in names} for row in found]


def _flat(candidate: CandidateResult, plan: PlanResult) -> dict[str, Any]:
    row: dict[str, Any] = {"recommended": candidate.number == plan.recommendation.candidate}
    for each in fields(candidate):
        value = getattr(candidate, each.name)
        if each.name in _LEFT_OUT or (value is None and each.name in _GROUPS):
            continue
        if each.name in _GROUPS:
            prefix = "" if each.name == "at_largest" else f"{each.name}_"
            _spread(row, prefix, asdict(value))
        else:
            _spread(row, "", {each.name: asdict(value) if each.name == "spread" and value else
                              value})  # fmt: skip
    row["largest_by_seed"] = " ".join(repr(load) for load in candidate.largest_by_seed)
    return row


def _spread(row: dict[str, Any], prefix: str, values: dict[str, Any]) -> None:
    """Nested records become names with underscores, ranges the names of their ends."""
    for name, value in values.items():
        if isinstance(value, dict):
            _spread(row, f"{prefix}{name}_", value)
        elif isinstance(value, tuple | list):
            ends = ("low", "high") if len(value) == 2 else range(len(value))
            _spread(row, f"{prefix}{name}_", dict(zip(map(str, ends), value, strict=True)))
        else:
            row[f"{prefix}{name}"] = strict(value)


def to_frame(plan: PlanResult) -> pd.DataFrame:
    """One row per candidate (`rows`)."""
    import pandas as pd

    return pd.DataFrame(rows(plan))


def to_json(plan: PlanResult) -> str:
    """Everything but the timeline, as strict JSON (unknown numbers are null)."""
    document = {name: value for name, value in asdict(plan).items() if name != "timeline"}
    return json.dumps(strict(document), indent=2, sort_keys=True, allow_nan=False)


def check_format(path: Path) -> None:
    """Refuse a name from which no format follows."""
    if path.suffix not in FORMATS:
        raise UnknownName("format of --out", path.suffix or path.name, FORMATS)


def write(plan: PlanResult, path: Path) -> None:
    """In the format that the name ends with.

    Raises
    ------
    UsageError
        It cannot be written.
    """
    check_format(path)
    try:
        if path.suffix == ".json":
            path.write_text(to_json(plan) + "\n", encoding="utf-8")
        elif path.suffix == ".csv":
            to_frame(plan).to_csv(path, index=False)
        else:
            to_frame(plan).to_parquet(path, index=False)
    except OSError as error:
        raise UsageError(f"--out {path}: cannot write: {error.strerror}") from None
