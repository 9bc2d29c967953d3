"""Moments of queries, and what is expected of queries to come, against plain NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from arborsim.core.observations import Signal
from arborsim.core.shape import Rope
from arborsim.core.tree import ThoughtTree
from arborsim.policies.methods import expected_attention
from arborsim.policies.methods.expected_attention import ExpectedAttention, QueryMoments
from arborsim.trace.episode import Episode, play
from arborsim.trace.reader import TraceReader
from tests.helpers.plain_executor import decide_all
from tests.helpers.traces import make_trace

ROPE = Rope((1.0, 0.3, 0.1, 0.03), 1.1)


def episode_of(path: Path, prompt: int = 30, kind: str = "tree") -> Episode:
    make_trace(
        path, 3, 1, kind, 2, prompt, capture="qkv", qkv_layers=(0, 1), rope=ROPE, nodes=9,
    )  # fmt: skip
    return next(iter(TraceReader(path).episodes(tuple(ExpectedAttention().reads()))))


def moments(episode: Episode, skip: int) -> np.ndarray:
    state, tree = QueryMoments(skip).start(2), ThoughtTree()
    for event in play(episode):
        run = getattr(event, "run", None)
        for node, parent in getattr(event, "opened", ()) or ():
            tree.open(node, parent)
        if run is not None:
            if not tree.nodes:
                tree.open(0, -1)
            tree.append(run.leaves, run.steps)
            state.begin(run, tree, bool(tree.num_tokens > run.num_tokens))
    return state.values


@pytest.mark.parametrize("skip", [0, 4])
def test_moments_are_those_of_the_queries_before_rope(tmp_path: Path, skip: int) -> None:
    episode = episode_of(tmp_path / "t.parquet")
    counted = episode.position >= skip
    rows = episode.head_attention
    assert rows is not None
    queries = np.stack([rows.query(i) for i in range(episode.num_tokens)])[counted]
    plain = ROPE.unrotate(queries, episode.position[counted][:, None, None])
    found = moments(episode, skip)
    assert found.shape == (8, 9, 9)
    for head in range(8):
        own = plain[:, head // 4, head % 4]
        assert found[head, 0, 0] == counted.sum()
        np.testing.assert_allclose(found[head, 0, 1:], own.sum(axis=0), atol=1e-9)
        np.testing.assert_allclose(found[head, 1:, 1:], own.T @ own, atol=1e-9)


def test_long_runs_are_taken_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    episode = episode_of(tmp_path / "t.parquet", prompt=40)
    whole = moments(episode, 4)
    monkeypatch.setattr(expected_attention, "_AT_ONCE", 3)
    np.testing.assert_allclose(moments(episode, 4), whole, atol=1e-9)


def test_a_prompt_shorter_than_the_sinks(tmp_path: Path) -> None:
    """No query counts until the first decision is due."""
    episode = episode_of(tmp_path / "t.parquet", prompt=1, kind="linear")
    tiers, moves = decide_all(ExpectedAttention(interval=2, sinks=3), episode, 5)
    assert len(moves)
    assert max(sum(t == 0 for t in snapshot) for snapshot in tiers) <= 5 * 4


def test_queries_are_no_attention_rows() -> None:
    assert ExpectedAttention().fused
    assert Signal.HEAD_ATTENTION in ExpectedAttention().reads()
