"""What the experiments for ArborKV's claims are made of: trees, the meter of paths, the program."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.tiers import Budget, Tier
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.play.episode import Cell, play_episode
from arborsim.policies.registry import build

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def arborkv() -> Any:
    """The module ``benchmarks.claims.arborkv``."""
    sys.path.insert(0, str(ROOT))
    try:
        return importlib.import_module("benchmarks.claims.arborkv")
    finally:
        sys.path.remove(str(ROOT))


@pytest.mark.parametrize(("config", "thoughts"), [("S", 64), ("L", 80)])
def test_trees_have_the_papers_shape(arborkv: Any, config: str, thoughts: int) -> None:
    """Branching, depth, tokens and the number of thoughts; the same seed gives the same tree."""
    branching, depth = arborkv.SHAPES[config]
    search = arborkv.Shape(config, thoughts).grow(3)
    again = arborkv.Shape(config, thoughts).grow(3)
    assert search == again
    written = [thought for batch in search.batches for thought in batch.thoughts]
    assert len(written) == thoughts
    assert {thought.tokens for thought in written} == {128}
    level, children = [0], [0]
    for number, thought in enumerate(written, 1):
        assert thought.parent < number
        level.append(level[thought.parent] + 1)
        children.append(0)
        children[thought.parent] += 1
    assert max(level) == depth
    assert max(children) <= branching
    given_up: set[int] = set()
    for batch in search.batches:
        assert not given_up.intersection(thought.parent for thought in batch.thoughts)
        given_up.update(batch.pruned)
    assert given_up


def test_what_is_gone_from_paths_is_counted_token_by_token(
    arborkv: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`OnPath` against a second reading of the tiers before every run."""
    monkeypatch.setattr(arborkv, "SCRATCH", tmp_path)
    reader = arborkv.grown.__wrapped__(arborkv.Shape("S", 20), 1)
    cell = Cell(build("random", {"adaptation": "flat"}), Budget.parse("0.25"))
    (episode,) = reader.episodes(frozenset(cell.policy.reads()), who="a test")
    shares: list[float] = []
    turns: list[float] = []

    class Slow(arborkv.OnPath):  # type: ignore[misc, name-defined]
        before = 0

        def ran(self, run: Any, tree: Any, tier: np.ndarray, moves: Any) -> None:
            super().ran(run, tree, tier, moves)
            (leaf,) = run.leaves
            nodes = {leaf}
            while (above := tree.nodes[min(nodes)].parent) >= 0:
                nodes.add(above)
            owner = tree.node_of_token.values
            older = [t for t in range(tier.shape[1]) if int(owner[t]) in nodes]
            share = sum(tier[0, t] == Tier.EVICTED for t in older) / len(older)
            shares.extend([share] * run.steps)
            if leaf != self.before and tree.nodes[leaf].parent != self.before:
                turns.append(share)
            self.before = leaf

    meter = Slow()
    machine = Machine(load_profile("rtx4090"), load_geometry("llama-3.1-8b"))
    play_episode(
        episode, cell, SimulatedExecutor.of(machine, cell.policy, episode.info), meters=[meter]
    )
    assert meter.tokens == len(shares)
    assert meter.missing == pytest.approx(sum(shares))
    assert (meter.switches, meter.broken) == (len(turns), sum(share > 0 for share in turns))
    assert meter.broken > 0


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 30), st.floats(0.05, 0.95), st.integers(0, 2**32 - 1))
def test_the_programs_optimum_meets_its_conditions(
    arborkv: Any, blocks: int, share: float, seed: int
) -> None:
    """The budget is used up, and ``w / k`` is the same for all blocks that are not whole."""
    rng = np.random.default_rng(seed)
    sizes, weights = rng.uniform(1, 100, blocks), np.exp(rng.normal(0, 1, blocks))
    budget = share * sizes.sum()
    kept = arborkv._capped(weights, sizes, budget)
    assert kept.sum() == pytest.approx(budget, rel=1e-6)
    assert (kept <= sizes).all()
    price = weights / kept
    open_to = kept < sizes * (1 - 1e-9)
    if open_to.any():
        assert price[open_to] == pytest.approx(price[open_to][0], rel=1e-6)
        assert (price[~open_to] >= price[open_to][0] * (1 - 1e-6)).all()
