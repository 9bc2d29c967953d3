"""`arborsim fidelity` against literal forward passes, its log, its files and its bad input."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import arborsim
from arborsim.cli.app import main
from arborsim.products.fidelity.results import FidelityResults
from arborsim.products.fidelity.tables import Estimate, closest, rows_of

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.helpers.smollm2 import smollm2  # noqa: E402
from tests.live.tiny import plain_copy, save_tiny  # noqa: E402

#: Prompt and following tokens: ids of the reference model's vocabulary.
PROMPT, FOLLOWING, SINKS = 12, 40, 4


def documents() -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(3)
    drawn = [rng.integers(3, 40, PROMPT + FOLLOWING).tolist() for _ in range(3)]
    return [(ids[:PROMPT], ids[PROMPT:]) for ids in drawn]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("f") / "ids.jsonl"
    lines = [json.dumps({"prompt": p, "tokens": t}) for p, t in documents()]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def found(prompts: Path) -> FidelityResults:
    return arborsim.fidelity(
        model="chain", prompts=prompts, policies="h2o,streaming-llm,kivi,quest,snapkv",
        budgets=[24, 1.0], settings={"h2o.per": "shared"}, out=prompts.with_name("run.jsonl"),
    )  # fmt: skip


# --- a literal implementation: plain forward passes with explicit masks ---


@cache
def model() -> Any:
    from arborsim_torch import reference

    return plain_copy(reference.load("chain")[0])


def passed(ids: list[int], allowed: np.ndarray, of: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities ``[n, vocabulary]``, and attention rows ``[n, n]``, mean over all heads."""
    mask = torch.where(torch.tensor(allowed), 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        out = (of or model())(torch.tensor([ids]), attention_mask=mask, output_attentions=True)
    rows = torch.stack(out.attentions)[:, 0].double().mean((0, 1)).numpy()
    return torch.log_softmax(out.logits[0].double(), -1).numpy(), rows


def literal(prompt: list[int], tokens: list[int], evict: Callable[..., list[int]]) -> pd.Series:
    """KL, agreement and perplexities of a document whose cache `evict` cuts after every token."""
    ids = prompt + tokens
    n = len(ids)
    causal = np.tril(np.ones((n, n), dtype=bool))
    allowed, kept, scores = causal.copy(), list(range(len(prompt))), np.zeros(n)
    _, rows = passed(prompt, causal[: len(prompt), : len(prompt)])
    scores[: len(prompt)] = rows.sum(0)
    kept = evict(kept, scores)
    for t in range(len(prompt), n):
        kept.append(t)
        allowed[t] = False
        allowed[t, kept] = True
        _, rows = passed(ids[: t + 1], allowed[: t + 1, : t + 1])
        scores[: t + 1] += rows[t]
        kept = evict(kept, scores)
    full, own = passed(ids, causal)[0], passed(ids, allowed)[0]
    judged = np.arange(len(prompt), n - 1)
    target = np.asarray(ids)[judged + 1]
    return pd.Series({
        "kl": (np.exp(full) * (full - own)).sum(1)[judged].mean(),
        "kl_tail": np.quantile((np.exp(full) * (full - own)).sum(1)[judged], 0.95),
        "agreement": (full.argmax(1) == own.argmax(1))[judged].mean(),
        "nll": -own[judged, target].mean(),
        "full_nll": -full[judged, target].mean(),
    })  # fmt: skip


def streaming(budget: int) -> Callable[..., list[int]]:
    def evict(kept: list[int], scores: np.ndarray) -> list[int]:
        over = max(0, len(kept) - budget)
        return kept[:SINKS] + kept[SINKS + over :]

    return evict


def heavy_hitters(budget: int) -> Callable[..., list[int]]:
    def evict(kept: list[int], scores: np.ndarray) -> list[int]:
        kept = list(kept)
        while len(kept) > budget:
            old = kept[: len(kept) - budget // 2]
            kept.remove(min(old, key=lambda i: (scores[i], i)))
        return kept

    return evict


@pytest.mark.parametrize(
    ("policy", "evict"), [("streaming-llm", streaming), ("h2o", heavy_hitters)]
)
def test_figures_are_those_of_plain_passes_with_explicit_masks(
    found: FidelityResults, policy: str, evict: Any
) -> None:
    wanted = pd.DataFrame([literal(p, t, evict(24)) for p, t in documents()[:2]])
    frame = found.to_pandas().query("policy == @policy and budget == '24' and episode < 2")
    n = FOLLOWING - 1
    counts = frame.filter(like="counts_").to_numpy()
    assert (counts.sum(1) == n).all()
    for name in ("kl", "nll", "full_nll"):
        columns = frame[[f"{name}_{part}" for part in range(1, 9)]].to_numpy()
        np.testing.assert_allclose((columns * counts).sum(1) / n, wanted[name], atol=1e-4)
    agree = frame[[f"agree_{part}" for part in range(1, 9)]].to_numpy().sum(1) / n
    np.testing.assert_allclose(agree, wanted["agreement"], atol=1e-9)
    np.testing.assert_allclose(frame["kl_tail"], wanted["kl_tail"], atol=2e-4)


def test_a_real_model_agrees_with_one_pass_under_a_sliding_mask(tmp_path: Path) -> None:
    twin = plain_copy(smollm2().model).float()
    n, head, budget = 40, 10, 16
    ids = np.random.default_rng(0).integers(100, 9000, n).tolist()
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"prompt": ids[:head], "tokens": ids[head:]}))
    own = arborsim.fidelity(
        model="smollm2", prompts=path, policies="streaming-llm", budgets=budget, dtype="float32"
    ).to_pandas().query("policy == 'streaming-llm'").iloc[0]  # fmt: skip
    at, before = np.arange(n)[:, None], np.arange(n)[None]
    window = (before < SINKS) | (before >= at - (budget - SINKS))  # of what is behind, and itself
    causal = before <= at
    full, lost = (passed(ids, allowed, twin)[0] for allowed in (causal, causal & window))
    judged = np.arange(head, n - 1)
    counts = np.array([own[f"counts_{part}"] for part in range(1, 9)])
    mean = sum(own[f"kl_{part}"] * counts[part - 1] for part in range(1, 9)) / counts.sum()
    wanted = (np.exp(full) * (full - lost)).sum(1)[judged].mean()
    assert counts.sum() == len(judged)
    assert wanted > 0.01
    assert mean == pytest.approx(wanted, abs=1e-4)


