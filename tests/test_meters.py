"""Attention kept, measured row by row, on dense and sparse rows, chains and trees."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.errors import BudgetInfeasible
from arborsim.core.observations import Signal
from arborsim.core.tiers import Tier
from arborsim.policies.registry import build
from arborsim.run.controller import Controller
from arborsim.run.meters import AttentionKept
from arborsim.trace.episode import play
from arborsim.trace.reader import TraceReader
from tests.helpers.plain_executor import PlainExecutor, decide_all
from tests.helpers.traces import make_trace


@pytest.mark.parametrize("attention", ["dense", "sparse"])
@settings(max_examples=15)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["linear", "tree"]),
    policy=st.sampled_from(["streaming-llm", "h2o", "hierarchy"]),
    share=st.floats(0.2, 0.9),
)
def test_kept_is_what_a_plain_sum_says(
    attention: str,
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    kind: str,
    policy: str,
    share: float,
) -> None:
    path = make_trace(
        tmp_path_factory.mktemp("m") / "x.parquet", seed=seed, episodes=1, kind=kind, prompt=9,
        nodes=10, block=(2, 9), attention=attention, attention_top=4,
    )  # fmt: skip
    episode = next(iter(TraceReader(path).episodes([Signal.ATTENTION])))
    budget = max(4, int(share * episode.num_tokens))
    settings_ = {"recent": "2", "interval": "4"} if policy == "hierarchy" else {}
    meter, made = AttentionKept(), build(policy, settings_)
    controller = Controller(
        made, PlainExecutor(), budget_tokens=budget, layers=6, vocabulary=128, meters=[meter]
    )
    try:
        controller.run(play(episode))
        after, _ = decide_all(made, episode, budget, 1)  # tiers after every event
    except BudgetInfeasible:
        return
    assert meter.share == pytest.approx(literal(episode, after), abs=1e-9)


def literal(episode, after) -> float:  # type: ignore[no-untyped-def]
    """Every generated token's row against the tiers that held when it was decoded."""
    node = episode.node[episode.token_rows].tolist()
    parent = dict(zip(episode.node.tolist(), episode.parent.tolist(), strict=True))
    own: dict[int, list[int]] = {}
    kept = []
    born = 0
    before: list[int] = []
    for tiers in after:
        for t in range(born, len(tiers)):
            own.setdefault(node[t], []).append(t)
            if node[t] == 0:
                continue
            chain, up = [], node[t]
            while up >= 0:
                chain, up = own.get(up, []) + chain, parent[up]
            row = episode.attention.row(t)
            assert len(row) == len(chain)
            gone = [i < len(before) and before[i] == Tier.EVICTED for i in chain]
            kept.append(1.0 - math.fsum(w for w, g in zip(row.tolist(), gone, strict=True) if g))
        born, before = len(tiers), tiers
    return float(np.mean(kept))
