"""The budget is the sum over groups: one may hold more where others hold less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.errors import BudgetInfeasible, PlanError
from arborsim.core.events import Event, TokenRun
from arborsim.core.observations import Signal
from arborsim.core.shape import CacheShape
from arborsim.core.tiers import Tier
from arborsim.machine.machine import num_groups
from arborsim.memory.moves import Moves, Plan
from arborsim.policies.base import CacheView, Policy, Protection
from arborsim.run.controller import Controller
from arborsim.trace.episode import Episode, play
from arborsim.trace.reader import TraceReader
from tests.helpers.plain_executor import PlainExecutor, decide_all
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


def test_what_groups_stand_for() -> None:
    assert SHAPE.rows(4).tolist() == [0, 0, 1, 1]
    assert SHAPE.rows(2).tolist() == [0, 1]
    assert SHAPE.rows(1).tolist() == [0]
    assert CacheShape().rows(1).tolist() == [0]