def test_full_retention_is_itself_and_a_whole_budget_changes_nothing(
    found: FidelityResults,
) -> None:
    rows = found.summary()
    full = rows[rows["policy"] == "full"].iloc[0]
    assert (full["kl"], full["agreement"], full["ratio"]) == (0, 1, 1)
    whole = rows[rows["budget"] == "1"]
    assert set(whole["policy"]) == {"h2o", "streaming-llm", "quest", "snapkv"}
    assert (whole["kl"] < 1e-6).all()  # rounding of blocks against single tokens
    assert (whole["ratio"] - 1).abs().max() < 1e-4
    assert (rows["tokens"] == 3 * (FOLLOWING - 1)).all()
    evicting = rows.query("budget == '24' and policy in ('h2o', 'streaming-llm', 'quest')")
    assert (evicting["kl"] > 0.01).all()
    assert (evicting["kl_low"] <= evicting["kl"]).all()


def test_bytes_are_those_that_were_held(found: FidelityResults) -> None:
    rows = found.summary().set_index(["policy", "budget"])["peak_kv_bytes"]
    each = found.raw.facts.kv_bytes_per_token
    assert rows["full", "any"] == each * (PROMPT + FOLLOWING)
    assert rows["snapkv", "24"] == rows["full", "any"]
    assert each * 24 <= rows["streaming-llm", "24"] <= each * 26


def test_the_log_and_a_table_hold_the_results(
    found: FidelityResults, prompts: Path, tmp_path: Path
) -> None:
    for path in (prompts.with_name("run.jsonl"), found.save(tmp_path / "r.parquet")):
        again = arborsim.load_results(path)
        assert isinstance(again, FidelityResults)
        assert (again.metadata, str(again)) == (found.metadata, str(found))
        pd.testing.assert_frame_equal(again.to_pandas(), found.to_pandas())
        pd.testing.assert_frame_equal(again.summary(), found.summary())
    page = found.report(tmp_path / "page.html").read_text()
    assert "117 judged tokens of 3 documents" in page
    assert "h2o per=shared" in page
    assert all(found.plot(kind).data for kind in ("budget", "pareto", "position"))


def test_a_resumed_run_ends_with_the_same_bytes(
    found: FidelityResults, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, part = prompts.with_name("run.jsonl"), tmp_path / "part.jsonl"
    lines = whole.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(lines[:-3]) + lines[-3][:40])  # killed while it wrote
    words = found.metadata["command"].split()[1:]
    assert main([*words, "--out", str(part), "--resume"]) == 0
    assert part.read_bytes() == whole.read_bytes()
    assert "cannot be distinguished" in capsys.readouterr().out
    assert main([*words, "--out", str(part), "--resume", "--first", "1"]) == 2
    assert "results of another request" in capsys.readouterr().err


