"""What must hold for every policy, on every event (the cache's invariants)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.errors import BudgetInfeasible, PlanError
from arborsim.core.events import Decode, Event, TokenRun
from arborsim.core.tiers import Tier
from arborsim.machine.machine import num_groups
from arborsim.memory.moves import Moves, Plan
from arborsim.play.controller import Controller
from arborsim.play.episode import with_offline_optimum
from arborsim.policies.base import CacheView, Policy, Protection
from arborsim.policies.registry import available, build
from arborsim.trace.episode import Episode, play
from arborsim.trace.reader import TraceReader
from tests.helpers.plain_executor import PlainExecutor, decide_all, in_steps
from tests.helpers.traces import make_trace, trace_for

# Small traces need small windows.
SMALL = {
    "arkv": {"window": "4"},
    "arkv-origin": {"window": "4"},
    "arkv-quant": {"window": "4"},
    "freekv": {"page": "3"},
    "quest": {"page": "3", "dense": "1"},
    "rkv": {"interval": "4", "window": "3"},
    "random-attention": {"interval": "4", "window": "3"},
    "thinkv-paper": {"segment": "12", "low": "0.4", "high": "0.6", "most": "8", "least": "2"},
    "hierarchy": {"interval": "4", "recent": "6"},
    "redundancy": {"interval": "4", "recent": "6"},
    "attn-val-redundancy": {"interval": "4", "recent": "6"},
    "arborkv": {"margin": "2"},
    "arbor-epi": {"schedule.slack": "2", "protect.recent": "6"},
    "staircase": {"schedule.iterations": "4", "protect.recent": "6"},
    "lag-kv-official": {"sinks": "2", "lag": "5"},
    "segment-hs": {"segment": "8", "keep_r": "6", "keep_e": "3", "keep_t": "1"},
}
NO_SHARES = {"hbm_ratio": "1.0", "evict_ratio": "0"}
# Methods that, as published, give up or quantise tokens whatever the budget: the settings that
# stop that, and the room they leave free before the budget (their `deviations` say so).
KEEP_ALL: dict[str, tuple[dict[str, str], int]] = {
    "thinkv-paper": ({"segment": "1000"}, 0),
    "hierarchy": (NO_SHARES, 64 * 8),
    "redundancy": (NO_SHARES, 64 * 8),
    "attn-val-redundancy": (NO_SHARES, 64 * 8),
    "arborkv": ({"only_under_pressure": "true"}, 17),
    "lag-kv-official": ({"ratio": "1.0"}, 0),
    "kivi": ({"residual": "100000"}, 0),
}


def an_episode(policy: Policy, folder: Path, kind: str, seed: int) -> Episode:
    """A random search, with what the policy reads."""
    path = trace_for(
        policy, folder / "x.parquet", seed=seed, episodes=1, kind=kind, prompt=12, nodes=16,
        block=(3, 16),
    )  # fmt: skip
    return next(iter(TraceReader(path).episodes(sorted(policy.reads()))))


@pytest.mark.parametrize("name", list(available()))
@settings(max_examples=10, deadline=None)
@given(kind=st.sampled_from(["linear", "tree"]), seed=st.integers(0, 999), share=st.floats(0.4, 1))
def test_invariants(
    name: str, tmp_path_factory: pytest.TempPathFactory, kind: str, seed: int, share: float
) -> None:
    """Invariants 7 and 8: the budget, and which tokens may move where."""
    policy = build(name, SMALL.get(name))
    episode = an_episode(policy, tmp_path_factory.mktemp("t"), kind, seed)
    budget = max(2, int(share * episode.num_tokens))
    groups = num_groups(policy, episode.info)
    executor = PlainExecutor(groups)
    controller = Controller(
        policy, executor, budget_tokens=budget, layers=episode.info.geometry.layers,
        vocabulary=128, shape=episode.info.cache_shape,
    )  # fmt: skip
    before = np.empty((groups, 0), dtype=np.int8)
    try:
        for event in in_steps(play(with_offline_optimum(policy, episode, budget))):
            controller.handle(event)
            after, view = executor.tier, controller.view()
            same = after[:, : before.shape[1]]
            protected = policy.protected(view)[: before.shape[1]]
            assert not ((same > before) & protected).any(), "a protected token moved down"
            if policy.bounded and isinstance(event, Decode):
                assert view.in_hbm <= budget
            if not policy.recovers:
                assert (same[before == Tier.EVICTED] == Tier.EVICTED).all()
            before = after.copy()
    except BudgetInfeasible as error:
        assert error.needed_tokens > error.budget_tokens == budget
        assert str(budget) in str(error)


@pytest.mark.parametrize("name", list(available()))
@pytest.mark.parametrize("kind", ["linear", "tree"])
def test_the_whole_budget_is_full_retention(name: str, kind: str, tmp_path: Path) -> None:
    keep_all, room = KEEP_ALL.get(name, ({}, 0))
    policy = build(name, keep_all)
    episode = an_episode(policy, tmp_path, kind, seed=3)
    _, moves = decide_all(policy, episode, episode.num_tokens + room)
    assert len(moves) == 0


@pytest.mark.parametrize("name", KEEP_ALL)
def test_methods_that_reduce_whatever_the_budget_do_so(name: str, tmp_path: Path) -> None:
    policy = build(name, SMALL.get(name))
    made = 0
    for kind in ("linear", "tree"):
        folder = tmp_path / kind
        folder.mkdir()
        episode = an_episode(policy, folder, kind, seed=3)
        made += len(decide_all(policy, episode, episode.num_tokens + KEEP_ALL[name][1])[1])
    assert made


@pytest.mark.parametrize("name", list(available()))
def test_a_decision_is_a_pure_function_of_view_and_event(name: str, tmp_path: Path) -> None:
    """Invariant 9: the same question has the same answer."""
    policy = build(name, SMALL.get(name))
    episode = an_episode(policy, tmp_path, "tree", seed=8)
    budget = int(0.8 * episode.num_tokens)
    seen: list[tuple[Plan | None, Plan | None]] = []

    @dataclass(frozen=True)
    class Twice(type(policy)):  # type: ignore[misc]
        def decide(self, view: CacheView, event: Event) -> Plan | None:
            first, second = policy.decide(view, event), policy.decide(view, event)
            seen.append((first, second))
            return first

    values = {field.name: getattr(policy, field.name) for field in fields(policy)}
    decide_all(Twice(**values), episode, budget, max_steps=1)
    assert seen
    for first, second in seen:
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert np.array_equal(first.tiers, second.tiers)


@dataclass(frozen=True)
class Rogue(Policy):
    """Breaks a rule on purpose."""

    rule: str = ""
    name: ClassVar[str] = ""

    def next_decision(self, view: CacheView) -> int:
        return 1

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(pin_prompt=True, recent=1)

    def decide(self, view: CacheView, event: Event) -> Plan | None:
        tiers = view.tier.copy()
        if not isinstance(event, Decode):
            return None
        if self.rule == "protected":
            tiers[0, 0] = Tier.DDR
        if self.rule == "shape":
            tiers = tiers[:, :-1]
        if self.rule == "destroyed":
            evict = view.num_tokens == view.prompt_tokens + 4
            tiers[0, view.prompt_tokens] = Tier.EVICTED if evict else Tier.HBM
        return Plan(tiers)

    def plans_runs(self, view: CacheView) -> bool:
        return self.rule.startswith("run")

    def decide_run(self, view: CacheView, run: TokenRun, steps: Iterator[int]) -> Moves:
        first = view.num_tokens - run.num_tokens
        return (
            {
                "run-twice": Moves.evict([2, 3], [first, first]),
                "run-early": Moves.evict([0], [first + 2]),
                "run-recent": Moves.evict([1], [first + 1]),
                "run-prompt": Moves.evict([1], [0]),
                "run-order": Moves.evict([2, 1], [first, first + 1]),
                "run-budget": Moves.evict([], []),
            }[self.rule]
            if self.rule != "run-budget"
            else Moves.evict([run.steps - 1], [first])
        )


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("protected", "protected token 0"),
        ("shape", "shape"),
        ("destroyed", "evicted, without recover"),
        ("run-twice", "twice"),
        ("run-early", "before it exists"),
        ("run-recent", "protected token"),
        ("run-prompt", "protected token 0"),
        ("run-order", "outside the run"),
        ("run-budget", "budget"),
    ],
)
def test_a_policy_that_breaks_a_rule_is_stopped(rule: str, says: str, tmp_path: Path) -> None:
    path = make_trace(
        tmp_path / "x.parquet", seed=1, episodes=1, kind="linear", prompt=4, nodes=1, block=(30, 30)
    )
    episode = next(iter(TraceReader(path).episodes()))
    with pytest.raises(PlanError, match=says):
        decide_all(Rogue(rule=rule), episode, budget_tokens=20 if rule == "run-budget" else 99)


def test_a_budget_below_the_floor_says_what_is_needed(tmp_path: Path) -> None:
    policy = build("epikv")
    episode = an_episode(policy, tmp_path, "linear", seed=1)
    with pytest.raises(BudgetInfeasible, match=r"prompt 12 .* > budget 10 tokens"):
        decide_all(policy, episode, budget_tokens=10)


def test_view_of_a_policy_cannot_outlive_its_frozen_fields() -> None:
    policy = build("h2o")
    with pytest.raises(AttributeError):
        policy.sinks = 3  # type: ignore[attr-defined, misc]
    assert replace(policy, sinks=3) != policy  # type: ignore[call-arg]
