"""Results as a data frame and as JSON: names carry their units, the same result the same bytes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from arborsim.core.documents import strict
from arborsim.core.measurements import Measurements, TimeSplit
from arborsim.run.aggregate import aggregate, oracles
from arborsim.run.results import EpisodeResult, ReplayResult

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
    names = [f.name for f in fields(measured) if f.name not in ("time", "series")]
    return {
        "trace": result.trace,
        "episode": result.episode,
        "policy": result.policy,
        "budget": result.budget,
        "budget_tokens": result.budget_tokens,
        **{name: getattr(measured, name) for name in names},
        **{part.name: getattr(measured.time, part.name) for part in fields(TimeSplit)},
        "total_s": measured.time.total_s,
        "tokens_per_s": measured.tokens_per_s,
        "attention_kept": result.attention_kept,
        "oracle_gap": bound - result.attention_kept,
        "output_error": result.output_error,
        "bounded": result.bounded,
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
    return json.dumps(strict(document), indent=2, sort_keys=True, allow_nan=False)
