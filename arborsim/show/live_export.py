"""A live run's results as one record and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from arborsim.core.documents import strict
from arborsim.core.measurements import TimeSplit
from arborsim.live.log import describe
from arborsim.live.request import LiveFacts, LiveRequest, LiveResult
from arborsim.show.live_rows import LiveReport, LiveRow, cautions, live_rows

if TYPE_CHECKING:
    import pandas as pd


def make_report(
    request: LiveRequest, facts: LiveFacts, results: tuple[LiveResult, ...]
) -> LiveReport:
    """The results with what they rest on; in the order of problems, then of the request's cells."""
    order = {(c.policy.name, c.budget.text): i for i, c in enumerate(request.cells)}
    sort = sorted(results, key=lambda r: (r.episode, order.get((r.policy, r.budget), len(order))))
    return LiveReport(
        facts=facts,
        results=tuple(sort),
        request=describe(request),
        command=request.command,
        shadow=request.shadow,
        unbounded=frozenset(c.policy.name for c in request.cells if not c.policy.bounded),
    )


def live_json(report: LiveReport) -> str:
    """Facts, request, rows and searches as strict JSON (unknown numbers are null)."""
    rows = live_rows(report)
    document = {
        "facts": asdict(report.facts),
        "request": report.request,
        "command": report.command,
        "shadow": report.shadow,
        "rows": [_row(row) for row in rows],
        "results": [flat(result) for result in report.results],
        "notes": cautions(report, rows),
    }
    return json.dumps(strict(document), indent=2, sort_keys=True, allow_nan=False)


def _row(row: LiveRow) -> dict[str, Any]:
    found = asdict(row)
    inner = found.pop("row")
    for silent in ("trace", "relative", "oracle_gap", "attention_kept", "output_error"):
        inner.pop(silent)
    derived = ("accuracy", "total_s", "other_s", "tokens_per_s")
    return {**inner, **found, **{name: getattr(row, name) for name in derived}}


def flat(result: LiveResult) -> dict[str, Any]:
    """One search as a flat record; names carry their units."""
    measured = result.measured
    own = [f.name for f in fields(result) if f.name != "measured"]
    names = [f.name for f in fields(measured) if f.name not in ("time", "series")]
    return {
        **{name: getattr(result, name) for name in own},
        **{name: getattr(measured, name) for name in names},
        **{part.name: getattr(measured.time, part.name) for part in fields(TimeSplit)},
    }


def to_frame(report: LiveReport) -> pd.DataFrame:
    """One row per search."""
    import pandas as pd

    return pd.DataFrame([flat(result) for result in report.results])
