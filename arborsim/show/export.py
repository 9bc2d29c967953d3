"""Replays and live runs for other programs: data frames and JSON, in which nothing is rounded.

Names carry their units, and the same result gives the same bytes.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from arborsim.core.documents import strict
from arborsim.core.measurements import Measurements, TimeSplit
from arborsim.live.request import LiveResult
from arborsim.run.results import EpisodeResult, ReplayResult, aggregate, oracles
from arborsim.show.live_rows import LiveReport, LiveRow, live_rows
from arborsim.show.live_words import cautions

if TYPE_CHECKING:
    import pandas as pd

_NOTHING = EpisodeResult("", 0, "", "", 0, Measurements(), math.nan)  # for its column names


def to_frame(result: ReplayResult) -> pd.DataFrame:
    """One row per search, policy and budget; names carry their units.

    Returns
    -------
    pandas.DataFrame
        In the order of `result.episodes`.
    """
    import pandas as pd

    columns = None if result.episodes else list(_flat(_NOTHING, {}))
    bounds = oracles(result.episodes)
    return pd.DataFrame([_flat(episode, bounds) for episode in result.episodes], columns=columns)


def _flat(result: EpisodeResult, bounds: dict[tuple[str, int, str], float]) -> dict[str, Any]:
    measured = result.measured
    bound = bounds.get((result.trace, result.episode, result.budget), math.nan)
    return {
        "trace": result.trace,
        "episode": result.episode,
        "policy": result.policy,
        "budget": result.budget,
        "budget_tokens": result.budget_tokens,
        **_measured(measured),
        "total_s": measured.time.total_s,
        "tokens_per_s": measured.tokens_per_s,
        "attention_kept": result.attention_kept,
        "oracle_gap": bound - result.attention_kept,
        "output_error": result.output_error,
        "bounded": result.bounded,
    }


def _measured(measured: Measurements) -> dict[str, Any]:
    """What was counted, and the parts of the time."""
    names = [f.name for f in fields(measured) if f.name not in ("time", "series")]
    return {
        **{name: getattr(measured, name) for name in names},
        **{part.name: getattr(measured.time, part.name) for part in fields(TimeSplit)},
    }


def to_json(result: ReplayResult) -> str:
    """Settings, aggregated rows and searches as strict JSON (unknown numbers are null).

    The same result gives the same bytes.
    """
    bounds = oracles(result.episodes)
    document = {
        "settings": result.settings,
        "assumed": list(result.assumed),
        "rows": [
            {**asdict(row), "moved_bytes": row.moved_bytes, "tokens_per_s": row.tokens_per_s,
             "total_s": row.time.total_s}
            for row in aggregate(result.episodes)
        ],
        "episodes": [_flat(episode, bounds) for episode in result.episodes],
        "notes": list(result.notes),
        "does_not_fit": list(result.does_not_fit),
        "left_out": [asdict(policy) for policy in result.left_out],
    }  # fmt: skip
    return _json(document)


def _json(document: Any) -> str:
    """Strict JSON: unknown numbers are null."""
    return json.dumps(strict(document), indent=2, sort_keys=True, allow_nan=False)


def live_json(report: LiveReport) -> str:
    """Facts, request, rows and searches as strict JSON (unknown numbers are null)."""
    rows = live_rows(report)
    document = {
        "facts": asdict(report.facts),
        "request": report.request,
        "command": report.command,
        "shadow": report.shadow,
        "rows": [_live_row(row) for row in rows],
        "results": [flat(result) for result in report.results],
        "notes": cautions(report, rows),
    }
    return _json(document)


def _live_row(row: LiveRow) -> dict[str, Any]:
    found = asdict(row)
    inner = found.pop("row")
    for silent in ("trace", "relative", "oracle_gap", "attention_kept", "output_error"):
        inner.pop(silent)
    derived = ("accuracy", "total_s", "other_s", "tokens_per_s")
    return {**inner, **found, **{name: getattr(row, name) for name in derived}}


def flat(result: LiveResult) -> dict[str, Any]:
    """One search as a flat record; names carry their units."""
    own = [f.name for f in fields(result) if f.name != "measured"]
    return {**{name: getattr(result, name) for name in own}, **_measured(result.measured)}


def live_frame(report: LiveReport) -> pd.DataFrame:
    """One row per search."""
    import pandas as pd

    return pd.DataFrame([flat(result) for result in report.results])
