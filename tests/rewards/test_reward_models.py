"""``arborsim record --reward FOLDER``: its rewards are those of transformers on the same text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from arborsim.cli.app import main
from arborsim.trace.reader import Episode, TraceReader
from arborsim.trace.schema import Kind
from arborsim_torch.reference import get_task
from tests.rewards.tiny_rewards import BYTES, WORDS, save_model, word_tokenizer

SEARCH = ("--model", "game24", "--search", "rebase", "--set", "width=6", "--episodes", "2")
GAME = get_task("game24")


def record(out: Path, *arguments: object) -> TraceReader:
    assert main(["record", "--out", str(out), *map(str, (*SEARCH, *arguments))]) == 0
    return TraceReader(out)


def paths(episode: Episode, marks: bool) -> list[tuple[float, str, list[str]]]:
    """Of each rewarded thought its reward, the prompt and every step to it; with <bos> or not."""
    words: dict[int, list[str]] = {}
    parent: dict[int, int] = {}
    for row, token in zip(episode.token_rows, episode.token, strict=True):
        node, word = int(episode.node[row]), GAME.vocab.vocab[token]
        parent[node] = int(episode.parent[row])
        words.setdefault(node, [])
        if marks or not word.startswith("<"):
            words[node].append(word)
    found = []
    for row in np.flatnonzero(episode.kind == Kind.BOUNDARY):
        node, steps = int(episode.node[row]), []
        while node > 0:
            steps.insert(0, " ".join(words[node]))
            node = parent[node]
        found.append((float(episode.reward[row]), " ".join(words[0]), steps))
    return found


def checked(reader: TraceReader, expected: Any, marks: bool = False) -> None:
    """Every reward is `expected(prompt, steps)`, and they are not all alike."""
    rewards = []
    for episode in reader.episodes():
        for reward, prompt, steps in paths(episode, marks):
            assert reward == pytest.approx(expected(prompt, steps), abs=2e-6)
            rewards.append(reward)
    assert len(rewards) >= 20
    assert np.std(rewards) > 0.01


@torch.no_grad()
def test_a_sequence_classifier_with_its_own_tokeniser(tmp_path: Path) -> None:
    folder = save_model(
        tmp_path / "orm", "ForSequenceClassification", vocab=len(WORDS), num_labels=1,
        tokenizer=word_tokenizer(), pad_token_id=1,
    )  # fmt: skip
    model = transformers.LlamaForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def expected(prompt: str, steps: list[str]) -> float:
        text = tokenizer(f"{prompt} {' '.join(steps)}", return_tensors="pt")
        return float(model(**text).logits[0, 0].sigmoid())

    reader = record(tmp_path / "t.parquet", "--reward", folder)
    checked(reader, expected)
    assert reader.info.search_parameters["reward"] == "orm"


@torch.no_grad()
def test_a_conversation_where_the_tokeniser_has_a_template(tmp_path: Path) -> None:
    folder = save_model(
        tmp_path / "orm", "ForSequenceClassification", vocab=len(WORDS), num_labels=2,
        tokenizer=word_tokenizer(chat=True), pad_token_id=1, id2label={0: "good", 1: "bad"},
    )  # fmt: skip
    model = transformers.LlamaForSequenceClassification.from_pretrained(folder).eval()

    def expected(prompt: str, steps: list[str]) -> float:
        text = f"= {prompt} - * {' '.join(steps)} -"
        ids = torch.tensor([[WORDS.index(word) for word in text.split()]])
        return float(model(ids).logits[0].softmax(-1)[0])

    checked(record(tmp_path / "t.parquet", "--reward", folder, "--reward-label", "good"), expected)


@torch.no_grad()
def test_without_tokeniser_it_reads_the_searched_models_ids(tmp_path: Path) -> None:
    folder = save_model(
        tmp_path / "orm", "ForSequenceClassification", vocab=GAME.vocab_size, num_labels=1
    )
    model = transformers.LlamaForSequenceClassification.from_pretrained(folder).eval()

    def expected(prompt: str, steps: list[str]) -> float:
        ids = GAME.vocab.encode([*prompt.split(), *" ".join(steps).split()])
        return float(model(torch.tensor([ids])).logits[0, 0].sigmoid())

    checked(record(tmp_path / "t.parquet", "--reward", folder), expected, marks=True)


@pytest.mark.parametrize("aggregate", ["last", "min", "prod"])
@torch.no_grad()
def test_a_step_token_model(aggregate: str, tmp_path: Path) -> None:
    folder = save_model(
        tmp_path / "prm", "ForCausalLM", vocab=len(WORDS), tokenizer=word_tokenizer()
    )
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    good, bad, step = (WORDS.index(word) for word in ("+", "-", "ки"))

    def expected(prompt: str, steps: list[str]) -> float:
        text = prompt + " " + "\n".join(f"{part} ки" for part in steps)
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        at_steps = model(ids).logits[0][ids[0] == step]
        scores = at_steps[:, [good, bad]].softmax(-1)[:, 0].tolist()
        assert len(scores) == len(steps)
        return {"last": scores[-1], "min": min(scores), "prod": math.prod(scores)}[aggregate]

    options = ("--reward-token", "ки", "--reward-aggregate", aggregate)
    checked(record(tmp_path / "t.parquet", "--reward", folder, *options), expected)


@torch.no_grad()
def test_a_step_token_model_on_shared_ids(tmp_path: Path) -> None:
    """Scored at ")" and asked for Y against N, behind the value token of every line."""
    folder = save_model(tmp_path / "prm", "ForCausalLM", vocab=GAME.vocab_size)
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    pair = GAME.vocab.encode(["Y", "N"])

    def expected(prompt: str, steps: list[str]) -> float:
        words = prompt.split()
        for step in steps:
            words += step.split() + ([] if step.endswith(")") else [")"])
        logits = model(torch.tensor([GAME.vocab.encode(words)])).logits[0, -1]
        return float(logits[pair].softmax(-1)[0])

    options = ("--reward-token", ")", "--reward-label", "Y,N")
    reader = record(tmp_path / "t.parquet", "--reward", folder, *options)
    checked(reader, expected, marks=True)


@pytest.mark.parametrize("token", ["", "ки"])
@torch.no_grad()
def test_a_classifier_of_steps(token: str, tmp_path: Path) -> None:
    folder = save_model(
        tmp_path / "prm", "ForTokenClassification", vocab=len(WORDS), num_labels=2,
        tokenizer=word_tokenizer(),
    )  # fmt: skip
    model = transformers.LlamaForTokenClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def expected(prompt: str, steps: list[str]) -> float:
        text = prompt + " " + "\n".join(f"{part} {token}".strip() for part in steps)
        logits = model(**tokenizer(text, return_tensors="pt")).logits[0]
        ends = np.cumsum([len(part.split()) + bool(token) for part in steps])
        at_steps = logits[torch.tensor(ends + len(prompt.split()))]
        return float(at_steps.softmax(-1)[:, 1].min())

    options = ("--reward-token", token, "--reward-aggregate", "min")
    checked(record(tmp_path / "t.parquet", "--reward", folder, *options), expected)


@pytest.mark.parametrize("own", [True, False], ids=["own tokeniser", "shared ids"])
@torch.no_grad()
def test_plain_prompts(own: bool, tmp_path: Path) -> None:
    policy = save_model(
        tmp_path / "policy", "ForCausalLM", vocab=len(WORDS), tokenizer=word_tokenizer(), seed=1
    )
    folder = save_model(
        tmp_path / "prm", "ForCausalLM", vocab=400, tokenizer=BYTES if own else None
    )
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 2 = <unk>"}\n{"prompt": "( 7 )"}\n')
    out = tmp_path / "t.parquet"
    arguments = [
        "--model", policy, "--prompts", tmp_path / "prompts.jsonl", "--search", "beam-4", "--set",
        "width=8", "--max-tokens", 12, "--thought-tokens", 4, "--reward", folder,
        "--reward-token", "=", "--reward-label", "+,-", "--out", out,
    ]  # fmt: skip
    assert main(["record", *map(str, arguments)]) == 0
    special = {WORDS.index(word) for word in ("<unk>", "<pad>", "<s>")}
    thoughts = 0
    for episode in TraceReader(out).episodes():
        ids: dict[int, list[int]] = {}
        for row, token in zip(episode.token_rows, episode.token, strict=True):
            ids.setdefault(int(episode.node[row]), []).append(int(token))
        parents = dict(zip(episode.node.tolist(), episode.parent.tolist(), strict=True))
        for row in np.flatnonzero(episode.kind == Kind.BOUNDARY):
            node, steps = int(episode.node[row]), []
            while node > 0:
                steps.insert(0, ids[node])
                node = parents[node]
            parts = [ids[0], *steps]
            if own:
                said = [" ".join(WORDS[i] for i in part if i not in special) for part in parts]
                marked = [text if text.endswith("=") else f"{text} =".strip() for text in said[1:]]
                read = BYTES(f"{said[0]} " + "\n".join(marked))["input_ids"]
                pair = [BYTES(sign)["input_ids"][0] for sign in "+-"]
            else:
                step = WORDS.index("=")
                read = sum(([*p, step] if p[-1] != step else p for p in steps), list(ids[0]))
                pair = [WORDS.index(sign) for sign in "+-"]
            logits = model(torch.tensor([read])).logits[0, -1, pair]
            assert episode.reward[row] == pytest.approx(float(logits.softmax(-1)[0]), abs=2e-6)
            thoughts += 1
    assert thoughts >= 24


def test_what_it_takes_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model(
        tmp_path / "orm", "ForSequenceClassification", vocab=GAME.vocab_size, num_labels=1
    )
    reader = record(tmp_path / "t.parquet", "--reward", folder)
    timing = reader.info.timing
    parameters = transformers.LlamaForSequenceClassification.from_pretrained(
        folder
    ).num_parameters()
    assert timing["reward_weight_bytes"] == 4 * parameters
    episodes = list(reader.episodes())
    assert timing["reward_texts"] == sum((e.kind == Kind.BOUNDARY).sum() for e in episodes)
    # Keys and values of 2 layers, 2 heads, 8 numbers of 4 bytes, for all paths of one iteration.
    per_token = 2 * 2 * 2 * 8 * 4
    batches = []
    for e in episodes:
        closed = e.iteration[e.kind == Kind.BOUNDARY]
        for iteration in np.unique(closed):
            length = e.position[e.iteration[e.token_rows] == iteration].max() + 1
            batches.append(int(length * (closed == iteration).sum()))
    assert timing["reward_tokens"] == sum(batches)
    assert timing["reward_peak_kv_bytes"] == max(batches) * per_token
    assert 0 < timing["reward_s"] < timing["decode_s"]
    closing = capsys.readouterr().out.splitlines()[-1]
    assert closing.startswith(f"reward model orm: {int(timing['reward_texts'])} thoughts, ")
    assert "KV up to" in closing


def test_live_searches_take_the_same_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under full retention a live search is the recorded one."""
    folder = save_model(
        tmp_path / "orm", "ForSequenceClassification", vocab=GAME.vocab_size, num_labels=1
    )
    reader = record(tmp_path / "t.parquet", "--reward", folder, "--capture", "tree")
    capsys.readouterr()
    log = tmp_path / "log.jsonl"
    options = ("--task", "game24", "--policy", "full", "--reward", folder, "--out", log)
    assert main(["live", *map(str, (*SEARCH, *options))]) == 0
    thoughts = int(reader.info.timing["reward_texts"])
    assert f"reward model orm: {thoughts} thoughts, " in capsys.readouterr().out
    head, *results = map(json.loads, log.read_text().splitlines())
    assert head["request"]["reward"]["name"] == str(folder)
    tokens = [(e.kind == Kind.TOKEN).sum() for e in reader.episodes()]
    assert [result["tokens"] for result in results] == tokens
