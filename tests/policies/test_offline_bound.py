"""The offline optimum is what an assignment solved here says, and no policy beats it.

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

from arborsim.core.errors import BudgetInfeasible
from arborsim.core.events import Decode
from arborsim.core.observations import Signal
from arborsim.core.tiers import Tier
from arborsim.policies.base import Policy
from arborsim.policies.methods.baselines import Oracle
from arborsim.policies.methods.h2o import H2O
from arborsim.policies.methods.streaming_llm import StreamingLLM
from arborsim.policies.methods.tova import Tova
from arborsim.run.controller import Controller
from arborsim.run.episode import foresee
from arborsim.run.meters import AttentionKept
from arborsim.signals import offline
from arborsim.trace.episode import Episode, play
from arborsim.trace.reader import TraceReader
from tests.helpers.plain_executor import PlainExecutor, decide_all
from tests.helpers.slow_world import SlowWorld
from tests.helpers.traces import make_trace
from tests.policies.oracles import Nothing, SlowStream

READ = (Signal.ATTENTION,)
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
        cost[held:] = FORBIDDEN  # what is not yet there
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
    controller.run(play(foresee(policy, episode, budget)))
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
    best = best_share(episode, budget)
    assert kept_share(Oracle(), episode, budget) == pytest.approx(best, abs=1e-9)
    rivals = (H2O(adaptation="flat"), H2O(), Tova(per="shared"), StreamingLLM(), Oracle(recent=3))
    for policy in rivals:
        assert kept_or_nothing(policy, episode, budget) <= best + 1e-9
    assert kept_share(Oracle(), episode, episode.num_tokens) == 1.0


@pytest.mark.parametrize("kind", ["linear", "tree"])
def test_what_another_policy_protects_can_be_protected(tmp_path: Path, kind: str) -> None:
    episode = an_episode(tmp_path, kind=kind, seed=1, prompt=8, nodes=8, block=(2, 10))
    budget = int(0.5 * episode.num_tokens)
    alike = Oracle(pin_prompt=True, sinks=2, recent=4)
    tiers, _ = decide_all(alike, episode, budget, 1)
    for after in tiers:
        assert not any(after[:8])
        assert not any(after[-4:])
    assert kept_share(alike, episode, budget) <= kept_share(Oracle(), episode, budget)
    with pytest.raises(BudgetInfeasible, match="prompt 8"):
        kept_share(Oracle(pin_prompt=True), episode, 7)


def test_runs_are_planned_like_single_steps(tmp_path: Path) -> None:
    episode = an_episode(tmp_path, kind="linear", seed=3, prompt=8, nodes=8, block=(2, 10))
    budget = int(0.4 * episode.num_tokens)
    runs, steps = (decide_all(Oracle(), episode, budget, most)[1] for most in (None, 1))
    assert len(runs)
    assert np.array_equal(runs, steps)


class SlowBelady(SlowStream):
    """Evicts what will receive least from now on, token by token."""

    def __init__(self) -> None:
        super().__init__("flat")
        self.total: list[float] = []

    def prefill(self, world: SlowWorld) -> None:
        ahead = SlowWorld(world.episode, 1 << 60)
        ahead.run(Nothing())
        self.total = ahead.attended
        super().prefill(world)

    def recent(self, world: SlowWorld) -> int:
        return 1

    def score(self, world: SlowWorld, token: int) -> float:
        return round(self.total[token] - world.attended[token], 9)


@pytest.mark.parametrize("kind", ["linear", "tree"])
def test_beladys_rule_stands_in_where_the_problem_is_too_large(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "EXACT_CELLS", 0)
    for seed in range(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        episode = an_episode(folder, kind=kind, seed=seed, prompt=8, nodes=8, block=(2, 10))
        budget = int(0.5 * episode.num_tokens)
        assert not offline.is_exact(episode.num_tokens, budget)
        expected = SlowWorld(episode, budget).run(SlowBelady())
        tiers, _ = decide_all(Oracle(recent=1), episode, budget, 1)
        held = np.array(tiers[-1]) == 0
        # Tokens that nobody will read again tie; which of them goes first is rounding.
        assert kept_share(Oracle(recent=1), episode, budget) == pytest.approx(
            slow_share(episode, expected), abs=1e-7
        )
        assert held.sum() == budget


def slow_share(episode: Episode, snapshots: list[list[int]]) -> float:
    """Attention kept if the tiers were these after each event."""
    seen = Watcher(episode.num_tokens)
    SlowWorld(episode, 1 << 60).run(seen)
    lost, time = 0.0, 0
    before: list[int] = []
    for after in snapshots:
        if before and len(after) > len(before):
            time += 1
            gone = np.flatnonzero(np.array(before) == Tier.EVICTED)
            lost += float(seen.paid[time][gone].sum())
        before = after
    return 1 - lost / generated(episode)


TRACES = Path(__file__).parents[2] / "traces"


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["game24-tot", "chain-linear"])
def test_beladys_rule_is_near_the_best_on_the_shipped_traces(
    trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The distances that `Oracle.method` states."""
    reader = TraceReader(TRACES / f"{trace}.parquet")
    smallest = min(range(reader.num_episodes), key=lambda i: reader.metadata(i).num_rows)
    episode = next(iter(reader.episodes(READ, start=smallest)))
    for share, most in {0.3: 1.5, 0.5: 0.3, 0.7: 0.05}.items():
        budget = int(share * episode.num_tokens)
        best = kept_share(Oracle(), episode, budget)
        assert best == pytest.approx(best_share(episode, budget), abs=1e-9)
        with monkeypatch.context() as patch:
            patch.setattr(offline, "EXACT_CELLS", 0)
            assert 0 <= 100 * (best - kept_share(Oracle(), episode, budget)) + 1e-7 < most
