"""The budget is the sum over groups: one may hold more where others hold less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.cli.app import main
from arborsim.core.errors import BudgetInfeasible, PlanError
from arborsim.core.events import Event, TokenRun
from arborsim.core.observations import Signal
from arborsim.core.shape import CacheShape
from arborsim.core.tiers import Tier
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.lookup import load_profile
from arborsim.machine.machine import Machine, num_groups
from arborsim.memory.moves import Moves, Plan
from arborsim.play.controller import Controller
from arborsim.policies.base import CacheView, Policy, Protection
from arborsim.policies.blocks import Allocation, Decision, Protect
from arborsim.policies.methods.duoattention import DuoAttention
from arborsim.policies.placement import Pool
from arborsim.policies.registry import build
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.attention import CumulativeAttention
from arborsim.signals.scores import Score
from arborsim.trace.episode import Episode, play
from arborsim.trace.reader import TraceReader
from tests.helpers.plain_executor import PlainExecutor, decide_all, in_steps
from tests.helpers.slow_world import SlowWorld
from tests.helpers.traces import make_trace, trace_for
from tests.policies.oracles_uneven import PAIRS

SHAPE = CacheShape(layers=(3, 7), kv_heads=2, head_dim=8)


def a_chain(folder: Path, prompt: int = 20, tokens: int = 20) -> Episode:
    path = make_trace(
        folder / "x.parquet", seed=1, episodes=1, kind="linear", prompt=prompt, nodes=1,
        block=(tokens, tokens),
    )  # fmt: skip
    return next(iter(TraceReader(path).episodes()))


@dataclass(frozen=True)
class Fixed(Policy):
    """Groups keep `held` of their newest tokens each, whatever the budget."""

    name: ClassVar[str] = "fixed"
    held: tuple[int, ...] = ()
    in_runs: bool = False

    def next_decision(self, view: CacheView) -> int:
        return 1

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(recent=1)

    def decide(self, view: CacheView, event: Event) -> Plan | None:
        assert view.shape == SHAPE
        tiers = view.tier.copy()
        for row, held in zip(tiers, self.held, strict=True):
            row[: max(0, len(row) - held)] = Tier.EVICTED
        return Plan(tiers)

    def plans_runs(self, view: CacheView) -> bool:
        return self.in_runs and not (view.tier == Tier.HBM).all()

    def decide_run(self, view: CacheView, run: TokenRun, steps: Iterator[int]) -> Moves:
        first = view.num_tokens - run.num_tokens
        table = [
            (step, group, first + step - held)
            for step in steps
            for group, held in enumerate(self.held)
            if view.tier[group, first + step - held] == Tier.HBM
        ]
        step, group, token = np.array(table).T
        target = np.full(len(step), Tier.EVICTED, dtype=np.int8)
        return Moves(step, group.astype(np.int32), token, target)


def played(policy: Policy, episode: Episode, budget: int) -> Controller:
    controller = Controller(
        policy, PlainExecutor(4), budget_tokens=budget, layers=8, vocabulary=128, shape=SHAPE
    )
    controller.run(play(episode))
    return controller


@pytest.mark.parametrize("in_runs", [False, True])
def test_a_group_may_exceed_the_budget_where_others_hold_less(
    in_runs: bool, tmp_path: Path
) -> None:
    held = (17, 3, 10, 9)  # 39 in 4 groups
    view = played(Fixed(held, in_runs), a_chain(tmp_path), budget=10).view()
    assert view.held.tolist() == list(held)
    assert (view.in_hbm, view.fullest) == (10, 17)


def test_the_sum_over_groups_is_checked_and_the_error_says_the_mean(tmp_path: Path) -> None:
    with pytest.raises(BudgetInfeasible, match=r"= 11 tokens > budget 10 tokens"):
        played(Fixed((17, 3, 12, 9)), a_chain(tmp_path), budget=10)  # 41


def test_a_run_that_exceeds_the_sum_is_stopped(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Growing(Fixed):
        def decide_run(self, view: CacheView, run: TokenRun, steps: Iterator[int]) -> Moves:
            moves = super().decide_run(view, run, steps)
            kept = (moves.group != 0) | (moves.step != 12)  # one token too many from then on
            return Moves(moves.step[kept], moves.group[kept], moves.token[kept], moves.target[kept])

    episode = a_chain(tmp_path)
    with pytest.raises(PlanError, match=r"leaves 11 tokens in HBM, budget 10"):
        played(Growing((17, 4, 10, 9), in_runs=True), episode, budget=10)
    played(Growing((17, 3, 10, 9), in_runs=True), episode, budget=10)


@settings(max_examples=40, deadline=None)
@given(
    held=st.tuples(*[st.integers(1, 20)] * 4),
    budget=st.integers(4, 16),
    steps=st.integers(1, 20),
)
def test_runs_decide_and_count_as_steps_do(
    held: tuple[int, ...], budget: int, steps: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    episode = a_chain(tmp_path_factory.mktemp("t"))
    seen: list[object] = []
    for in_runs, most in ((False, None), (True, None), (True, steps)):
        executor = SimulatedExecutor(
            Machine(load_profile("h100")),
            episode.info.geometry,
            groups=4,
            policy="fixed",
            fused=True,
        )
        policy = Fixed(held, in_runs)
        controller = Controller(
            policy, executor, budget_tokens=budget, layers=8, vocabulary=128, shape=SHAPE
        )
        events = play(episode) if most is None else in_steps(play(episode), most)
        try:
            for event in events:
                controller.handle(event)
                executor.ledger.check()
        except BudgetInfeasible:
            seen.append("infeasible")
            continue
        m = executor.measurements()
        counts = (m.peak_hbm_kv_tokens, m.peak_hbm_kv_bytes, m.evicted_tokens, m.generated_tokens)
        seen.append((executor.tier.tolist(), counts, controller.view().in_hbm))
    assert seen[0] == seen[1] == seen[2]
    assert (seen[0] == "infeasible") == (sum(held) > 4 * budget)


@dataclass(frozen=True)
class AnyShares(Pool):
    """Shares drawn at random, anew at every decision; they add up to the budget of all groups."""

    seed: int = 0
    drawn_for: str = "group"

    @property
    def budget_scope(self) -> str:  # type: ignore[override]
        return self.drawn_for

    def rng(self, view: CacheView) -> np.random.Generator:
        return np.random.default_rng((self.seed, view.num_tokens, int(view.held.sum())))

    def shares(self, view: CacheView) -> np.ndarray:
        least, groups = 3, len(view.tier)
        headroom = (view.budget_tokens - least) * groups
        return least + self.rng(view).multinomial(headroom, [1 / groups] * groups)

    def headroom(self, view: CacheView) -> int:
        return view.budget_tokens - view.in_hbm

    def evictions(self, at: Decision, first: int, free: np.ndarray, over: int) -> np.ndarray:
        head = np.nonzero(free)[0]
        gone = self.rng(at.view).permutation(head)[:over]
        return np.bincount(gone, minlength=len(free))


@dataclass(frozen=True)
class RandomlyUneven(StreamPolicy):
    name: ClassVar[str] = "randomly-uneven"
    per: str = "head"
    seed: int = 0
    budget_scope: str = "group"

    @cached_property
    def score(self) -> Score:
        return CumulativeAttention(grouping=self.per)

    @cached_property
    def allocate(self) -> Allocation:
        return AnyShares(self.adaptation, self.seed, self.budget_scope)

    @cached_property
    def protect(self) -> Protect:
        return Protect(False, sinks=1, recent=2, recent_share=1.0)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["linear", "tree"]),
    seed=st.integers(0, 999),
    share=st.floats(0.2, 0.9),
    budget_scope=st.sampled_from(["group", "layer", "model"]),
    per=st.sampled_from(["head", "layer"]),
    adaptation=st.sampled_from(["path", "flat"]),
)
def test_any_uneven_allocation_obeys_the_rules_of_a_cache(
    tmp_path_factory: pytest.TempPathFactory, kind: str, seed: int, share: float,
    budget_scope: str, per: str, adaptation: str,
) -> None:  # fmt: skip
    policy = RandomlyUneven(adaptation, per=per, seed=seed, budget_scope=budget_scope)
    path = trace_for(
        policy, tmp_path_factory.mktemp("t") / "x.parquet", seed=seed, episodes=1, kind=kind,
        prompt=20, nodes=10, block=(2, 9),
    )  # fmt: skip
    episode = next(iter(TraceReader(path).episodes(sorted(policy.reads()))))
    geometry, groups = episode.info.geometry, num_groups(policy, episode.info)
    budget = max(6, int(share * episode.num_tokens))
    executor = SimulatedExecutor(
        Machine(load_profile("h100")), geometry, groups=groups, policy=policy.name, fused=False
    )
    controller = Controller(
        policy, executor, budget_tokens=budget, layers=geometry.layers, vocabulary=128,
        shape=episode.info.cache_shape,
    )  # fmt: skip
    before, per_token = np.empty((groups, 0), dtype=np.int8), geometry.kv_bytes_per_token
    try:
        for event in in_steps(play(episode)):
            controller.handle(event)
            view, ledger = controller.view(), executor.ledger
            held = np.count_nonzero(view.tier == Tier.HBM, axis=1)
            assert held.sum() <= budget * groups
            assert ledger.hbm_tokens == view.in_hbm == -(-int(held.sum()) // groups)
            assert ledger.hbm_bytes == int(held.sum()) * -(-per_token // groups)
            ledger.check()
            same = view.tier[:, : before.shape[1]]
            assert not ((same > before) & policy.protected(view)[: before.shape[1]]).any()
            assert (same[before == Tier.EVICTED] == Tier.EVICTED).all()
            before = view.tier.copy()
    except BudgetInfeasible as error:
        assert error.needed_tokens > budget
        assert len(controller.view().leaves) > 1 or budget_scope == "group"


UNEVEN = ("pyramidkv", "pyramidkv-flat", "adakv", "adakv-flat", "duoattention")


@pytest.mark.parametrize("name", UNEVEN)
@settings(max_examples=8, deadline=None)
@given(
    kind=st.sampled_from(["linear", "tree"]),
    seed=st.integers(0, 999),
    share=st.floats(0.3, 0.95),
    coarse=st.booleans(),
)
def test_long_prompts_are_cut_as_the_literal_oracles_do(
    name: str, tmp_path_factory: pytest.TempPathFactory, kind: str, seed: int, share: float,
    coarse: bool,
) -> None:  # fmt: skip
    policy, oracle = PAIRS[name]
    path = trace_for(
        policy, tmp_path_factory.mktemp("t") / "x.parquet", seed=seed, episodes=1, kind=kind,
        prompt=48, nodes=6, block=(2, 9), coarse=coarse,
    )  # fmt: skip
    needs = sorted(policy.reads() | {Signal.ATTENTION})
    episode = next(iter(TraceReader(path).episodes(needs)))
    groups, budget = num_groups(policy, episode.info), int(share * 48)
    tiers, moves = decide_all(policy, episode, budget)
    prompt = np.array(tiers[0]).reshape(groups, -1)
    assert len(moves)
    assert np.count_nonzero(prompt < Tier.DDR) <= budget * groups
    assert tiers[-1] == SlowWorld(episode, budget, groups).run(oracle())[-1]


@pytest.mark.parametrize("name", UNEVEN)
def test_heads_or_layers_keep_uneven_numbers(name: str, tmp_path: Path) -> None:
    policy, _ = PAIRS[name]
    path = trace_for(policy, tmp_path / "x.parquet", episodes=1, kind="linear", prompt=48, nodes=6)
    episode = next(iter(TraceReader(path).episodes(sorted(policy.reads()))))
    groups, budget = num_groups(policy, episode.info), 24
    tiers, _ = decide_all(policy, episode, budget)
    held = np.count_nonzero(np.array(tiers[-1]).reshape(groups, -1) == Tier.HBM, axis=1)
    assert held.max() > budget > held.min()
    assert held.sum() <= budget * groups
    if not name.startswith("duo"):  # whose heads have all of their tokens or few
        assert held.sum() == budget * groups


def vectors(folder: Path, **others: int) -> Path:
    """A trace whose KV heads can be told apart."""
    policy = DuoAttention()
    return trace_for(policy, folder / "x.parquet", episodes=1, kind="linear", prompt=30, **others)


def test_gates_of_a_file_say_which_heads_stream(tmp_path: Path) -> None:
    reader = TraceReader(vectors(tmp_path, nodes=6))
    layers, heads = reader.info.qkv_layers, reader.info.geometry.kv_heads
    gates = np.random.default_rng(0).permutation((max(layers) + 3) * heads).reshape(-1, heads) / 99
    table = tmp_path / "full_attention_heads.tsv"
    np.savetxt(table, gates, delimiter="\t")  # as the authors' are
    policy = build("duoattention", {"gates": str(table), "sinks": "2", "recent": "5"})
    assert policy.fused
    episode = next(iter(reader.episodes(())))
    groups, budget = num_groups(policy, episode.info), int(0.6 * episode.num_tokens)
    tiers, _ = decide_all(policy, episode, budget)
    held = np.count_nonzero(np.array(tiers[-1]).reshape(groups, -1) == Tier.HBM, axis=1)
    whole = held == episode.num_tokens
    own = gates[list(layers)].reshape(-1)
    assert 0 < whole.sum() < groups
    assert own[whole].min() > own[~whole].max()
    # One more head with all of its tokens would exceed the budget of all.
    assert held.sum() + episode.num_tokens - (2 + 5) > budget * groups


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("0.5 0.5\n0.5\n", "must be a table"),
        ("0.5 nan\n0.5 1\n", "must be a table"),
        ("", "must be a table"),
        ("0.5 high\n", "must be a table"),
        ("0.5 0.5 0.5\n" * 9, "is a table of 9 x 3 (layers x KV heads); this model needs"),
        ("0.5 0.5\n", "is a table of 1 x 2 (layers x KV heads); this model needs"),
    ],
)
def test_gates_that_do_not_fit_are_refused(
    text: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gates.tsv"
    if text is not None:
        file.write_text(text)
    trace = vectors(tmp_path, nodes=2)
    command = f"replay {trace} --policy duoattention --budget 0.5 --set gates={file}"
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


def test_heads_need_captured_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = make_trace(tmp_path / "x.parquet", kind="linear", episodes=1)
    gates = tmp_path / "gates.tsv"
    gates.write_text("0.5 0.5\n" * 6)
    command = f"replay {trace} --policy duoattention --budget 0.5 --set gates={gates}"
    assert main(command.split()) == 2
    assert "record it with --capture qkv --qkv-layers all" in capsys.readouterr().err


def test_what_groups_stand_for() -> None:
    assert SHAPE.rows(4).tolist() == [0, 0, 1, 1]
    assert SHAPE.rows(2).tolist() == [0, 1]
    assert SHAPE.rows(1).tolist() == [0]
    assert CacheShape().rows(1).tolist() == [0]
