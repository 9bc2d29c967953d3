"""The shipped traces are what the manifest says, and real searches."""

from __future__ import annotations

import hashlib
import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

from arborsim.core.observations import Signal
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Capture, Kind

TRACES = Path(__file__).parents[1] / "traces"
MANIFEST = json.loads((TRACES / "manifest.json").read_text())


def test_all_of_traces_is_small() -> None:
    assert sum(f.stat().st_size for f in TRACES.rglob("*") if f.is_file()) < 25e6


@pytest.mark.parametrize("name", ["chain-linear", "chain-tree", "chain-vectors", "game24-tot"])
def test_manifest(name: str) -> None:
    path, entry = TRACES / f"{name}.parquet", MANIFEST[name]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
    reader = TraceReader(path)
    assert reader.num_episodes == entry["episodes"]
    assert reader.info.seed == entry["seed"]
    assert reader.info.capture is (Capture.QKV if name == "chain-vectors" else Capture.SIGNALS)
    assert f"{name}.parquet" in reader.info.command


def test_the_card_says_what_the_files_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = (TRACES / "README.md").read_text()
    for name in MANIFEST:
        path = TRACES / f"{name}.parquet"
        rows = pd.read_parquet(path, columns=["episode", "kind", "node", "correct"])
        counts = rows["kind"].astype(str).value_counts()
        nodes = rows.groupby("episode")["node"].nunique().sum()
        right = rows["correct"][rows["kind"] == "answer"].astype(bool).sum()
        tokens = f"{counts['prefill']:,} | {counts['token']:,}"
        assert f"| {counts['answer']} | {tokens} | {nodes:,} | {right} |" in card, name
        assert f"| {path.stat().st_size / 1e6:.1f} |" in card
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert code
    monkeypatch.chdir(TRACES.parent)
    exec(code.group(1), {})
    assert "attention to positions [" in capsys.readouterr().out


def test_chains_are_long() -> None:
    lengths = [
        int((e.kind == Kind.TOKEN).sum())
        for e in TraceReader(TRACES / "chain-linear.parquet").episodes()
    ]
    assert len(lengths) >= 8
    assert min(lengths) >= 800


def test_vectors_give_back_the_recorded_attention() -> None:
    """The mean over layers and heads of rows made from queries and keys is the recorded row."""
    reader = TraceReader(TRACES / "chain-vectors.parquet")
    assert reader.info.qkv_layers == tuple(range(reader.info.geometry.layers))
    for episode in reader.episodes([Signal.ATTENTION, Signal.HEAD_ATTENTION]):
        assert episode.attention is not None
        assert episode.head_attention is not None
        for t in range(0, episode.num_tokens, 7):
            made = episode.head_attention.row(t).mean((0, 1))
            np.testing.assert_allclose(made, episode.attention.row(t), atol=2e-3)


def test_trees_backtrack() -> None:
    """A search that returns to a node after it worked elsewhere, in every tree."""
    episodes = list(TraceReader(TRACES / "chain-tree.parquet").episodes())
    assert len(episodes) >= 8
    for episode in episodes:
        parent = dict(zip(episode.node.tolist(), episode.parent.tolist(), strict=True))
        token_nodes = episode.node[episode.kind == Kind.TOKEN]
        worked = token_nodes[np.r_[True, np.diff(token_nodes) != 0]].tolist()
        backtracks = sum(parent[b] != a for a, b in pairwise(worked))
        assert backtracks >= 1
        on_one_path = int(episode.position.max()) + 1
        assert episode.num_tokens > on_one_path


def test_tree_of_thoughts_beats_greedy_on_held_out_puzzles() -> None:
    """Same puzzles, same model; 95% Clopper-Pearson intervals do not overlap."""
    pytest.importorskip("torch")
    from arborsim_torch.reference import load
    from arborsim_torch.reference.decoder import generate

    episodes = list(TraceReader(TRACES / "game24-tot.parquet").episodes())
    assert len(episodes) >= 30
    searched = sum(int(e.correct[e.kind == Kind.ANSWER][0]) for e in episodes)
    model, task = load("game24")
    problems = [task.problem("test", index) for index in range(len(episodes))]
    made = generate(model, task, problems, batch=64)
    greedy = sum(task.judge(p, g.tokens).correct for p, g in zip(problems, made, strict=True))

    def interval(k: int) -> tuple[float, float]:
        found = binomtest(k, len(episodes)).proportion_ci(0.95, method="exact")
        return found.low, found.high

    assert interval(searched)[0] > interval(greedy)[1]


def test_recorded_answers_are_what_the_verifier_says() -> None:
    """Every answer is judged again from the recorded tokens of its path."""
    pytest.importorskip("torch")
    from arborsim_torch.reference import get_task

    for name, model in (
        ("game24-tot", "game24"),
        ("chain-tree", "chain"),
        ("chain-linear", "chain"),
        ("chain-vectors", "chain"),
    ):
        reader = TraceReader(TRACES / f"{name}.parquet")
        parameters = reader.info.search_parameters
        task = get_task(model, **{k[5:]: v for k, v in parameters.items() if k.startswith("task.")})
        for episode in reader.episodes():
            problem = task.problem("test", parameters["first"] + episode.index)
            answer = int(np.flatnonzero(episode.kind == Kind.ANSWER)[0])
            chain, node = set(), int(episode.node[answer])
            parent = dict(zip(episode.node.tolist(), episode.parent.tolist(), strict=True))
            while node >= 0:
                chain.add(node)
                node = parent[node]
            rows = episode.token_rows
            path = [
                int(t)
                for t, row in zip(episode.token, rows, strict=True)
                if int(episode.node[row]) in chain
            ]
            prompt = len(problem.prompt)
            assert path[:prompt] == list(problem.prompt)
            verdict = task.judge(problem, path[prompt:])
            assert verdict.correct == bool(episode.correct[answer])