def test_a_policy_is_called_closest_only_where_intervals_are_apart(found: FidelityResults) -> None:
    rows = [row for row in rows_of(found.raw) if row.budget == "24" and row.bounded]
    one, other = (replace(each, bounded=True) for each in rows[:2])
    near = replace(one, kl=Estimate(0.1, 0.09, 0.12))
    assert closest([near, replace(other, kl=Estimate(0.2, 0.13, 0.3))]) == near
    assert closest([near, replace(other, kl=Estimate(0.2, 0.11, 0.3))]) is None
    assert closest([replace(one, kl=Estimate(0.1)), replace(other, kl=Estimate(9.0))]) is None
    assert closest([near, replace(other, kl=Estimate(0.0, 0.0, 0.0), bounded=False)]) is None


def test_masked_runs_find_what_live_runs_find(found: FidelityResults, prompts: Path) -> None:
    masked = arborsim.fidelity(
        model="chain", prompts=prompts, policies="h2o,streaming-llm,kivi,quest,snapkv",
        budgets=24, settings={"h2o.per": "shared"}, masked=True, documents=2,
    ).to_pandas()  # fmt: skip
    live = found.to_pandas().query("episode < 2 and budget != '1'")
    keys = ["episode", "policy", "budget"]
    one, other = (each.set_index(keys).sort_index() for each in (live, masked))
    assert list(one.index) == list(other.index)
    for name in ("kl", "nll", "full_nll"):
        figures = [f"{name}_{part}" for part in range(1, 9)]
        np.testing.assert_allclose(one[figures], other[figures], atol=1e-4)
    assert (one["budget_tokens"] == other["budget_tokens"]).all()
    assert (other["peak_kv_bytes"] == 0).all()


# --- texts ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("t") / "words.txt"
    path.write_text(" ".join(f"w{20 + i * 7 % 40}" for i in range(100)))
    return path


def test_a_text_is_cut_into_documents(folder: Path, text: Path) -> None:
    made = arborsim.fidelity(model=str(folder), text=text, tokens=40, policies="tova", budgets=0.5)
    frame = made.to_pandas().query("policy == 'tova'")
    assert frame["document"].tolist() == [f"words.txt, part {i}" for i in (1, 2, 3)]
    assert frame["tokens"].tolist() == [40, 40, 20]
    assert frame["budget_tokens"].tolist() == [20, 20, 10]
    # A quarter is the prompt, and neither it nor the token after it is judged.
    assert frame.filter(like="counts_").sum(axis=1).tolist() == [29, 29, 14]


def test_what_full_retention_generates_is_judged(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "w1 w2 w3 w4 w5 w6"}\n{"prompt": [7, 8, 9, 10]}\n')
    made = arborsim.fidelity(
        model=str(folder), prompts=path, generate=12, policies="streaming-llm", budgets=6
    )
    full = made.to_pandas().query("policy == 'full'")
    assert (full["tokens"] <= [18, 16]).all()
    assert not math.isnan(made.summary()["kl"].max())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--text", "missing.txt"), "no such file of text"),
        (("--text", "EMPTY"), "the text is empty"),
        (("--text", "TEXT", "--budget", "4000"), "fit into --budget 4000"),
        (("--text", "TEXT", "--budget", "100"), "fit into --budget 100"),
        (("--text", "ONE"), "0 tokens follow the prompt"),
        (("--text", "TEXT", "--prefill", "1"), "give a share below 1"),
        (("--text", "TEXT", "--tokens", "9000", "--first", "5"), "--first 5"),
        (("--text", "TEXT", "--generate", "5"), "leave out --prompts and --generate"),
        (("--prompts", "missing.jsonl"), "no such file of prompts"),
        (("--prompts", "PROMPT"), "--generate N"),
        (("--prompts", "PROMPT", "--generate", "9000"), "positions"),
        (("--prompts", "FAR"), "has id 900"),
        ((), "give --text or --prompts"),
        (("--model", "chain", "--text", "TEXT"), "has no tokeniser"),
        (("--text", "TEXT", "--policy", "oracle"), "needs the future"),
        (("--text", "TEXT", "--resume"), "--resume needs --out"),
    ],
)
def test_what_cannot_work_is_one_line(
    folder: Path, text: Path, tmp_path: Path, options: tuple[str, ...], said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    files = {"EMPTY": " \n", "ONE": "w1", "PROMPT": '{"prompt": "w1 w2"}',
             "FAR": '{"prompt": [1], "tokens": [2, 900]}', "TEXT": text.read_text()}  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    given = [str(tmp_path / each) if each in files else each for each in options]
    model = [] if "--model" in options else ["--model", str(folder)]
    policy = [] if "--policy" in options else ["--policy", "h2o"]
    assert main(["fidelity", *model, *policy, *given]) == 2
    error = capsys.readouterr().err.splitlines()
    assert said in error[-1]
    assert sum(line.startswith("arborsim: ") for line in error) <= 2
