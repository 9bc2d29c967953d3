"""Figures that docs/decisions.md quotes are those of the shipped traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from arborsim.core.observations import Signal
from arborsim.policies.methods.baselines import Oracle
from arborsim.signals import offline
from arborsim.signals.last_attended import median
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
    """Share of generated tokens that pay no generated token less than the median (RaaS).

    Of those that see three or more: of two, the lower is the median.
    """
    assert episode.attention is not None
    prompt = int(np.count_nonzero(episode.kind == Kind.PREFILL))
    rows = (episode.attention.row(i)[prompt:] for i in range(prompt, episode.num_tokens))
    return float(np.mean([(row >= median(row)).all() for row in rows if len(row) > 2]))


def test_sparse_rows_refresh_every_token_of_raas() -> None:
    linear, tree = (refreshes_all(first_search(name)) for name in ("chain-linear", "chain-tree"))
    quoted = (
        f"In the first search of `chain-linear` (160 positions listed) this is so for {linear:.0%} "
        f"of the rows, in that of `chain-tree` (64) for {tree:.0%}"
    )
    assert quoted in DECISIONS
    assert refreshes_all(first_search("game24-tot")) == 0
    assert refreshes_all(first_search("chain-vectors")) == 0


def test_what_the_rule_of_belady_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    episode = first_search("chain-linear")
    assert episode.num_tokens == 1543

    def kept(share: float) -> str:
        return f"{kept_share(Oracle(), episode, int(share * 1543)):.1%}"

    best = kept(0.3), kept(0.5)
    monkeypatch.setattr(offline, "EXACT_CELLS", 0)
    quoted = (
        f"keeps {kept(0.3)} of the attention with 30% of the tokens, where the optimum keeps "
        f"{best[0]}, and {kept(0.5)} with 50%, where the optimum keeps {best[1]}"
    )
    assert quoted in DECISIONS
