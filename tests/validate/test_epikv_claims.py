"""What the claims of EpiKV rest on: signals as recorded, searches as live ones, rows as stored."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from arborsim.core.observations import Signal  # noqa: E402
from arborsim.trace.reader import TraceReader  # noqa: E402
from benchmarks.claims import Store  # noqa: E402
from benchmarks.claims.epikv import (  # noqa: E402
    forward_rows,
    layers_of_paper,
    measure,
    read_later,
    request_rows,
    signals_of,
    smoothed,
    state_rows,
)
from benchmarks.register.claims import read_papers  # noqa: E402


def test_signals_are_those_of_the_shipped_recording() -> None:
    """A forward pass of transformers' own model gives what was recorded token by token."""
    pytest.importorskip("torch")
    from arborsim_torch import reference

    model, _ = reference.load("chain", attn_implementation="eager")
    reader = TraceReader(ROOT / "traces" / "chain-vectors.parquet")
    needs = (Signal.HIDDEN_CHANGE, Signal.KEY_VARIANCE, Signal.VALUE_VARIANCE, Signal.ATTENTION)
    episode = next(iter(reader.episodes(needs)))
    tokens = tuple(episode.token[episode.position >= 0].tolist())
    prompt = 84  # 16 lines of 5, and 4 more
    seen = measure(model, tokens[:prompt], tokens[prompt:])
    found = signals_of(seen, prompt)
    recorded = episode.per_layer
    for layer in range(6):
        change = recorded[Signal.HIDDEN_CHANGE][prompt:, layer]
        assert found["hidden change", layer] == pytest.approx(change, rel=2e-3)
    for name, signal in (
        ("key variance", Signal.KEY_VARIANCE), ("value variance", Signal.VALUE_VARIANCE),
    ):  # fmt: skip
        mean = recorded[signal][prompt:].mean(axis=1, dtype=np.float64)
        assert found[name, -1] == pytest.approx(mean, rel=2e-3)
    assert episode.attention is not None
    rows = np.zeros((len(tokens), len(tokens)))
    for t in range(len(tokens)):
        rows[t, : t + 1] = episode.attention.row(t)
    total = rows[:, prompt:].sum(axis=0)
    assert found["cumulative attention", -1] == pytest.approx(total, rel=0.02)


def test_a_rotation_changes_the_variance_of_keys() -> None:
    """Or the comparison of keys before and after RoPE would compare a signal with itself."""
    pytest.importorskip("torch")
    from arborsim_torch import reference

    model, task = reference.load("chain", attn_implementation="eager", lines=8)
    problem = task.problem("test", 0)
    seen = measure(model, problem.prompt, tuple(task.solution(problem)))
    norms = [np.linalg.norm(seen[what], axis=-1) for what in ("keys", "before")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    found = signals_of(seen, len(problem.prompt))
    after, before = (found[f"key variance{what}", -1] for what in ("", " before RoPE"))
    assert not np.allclose(after, before, rtol=1e-3)


def test_smoothings_are_literal() -> None:
    values = np.random.default_rng(0).normal(size=150)
    ways = smoothed(values)
    mean = values[0]
    for t, value in enumerate(values):
        window = values[max(0, t - 63) : t + 1]
        mean = 0.9 * mean + 0.1 * value if t else value
        z = (value - window.mean()) / (window.std() + 1e-6) if t else 0.0
        assert ways["rolling-64"][t] == pytest.approx(window.mean())
        assert ways["ema-0.9"][t] == pytest.approx(mean)
        assert ways["z-64"][t] == pytest.approx(z)


def test_attention_of_later_tokens_leaves_out_the_next_64() -> None:
    rows = np.tril(np.ones((100, 100)))
    rows[70:, 10] = 3.0
    later = read_later(rows, prompt=5)
    assert later[5] == 1 + 2 * 26 / 26  # token 10, read by tokens 74 to 99
    assert later[4] == 1
    assert np.isnan(later[31:]).all()
    assert not np.isnan(later[:31]).any()


def test_layers_of_the_paper() -> None:
    assert layers_of_paper(32) == (10, 21)
    assert layers_of_paper(6) == (2, 4)


@pytest.mark.parametrize(
    ("label", "experiment", "budget", "score"),
    [
        ("epikv", "cliff", "0.95", ("g2", "g4", "z-64")),
        ("kv-key", "family", "0.87", ("key", "", "rolling-64")),
    ],
)
def test_masked_searches_answer_what_live_ones_answered(
    label: str, experiment: str, budget: str, score: tuple[str, str, str]
) -> None:
    pytest.importorskip("torch")
    from arborsim_torch import reference
    from benchmarks.claims.frozen import Score, search

    stored = pd.read_parquet(ROOT / "reports" / "quality" / "results.parquet")
    live = stored[(stored.experiment == experiment) & (stored.budget == budget)]
    live = live[(live.label == label) & (live.episode < 6)].sort_values("episode")
    model, task = reference.load("chain", lines=32)
    problems = [task.problem("test", i) for i in range(6)]
    made = search(model, task, problems, Score(*score), budget, live.full_tokens.tolist())
    assert [found.correct for found in made] == live.correct.tolist()
    assert 0 < live.correct.sum() < 6


CLAIMS = ROOT / "reports" / "claims"


@pytest.fixture(scope="module")
def numbers() -> dict[tuple[str, str], float]:
    """Our numbers by claim and label."""
    (paper,) = (each for each in read_papers(CLAIMS, ROOT) if each.key == "epikv")
    return {(row.claim.id, n.label): n.ours for row in paper.rows for n in row.numbers}


def test_two_claims_worked_out_anew(numbers: dict[tuple[str, str], float]) -> None:
    rows = pd.read_parquet(CLAIMS / "epikv.parquet").to_dict("records")
    masked = {
        row["episode"]: row["correct"]
        for row in rows
        if row["experiment"] == "answers" and row["model"] == "chain" and row["budget"] == "0.87"
        and (row["plus"], row["minus"], row["smoothing"]) == ("g4", "g2", "z-64")
    }  # fmt: skip
    assert sorted(masked) == list(range(200))
    label = "EpiKV inverted (z_B - z_A), 87%"
    assert numbers["epikv-table-3-against-h2o", label] == sum(masked.values()) / 200
    seconds = {
        (row["gpu"], row["budget"], row["policy"]): row["as_run_s"]
        for row in rows
        if row["experiment"] == "replay"
    }
    ratio = seconds["l40s", "8192", "thinkv"] / seconds["l40s", "8192", "lag-kv"]
    made = numbers["epikv-table-6-thinkv", "ThinKV over Lag-KV, heads copied"]
    assert made == pytest.approx(ratio)


def test_simulated_cells_come_out_as_stored(tmp_path: Path) -> None:
    """What needs no model is made anew: rows equal to those that ship."""
    anew, stored = Store("epikv", tmp_path), Store("epikv", CLAIMS)
    anew.cell("forward", {"gpu": "a100-80"}, forward_rows)
    anew.cell("requests", {"gpu": "a100-80"}, request_rows)
    anew.cell("state", {"model": "llama-3.1-8b"}, state_rows)
    for row in anew.rows:
        assert row in stored.rows
