"""How far is the offline rule from the best that any evicting policy could do?

Whoever evicts without return loses, with every token, the attention it would have received after
that.  Evictions are best put off until they are forced, and forced evictions are slots in time; so
the least loss is an assignment of tokens to slots, which SciPy solves exactly.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from arborsim.controller import Controller
from arborsim.errors import BudgetInfeasible
from arborsim.events import Decode
from arborsim.meters import AttentionKept
from arborsim.policies.base import Policy
from arborsim.policies.h2o import H2O
from arborsim.policies.oracle import Oracle
from arborsim.signals.observations import Signal
from arborsim.trace.episode import Episode
from arborsim.trace.play import play
from arborsim.trace.reader import TraceReader
from tests.helpers.plain_executor import PlainExecutor
from tests.helpers.slow_world import SlowWorld
from tests.helpers.traces import make_trace
from tests.policies.oracles import Nothing

READ = (Signal.ATTENTION, Signal.FUTURE_ATTENTION)
FORBIDDEN = 1e6  # more than all attention there is


class Watcher(Nothing):
    """Notes which tokens each iteration adds, and what it pays to every token."""

    def __init__(self, tokens: int) -> None:
        self.paid: list[np.ndarray] = []
        self.held: list[int] = []
        self.tokens = tokens

    def prefill(self, world: SlowWorld) -> None:
        self.paid.append(np.zeros(self.tokens))
        self.held.append(len(world.tier))

    def step(self, world: SlowWorld) -> None:
        paid = np.zeros(self.tokens)
        for token in range(self.held[-1], len(world.tier)):
            paid[world.path(world.node[token])] += world.episode.attention.row(token)
        self.paid.append(paid)
        self.held.append(len(world.tier))


def losses(episode: Episode, budget: int) -> np.ndarray:
    """What is lost by evicting each token at each forced eviction; float64 ``[slots, tokens]``."""
    watcher = Watcher(episode.num_tokens)
    SlowWorld(episode, 1 << 60).run(watcher)
    later = np.cumsum(np.array(watcher.paid)[::-1], axis=0)[::-1]
    later = np.concatenate([later[1:], np.zeros((1, episode.num_tokens))])
    slots, gone = [], 0
    for time, held in enumerate(watcher.held):
        cost = later[time].copy()
        cost[held - 1 :] = FORBIDDEN  # the newest stays, and what is not yet there
        slots += [cost] * max(0, held - gone - budget)
        gone = max(gone, held - budget)
    return np.array(slots).reshape(-1, episode.num_tokens)


def generated(episode: Episode) -> int:
    return sum(e.run.num_tokens for e in play(episode) if isinstance(e, Decode))


def best_share(episode: Episode, budget: int) -> float:
    """Largest share of attention that any policy without return can keep."""
    cost = losses(episode, budget)
    slots, tokens = linear_sum_assignment(cost)
    return 1 - float(cost[slots, tokens].sum()) / generated(episode)


def kept_share(policy: Policy, episode: Episode, budget: int) -> float:
    meter, geometry = AttentionKept(), episode.info.geometry
    controller = Controller(
        policy, PlainExecutor(), budget_tokens=budget, layers=geometry.layers,
        vocabulary=geometry.vocab, meters=[meter],
    )  # fmt: skip
    controller.run(play(episode))
    return meter.share


def kept_or_nothing(policy: Policy, episode: Episode, budget: int) -> float:
    """0 if the policy cannot keep to the budget."""
    try:
        return kept_share(policy, episode, budget)
    except BudgetInfeasible:
        return 0.0


def an_episode(folder: Path, **shape: object) -> Episode:
    path = make_trace(folder / "x.parquet", episodes=1, **shape)  # type: ignore[arg-type]
    return next(iter(TraceReader(path).episodes(READ)))


def test_the_assignment_is_the_best_of_all_schedules(tmp_path: Path) -> None:
    for seed in range(5):
        folder = tmp_path / str(seed)
        folder.mkdir()
        episode = an_episode(folder, seed=seed, kind="linear", prompt=3, nodes=1, block=(5, 5))
        cost = losses(episode, 4)
        assert cost.shape == (4, 8)
        by_hand = min(
            sum(cost[slot, token] for slot, token in enumerate(order))
            for order in permutations(range(8), 4)
        )
        assert best_share(episode, 4) == pytest.approx(1 - by_hand / 5, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(["linear", "tree"]), seed=st.integers(0, 9999),
    share=st.floats(0.2, 0.95), coarse=st.booleans(),
)  # fmt: skip
def test_no_policy_beats_the_best(
    tmp_path_factory: pytest.TempPathFactory, kind: str, seed: int, share: float, coarse: bool
) -> None:
    episode = an_episode(
        tmp_path_factory.mktemp("t"), kind=kind, seed=seed, prompt=8, nodes=8, block=(2, 10),
        coarse=coarse,
    )  # fmt: skip
    budget = max(4, int(share * episode.num_tokens))
    best = best_share(episode, budget) + 1e-9
    # The best is exact for a protected newest token; `h2o` protects more, and so is bounded too.
    for policy in (Oracle(), Oracle(adaptation="path"), H2O(adaptation="flat"), H2O()):
        assert kept_or_nothing(policy, episode, budget) <= best


TRACES = Path(__file__).parents[2] / "traces"
# Largest distance to the best, in points of attention kept, by budget: see `Oracle.method`.
DISTANCE = {0.3: 1.5, 0.5: 0.3, 0.7: 0.05}


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["game24-tot", "chain-linear"])
def test_distance_to_the_best_on_the_shipped_traces(trace: str) -> None:
    reader = TraceReader(TRACES / f"{trace}.parquet")
    smallest = min(range(reader.num_episodes), key=lambda i: reader.metadata(i).num_rows)
    episode = next(iter(reader.episodes(READ, start=smallest)))
    for share, most in DISTANCE.items():
        budget = int(share * episode.num_tokens)
        distance = best_share(episode, budget) - kept_share(Oracle(), episode, budget)
        assert 0 <= 100 * distance + 1e-7 < most
