"""Attention kept, measured row by row, on dense and sparse rows, chains and trees."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim import replay
from arborsim.core.errors import BudgetInfeasible, TraceError
from arborsim.core.observations import Signal
from arborsim.core.tiers import Tier
from arborsim.play.controller import Controller
from arborsim.play.meters import AttentionKept
from arborsim.policies.registry import build
from arborsim.trace.episode import play
from arborsim.trace.reader import TraceReader
from tests.helpers.plain_executor import PlainExecutor, decide_all
from tests.helpers.traces import make_trace


@pytest.mark.parametrize("attention", ["dense", "sparse"])
@settings(max_examples=15)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["linear", "tree"]),
    policy=st.sampled_from(["streaming-llm", "thinkv", "hierarchy"]),
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
    """Invariant 10: the share is a plain sum, and in [0, 1]."""
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
    assert 0 <= meter.share <= 1


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
            lost = math.fsum(w for w, g in zip(row.tolist(), gone, strict=True) if g)
            kept.append(1.0 - lost / math.fsum(row.tolist()))
        born, before = len(tiers), tiers
    return float(np.mean(kept))


FIELD = Path(__file__).parents[2] / "shared" / "data" / "field" / "rows"


@pytest.mark.skipif(not FIELD.is_dir(), reason="the field's cases are not here")
@pytest.mark.parametrize("name", ["sum_ones", "sum_zeros"])
def test_rows_that_are_no_distributions_are_refused(name: str) -> None:
    """Three of four rows are all ones, or all zeros."""
    with pytest.raises(TraceError, match=f"{name}.parquet: episode 0, row 1: attention sums to"):
        replay(FIELD / f"{name}.parquet", policies="streaming-llm", budgets=0.3)


@pytest.mark.skipif(not FIELD.is_dir(), reason="the field's cases are not here")
def test_rows_that_are_distributions_are_measured() -> None:
    found = replay(FIELD / "sum_ok.parquet", policies="streaming-llm", budgets=0.3).summary()
    kept = found.set_index("policy")["attention_kept"]
    assert kept["streaming-llm"] == pytest.approx(0.631, abs=5e-4)


@pytest.mark.parametrize("scale", [0.93, 1.07])
@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_what_rows_sum_to_does_not_matter(attention: str, scale: float, tmp_path: Path) -> None:
    """Rounded rows are off by less: all of them off alike change no share of attention."""
    path = make_trace(
        tmp_path / "x.parquet", seed=3, episodes=1, kind="tree", prompt=9, nodes=10, block=(2, 9),
        attention=attention, attention_top=4,
    )  # fmt: skip
    episode = next(iter(TraceReader(path).episodes([Signal.ATTENTION])))
    rows = episode.attention
    if attention == "dense":
        other = dataclasses.replace(rows, values=rows.values * scale, sums=None)
    else:
        other = dataclasses.replace(
            rows, value=rows.value * scale, rest=rows.rest * scale, sums=None
        )
    kept = []
    for each in (rows, other):
        meter = AttentionKept()
        made = build("streaming-llm", {})
        Controller(
            made, PlainExecutor(), budget_tokens=20, layers=6, vocabulary=128, meters=[meter]
        ).run(play(dataclasses.replace(episode, attention=each)))
        kept.append(meter.share)
    assert 0.1 < kept[0] < 0.99
    assert kept[1] == pytest.approx(kept[0], abs=1e-3 if attention == "sparse" else 1e-12)
