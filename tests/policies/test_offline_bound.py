"""The offline optimum is what an assignment solved here says, and no policy beats it.

Whoever evicts without return loses, with every token, the attention it would have received after
that.  Evictions are best put off until they are forced, and forced evictions are slots in time; so
the least loss is an assignment of tokens to slots, which SciPy solves exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from arborsim.core.errors import BudgetInfeasible
from arborsim.core.events import Decode, Event
from arborsim.core.observations import Signal
from arborsim.core.tiers import Tier
from arborsim.machine.machine import num_groups
from arborsim.memory.moves import Plan
from arborsim.play.controller import Controller
from arborsim.play.episode import with_offline_optimum
from arborsim.play.meters import AttentionKept
from arborsim.policies.base import CacheView, Policy, Protection
from arborsim.policies.methods.attention import H2O, Tova
from arborsim.policies.methods.baselines import Oracle, StreamingLLM
from arborsim.policies.methods.keys import KeyNorm
from arborsim.policies.methods.snapkv import AdaKV, PyramidKV
from arborsim.signals import offline
from arborsim.trace.episode import Episode, play
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import VECTORS
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
            row = world.episode.attention.row(token)
            paid[world.path(world.node[token])] += row / row.sum()
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
    controller.run(play(with_offline_optimum(policy, episode, budget)))
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
    rivals = (
        H2O(per="shared", adaptation="flat"), H2O(per="shared"), Tova(per="shared"),
        StreamingLLM(), Oracle(recent=3),
    )  # fmt: skip
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


# --- one schedule per layer or KV head ---


def vector_episode(folder: Path, layers: tuple[int, ...], **shape: object) -> Episode:
    path = make_trace(
        folder / "x.parquet", episodes=1, capture="qkv", layers=3, qkv_layers=layers, **shape
    )  # type: ignore[arg-type]
    return next(iter(TraceReader(path).episodes((*READ, *VECTORS))))


def kept_by_groups(policy: Policy, episode: Episode, budget: int) -> float:
    meter, info = AttentionKept(Signal.HEAD_ATTENTION), episode.info
    controller = Controller(
        policy, PlainExecutor(num_groups(policy, info)), budget_tokens=budget,
        layers=info.geometry.layers, vocabulary=info.geometry.vocab, shape=info.cache_shape,
        meters=[meter],
    )  # fmt: skip
    try:
        controller.run(play(with_offline_optimum(policy, episode, budget)))
    except BudgetInfeasible:
        return 0.0
    return meter.share


def losses_by_group(episode: Episode, budget: int, per: str) -> np.ndarray:
    """`losses` of each group, by nested loops: float64 ``[slots, groups, tokens]``."""
    heads, kv_heads = episode.info.geometry.heads, episode.info.geometry.kv_heads
    layers, tokens = len(episode.info.qkv_layers), episode.num_tokens
    by_head = per == "head"
    groups = layers * kv_heads if by_head else layers
    tables = []
    for group in range(groups):
        layer, kv_head = divmod(group, kv_heads) if by_head else (group, None)
        mine = [h for h in range(heads) if kv_head in (None, h // (heads // kv_heads))]

        class Rows:
            """The mean row of the group's query heads, in the place of the model's."""

            def row(self, token: int, layer: int = layer, mine: list[int] = mine) -> np.ndarray:
                row = episode.head_attention.row(token)  # type: ignore[union-attr]
                return np.mean([row[layer, h].astype(np.float64) for h in mine], axis=0)

        tables.append(losses(replace(episode, attention=Rows()), budget))
    assert all(table.shape == (len(tables[0]), tokens) for table in tables)
    return np.stack(tables, axis=1)


def best_by_groups(episode: Episode, budget: int, per: str, together: bool) -> float:
    """Largest share that policies with shares of the budget, or equal ones, can keep."""
    cost = losses_by_group(episode, budget, per)
    slots, groups, _ = cost.shape
    if together:
        whole = np.repeat(cost.reshape(slots, -1), groups, axis=0)  # as many slots as groups
        taken = linear_sum_assignment(whole)
        lost = float(whole[taken].sum())
    else:
        lost = sum(float(own[linear_sum_assignment(own)].sum()) for own in np.moveaxis(cost, 1, 0))
    return 1 - lost / groups / generated(episode)


@pytest.mark.parametrize(("per", "layers"), [("layer", (0, 2)), ("head", (1,))])
def test_schedules_of_groups_are_the_best_of_all(
    tmp_path: Path, per: str, layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups, five tokens, room for three: every order of evictions, shared or not."""
    for seed in range(4):
        (folder := tmp_path / str(seed)).mkdir()
        episode = vector_episode(
            folder, layers, seed=seed, kind="linear", prompt=2, nodes=1, block=(3, 3)
        )
        cost = losses_by_group(episode, 3, per)
        assert cost.shape == (2, 2, 5)
        shared = min(
            sum(cost[slot // 2, item // 5, item % 5] for slot, item in enumerate(order))
            for order in permutations(range(10), 4)
        )
        alone = sum(
            min(cost[0, group, a] + cost[1, group, b] for a, b in permutations(range(5), 2))
            for group in range(2)
        )
        policy = Oracle(per=per)
        assert kept_by_groups(policy, episode, 3) == pytest.approx(1 - shared / 6, abs=1e-6)
        with monkeypatch.context() as patch:  # as in searches that are too long to share
            patch.setattr(offline, "EXACT_CELLS", 5 * 2)
            assert kept_by_groups(policy, episode, 3) == pytest.approx(1 - alone / 6, abs=1e-6)


@dataclass(frozen=True)
class RandomShares(Policy):
    """Evicts tokens of any group at random, as many as the budget wants."""

    per: str = "head"
    name: ClassVar[str] = "random-shares"

    @property
    def grouping(self) -> str:
        return self.per

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(recent=0)

    def next_decision(self, view: CacheView) -> int:
        return 1

    def decide(self, view: CacheView, event: Event) -> Plan:
        tiers = view.tier.copy()
        held = np.flatnonzero(tiers == Tier.HBM)
        over = max(0, len(held) - len(tiers) * view.budget_tokens)
        rng = np.random.default_rng(view.num_tokens)
        favour = np.repeat(rng.gamma(1, size=len(tiers)), view.num_tokens)[held]
        gone = np.argsort(rng.random(len(held)) ** favour)[:over]
        tiers.ravel()[held[gone]] = Tier.EVICTED
        return Plan(tiers)


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(["linear", "tree"]), seed=st.integers(0, 9999),
    share=st.floats(0.2, 0.95), coarse=st.booleans(), per=st.sampled_from(["layer", "head"]),
)  # fmt: skip
def test_no_policy_of_groups_beats_the_best(
    tmp_path_factory: pytest.TempPathFactory, kind: str, seed: int, share: float, coarse: bool,
    per: str,
) -> None:  # fmt: skip
    episode = vector_episode(
        tmp_path_factory.mktemp("t"), (0, 2), kind=kind, seed=seed, prompt=8, nodes=6, block=(2, 8),
        coarse=coarse,
    )  # fmt: skip
    budget = max(4, int(share * episode.num_tokens))
    best = best_by_groups(episode, budget, per, together=True)
    assert kept_by_groups(Oracle(per=per), episode, budget) == pytest.approx(best, abs=1e-6)
    rivals = [
        H2O(adaptation="flat", per=per), H2O(per=per), Tova(per=per), KeyNorm(per=per),
        RandomShares(per), Oracle(per=per, recent=3),
    ]  # fmt: skip
    if per == "head":
        rivals += [AdaKV(window=2), PyramidKV(window=2)]
    for policy in rivals:
        assert kept_by_groups(policy, episode, budget) <= best + 1e-6
    assert kept_by_groups(RandomShares(per), episode, budget) > 0  # it is never infeasible
    whole = kept_by_groups(Oracle(per=per), episode, episode.num_tokens)
    assert whole == pytest.approx(1.0, abs=1e-6)
    # Equal shares are not better.
    assert best_by_groups(episode, budget, per, together=False) <= best + 1e-9


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
    smallest = min(range(reader.num_episodes), key=lambda i: reader.num_rows(i))
    episode = next(iter(reader.episodes(READ, start=smallest)))
    for share, most in {0.3: 1.5, 0.5: 0.3, 0.7: 0.05}.items():
        budget = int(share * episode.num_tokens)
        best = kept_share(Oracle(), episode, budget)
        assert best == pytest.approx(best_share(episode, budget), abs=1e-9)
        with monkeypatch.context() as patch:
            patch.setattr(offline, "EXACT_CELLS", 0)
            assert 0 <= 100 * (best - kept_share(Oracle(), episode, budget)) + 1e-7 < most


@pytest.mark.slow
def test_shares_of_the_budget_matter_on_the_shipped_vectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What docs/decisions.md says of `chain-vectors`: with equal shares, then with the best."""
    episodes = list(TraceReader(TRACES / "chain-vectors.parquet").episodes((*READ, *VECTORS)))
    weights = [generated(episode) for episode in episodes]
    shares = []
    for cells in (1 << 16, offline.EXACT_CELLS):
        monkeypatch.setattr(offline, "EXACT_CELLS", cells)
        kept = [kept_by_groups(Oracle(per="head"), e, int(0.6 * e.num_tokens)) for e in episodes]
        shares.append(np.average(kept, weights=weights))
    assert shares[0] == pytest.approx(0.983, abs=5e-4)
    assert 0.999 < shares[1] < 1


@pytest.mark.parametrize("there", [True, False])
def test_assignments_are_scipys(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """Whether or not its solver can be loaded by itself."""
    if not there:
        monkeypatch.setattr(offline.PathFinder, "find_spec", lambda name, path: None)
    offline._assignment_solver.cache_clear()
    solve = offline._assignment_solver()
    offline._assignment_solver.cache_clear()
    assert (solve is linear_sum_assignment) == (not there)
    costs = np.random.default_rng(0).integers(0, 5, (20, 30)).astype(float)  # many ties
    for mine, theirs in zip(solve(costs), linear_sum_assignment(costs), strict=True):
        assert mine.tolist() == theirs.tolist()
