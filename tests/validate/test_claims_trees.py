"""What the figures on real depth-first trees are made of, by a second reading of every event."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from arborsim.core import events
from arborsim.core.tiers import Budget, Tier
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.play.controller import Controller
from arborsim.play.episode import Cell, play_episode
from arborsim.policies.registry import build
from arborsim.trace.episode import Episode, play
from arborsim.trace.reader import TraceReader
from benchmarks.register.claims import read_papers

ROOT = Path(__file__).parents[2]


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module ``benchmarks.claims.trees`` with the sample log for its searches."""
    monkeypatch.syspath_prepend(str(ROOT))
    sys.modules.pop("benchmarks.claims.trees", None)  # what it has read is kept in a cache
    module = importlib.import_module("benchmarks.claims.trees")
    monkeypatch.setattr(module, "LOGS", tmp_path)
    for file in module.SEARCHES.values():
        shutil.copy(ROOT / "traces" / "logs" / "tot-dfs.json", tmp_path / file)
    return module


def line(node: int, parent: dict[int, int]) -> list[int]:
    """The blocks from a node up to the prompt."""
    return [node, *line(parent[node], parent)] if node else [0]


def second_reading(episode: Episode) -> tuple[int, int, float, float]:
    """Visits, returns, and shares of visits and tokens that were on no active path before."""
    parent: dict[int, int] = {}
    tokens = {0: 0}
    active = {0}
    leaves: tuple[int, ...] = (0,)
    visits = returns = away_visits = needed = away = 0
    for event in play(episode):
        if isinstance(event, events.Prefill | events.Decode):
            for leaf in event.run.leaves:
                tokens[leaf] = tokens.get(leaf, 0) + event.run.steps
        elif isinstance(event, events.Transition):
            parent |= dict(event.opened)
            for leaf in event.leaves:
                start = dict(event.opened).get(leaf, leaf)
                above = [node for node in line(leaf, parent) if node in tokens]
                off = [node for node in above if node not in active]
                visits += 1
                returns += start not in leaves and (start, leaves) != (0, (0,))
                away_visits += bool(off)
                needed += sum(tokens[node] for node in above)
                away += sum(tokens[node] for node in off)
            leaves = event.leaves
            active = {node for leaf in leaves for node in line(leaf, parent)}
    return visits, returns, away_visits / visits, away / needed


def test_the_shape_of_a_search_is_what_its_events_say(trees: Any) -> None:
    found = [*trees.searches("pruned", "word")]
    found += TraceReader(ROOT / "traces" / "chain-tree.parquet").episodes(stop=2)
    for episode in found:
        row = trees.shape(episode)
        visits, returns, off_visits, off_share = second_reading(episode)
        assert row["visits"] == visits
        assert row["off_path_visits"] == pytest.approx(off_visits)
        assert row["off_path_share"] == pytest.approx(off_share)
        depth_first = episode.info.search == "tot-dfs"
        assert (row["off_path_visits"] == 0) == depth_first
        if depth_first:
            assert row["returns"] == returns > 0
            assert row["longest_path_share"] < 1


@pytest.mark.parametrize(
    ("policy", "budget"),
    [("full", "1"), ("arborkv", "0.75"), ("arborkv", "0.6"), ("window over the tree", "0.75"),
     ("least recent blocks", "0.6")],
)  # fmt: skip
def test_what_returns_find_is_counted_token_by_token(
    trees: Any, policy: str, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Paths` against the tiers before a return's transition, after it, and at its first token."""
    monkeypatch.setattr(trees, "PROMPT_TOKENS", 64)
    name, settings = trees.POLICIES[policy]
    cell = Cell(build(name, settings), Budget.parse(budget))
    machine = Machine(load_profile(trees.GPU), load_geometry(trees.MODEL))
    lost = 0
    for episode in trees.searches("pruned", "128"):
        counted = dict.fromkeys(("returns", "whole", "path", "recomputed", "missing"), 0)

        def watch(
            given: Iterable[events.Event], at: Controller, count: dict[str, int] = counted
        ) -> Iterator[events.Event]:
            last = 0
            for event in given:
                before = at.executor.tier[0].copy() if isinstance(event, events.Transition) else []
                yield event
                if not isinstance(event, events.Transition):
                    continue
                (leaf,) = event.leaves
                above = at.tree.nodes[leaf].parent
                if above != last:
                    path = at.tree.path(above)
                    now = at.executor.tier[0]
                    count["returns"] += 1
                    count["path"] += len(path)
                    gone = sum(now[t] == Tier.EVICTED for t in path)
                    back = sum(
                        before[t] == Tier.EVICTED and now[t] == Tier.HBM for t in path.tolist()
                    )
                    count["missing"] += gone
                    count["recomputed"] += back
                    count["whole"] += not gone and not back
                last = leaf

        paths = trees.Paths()
        executor = SimulatedExecutor.of(machine, cell.policy, episode.info)
        play_episode(episode, cell, executor, meters=[paths], watch=watch)
        assert counted == {
            "returns": paths.returns, "whole": paths.served_whole, "path": paths.path_tokens,
            "recomputed": paths.recomputed_tokens, "missing": paths.missing_tokens,
        }  # fmt: skip
        lost += counted["missing"]
    assert lost > 0 or policy in ("full", "arborkv")


def test_a_budget_that_holds_no_search_is_a_row(trees: Any) -> None:
    rows = list(trees.replayed("pruned", "word", "least recent blocks", "0.1"))
    assert [row["feasible"] for row in rows] == [False] * len(trees.searches("pruned", "word"))
    rows = list(trees.replayed("pruned", "word", "least recent blocks", "0.98"))
    assert all(row["feasible"] for row in rows)


def test_two_rows_from_the_raw_results() -> None:
    """A return finds all of its path at a quarter of the tokens; what it builds on was active."""
    frame = pd.read_parquet(ROOT / "reports" / "claims" / "trees.parquet")
    (paper,) = (
        each for each in read_papers(ROOT / "reports" / "claims", ROOT) if each.key == "arborkv"
    )
    numbers = {row.claim.id: {n.label: n for n in row.numbers} for row in paper.rows}

    peaks = {
        policy: rows["peak_tokens"].sum()
        for policy, rows in frame[
            frame["search"].eq("pruned") & frame["length"].eq("128")
            & frame["budget"].isin(["1", "0.25"])
        ].groupby("policy")
    }  # fmt: skip
    found = numbers["arborkv-trees-peak"]["peak tokens, full / ArborKV at 0.25"]
    assert found.ours == pytest.approx(peaks["full"] / peaks["arborkv"])

    shape = frame[frame["experiment"].eq("shape")]
    away = numbers["arborkv-trees-inactive-branches"]
    for search, label in (
        ("pruned", "thoughts that build on a block off the active path, depth first"),
        ("dpts on chain", "DPTS on chain"),
    ):
        rows = shape[shape["search"].eq(search) & shape["length"].isin(["128", "recorded"])]
        assert away[label].ours == pytest.approx(rows["off_path_visits"].sum() / len(rows))
        assert away[label].n == len(rows)
