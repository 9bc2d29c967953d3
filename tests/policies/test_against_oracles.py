"""Every policy decides what its literal re-implementation decides, token by token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.errors import BudgetInfeasible
from arborsim.policies.base import Policy
from arborsim.policies.epikv import EpiKV
from arborsim.policies.full import Full
from arborsim.policies.h2o import H2O
from arborsim.policies.hierarchy import Hierarchy
from arborsim.policies.lag_kv import LagKV
from arborsim.policies.random import Random
from arborsim.policies.streaming_llm import StreamingLLM
from arborsim.signals.observations import Signal
from arborsim.trace.episode import Episode
from arborsim.trace.reader import TraceReader
from tests.helpers.plain_executor import decide_all
from tests.helpers.slow_world import SlowWorld
from tests.helpers.traces import make_trace
from tests.policies import arbor_oracle, oracles

READ = (Signal.ATTENTION, Signal.HIDDEN_CHANGE, Signal.LAG_KEY, Signal.LAG_VALUE)

PAIRS: dict[str, tuple[Policy, Callable[[], Any]]] = {
    "full": (Full(), oracles.Nothing),
    "random": (Random(seed=5), lambda: oracles.SlowRandom(5)),
    "streaming-llm": (StreamingLLM(), oracles.SlowStreaming),
    "h2o": (H2O(), oracles.SlowH2O),
    "h2o-flat": (H2O(adaptation="flat"), lambda: oracles.SlowH2O("flat")),
    "epikv": (EpiKV(), oracles.SlowEpiKV),
    "epikv-flat": (EpiKV(adaptation="flat"), lambda: oracles.SlowEpiKV("flat")),
    "lag-kv": (LagKV(), oracles.SlowLagKV),
    "hierarchy": (
        Hierarchy(interval=4, recent=6), lambda: oracles.SlowHierarchy(interval=4, recent=6)),
    "hierarchy-of-total": (
        Hierarchy(interval=3, recent=4, evict="of-total", evict_ratio=0.2, quantised_ratio=0.5),
        lambda: oracles.SlowHierarchy(3, 4, r=0.2, total=True, quantised=0.5)),
    **arbor_oracle.PAIRS,
}  # fmt: skip


def fast(policy: Policy, episode: Episode, budget: int, steps: int | None) -> Any:
    """Tiers after every iteration and event, or the name of the error."""
    try:
        return decide_all(policy, episode, budget, steps)
    except BudgetInfeasible:
        return "infeasible"


def slow_moves(snapshots: list[list[int]]) -> list[tuple[int, int]]:
    """(token, tier) changes from snapshot to snapshot, in order of token within each."""
    changes = []
    for before, after in zip([[], *snapshots[:-1]], snapshots, strict=True):
        padded = before + [0] * (len(after) - len(before))
        changes += [(t, b) for t, (a, b) in enumerate(zip(padded, after, strict=True)) if a != b]
    return changes


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_same_decisions_as_the_literal_oracle(
    name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    policy, oracle = PAIRS[name]
    kind = data.draw(st.sampled_from(["linear", "tree"]), label="kind")
    seed = data.draw(st.integers(0, 10_000), label="seed")
    share = data.draw(st.floats(0.3, 1.0), label="share")
    path = make_trace(
        tmp_path_factory.mktemp("t") / "x.parquet", seed=seed, episodes=1, kind=kind, prompt=12,
        nodes=14, block=(2, 14),
    )  # fmt: skip
    episode = next(iter(TraceReader(path).episodes(READ)))
    budget = max(2, int(share * episode.num_tokens))
    stepwise = fast(policy, episode, budget, 1)
    runwise = fast(policy, episode, budget, None)
    assert (stepwise == "infeasible") == (runwise == "infeasible")
    if stepwise == "infeasible":
        return
    assert np.array_equal(stepwise[1], runwise[1]), "decide_run differs from decide"
    snapshots = SlowWorld(episode, budget).run(oracle())
    assert stepwise[0][-1] == snapshots[-1]
    fast_changes = [(int(t), int(to)) for _, _, t, to in stepwise[1]]
    assert sorted(fast_changes) == sorted(slow_moves(snapshots))
    assert stepwise[0] == snapshots[: len(stepwise[0])]


TRACES = Path(__file__).parents[2] / "traces"


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["game24-tot", "chain-linear", "chain-tree"])
@pytest.mark.parametrize("name", PAIRS)
def test_same_kept_sets_on_the_shipped_traces(name: str, trace: str) -> None:
    policy, oracle = PAIRS[name]
    reader = TraceReader(TRACES / f"{trace}.parquet")
    # the smallest ones, because the oracle walks them token by token
    smallest = sorted(range(reader.num_episodes), key=lambda i: reader.metadata(i).num_rows)[:3]
    for chosen in smallest:
        episode = next(iter(reader.episodes(READ, start=chosen)))
        budget = int({"game24-tot": 0.8, "chain-linear": 0.65, "chain-tree": 0.7}[trace]
                     * episode.num_tokens)  # fmt: skip
        tiers, moves = decide_all(policy, episode, budget)
        assert name == "full" or len(moves)
        assert tiers[-1] == SlowWorld(episode, budget).run(oracle())[-1]
