"""Figures that docs/decisions.md quotes are those of the shipped traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from arborsim.meters import AttentionKept
from arborsim.policies.oracle import Oracle
from arborsim.replay_episode import foresee
from arborsim.signals.observations import Signal
from arborsim.signals.refresh import median
from arborsim.trace import offline
from arborsim.trace.episode import Episode
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Kind
from tests.policies.test_offline_bound import kept_share

ROOT = Path(__file__).parents[1]
DECISIONS = " ".join((ROOT / "docs" / "decisions.md").read_text().split())


def first_search(trace: str) -> Episode:
    reader = TraceReader(ROOT / "traces" / f"{trace}.parquet")
    return next(iter(reader.episodes((Signal.ATTENTION,), stop=1)))


def refreshes_all(episode: Episode) -> float:
    """Share of generated tokens that pay no earlier one less than RaaS's median."""
    assert episode.attention is not None
    prompt = int(np.count_nonzero(episode.kind == Kind.PREFILL))
    rows = (episode.attention.row(i)[prompt:] for i in range(prompt, episode.num_tokens))
    return float(np.mean([(row >= median(row)).all() for row in rows if len(row) > 1]))


@pytest.mark.parametrize(
    ("trace", "quoted"),
    [("chain-linear", "this is so for 94% of the rows"), ("chain-tree", "in that of `chain-tree` (64) for 97%")],
)
def test_sparse_rows_refresh_every_token_of_raas(trace: str, quoted: str) -> None:
    assert f"{refreshes_all(first_search(trace)):.0%}" in quoted
    assert quoted in DECISIONS
