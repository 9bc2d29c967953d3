"""Rewards that cannot work are one line each, and leave no trace behind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from arborsim.cli.app import main
from arborsim_torch.reference import get_task
from tests.helpers.errors import without_size
from tests.rewards.tiny_rewards import WORDS, save_model, word_tokenizer

SEARCH = ("--model", "game24", "--search", "rebase", "--set", "width=6", "--episodes", "1")
GAME = get_task("game24")


def fail(capsys: pytest.CaptureFixture[str], out: Path, *arguments: object) -> str:
    """The one line that a failing command prints, but for the recording's size."""
    capsys.readouterr()
    assert main(["record", "--out", str(out / "t.parquet"), *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert len(without_size(error)) == 1, error
    assert not list(out.glob("*.parquet*"))
    return error


def test_what_cannot_work_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {"vocab": len(WORDS), "tokenizer": word_tokenizer()}

    def said(*arguments: object) -> str:
        return fail(capsys, tmp_path, *SEARCH, "--reward", *arguments)

    assert "did you mean verifier" in said("verifer")
    assert "no such folder" in said(tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert "that is a file" in said(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in said(tmp_path / "empty")
    assert "is for a reward model" in said("verifier", "--reward-token", "x")
    assert "is for a reward model" in said("value", "--reward-label", "x")
    assert "did you mean prod" in said("verifier", "--reward-aggregate", "prd")

    prm = save_model(tmp_path / "prm", "ForCausalLM", **words)
    assert "--reward-token" in said(prm)
    assert "5 tokens of the vocabulary" in said(prm, "--reward-token", "a b c d e")
    assert "needs two tokens" in said(prm, "--reward-token", "ки", "--reward-label", "+")
    orm = save_model(tmp_path / "orm", "ForSequenceClassification", num_labels=3, **words)
    assert "leave out --reward-token" in said(orm, "--reward-token", "ки")
    assert "leave out --reward-aggregate" in said(orm, "--reward-aggregate", "min")
    assert "0 (LABEL_0), 1 (LABEL_1), 2 (LABEL_2)" in said(orm)
    one = save_model(tmp_path / "one", "ForSequenceClassification", num_labels=1, **words)
    assert "no classes" in said(one, "--reward-label", "good")
    bare = save_model(tmp_path / "bare", "Model", **words)
    assert "LlamaModel, which scores nothing" in said(bare)

    small = save_model(tmp_path / "small", "ForSequenceClassification", vocab=50, num_labels=1)
    assert "only 50 of its 212" in said(small)
    word_tokenizer().save_pretrained(small)
    assert f"{len(WORDS)} tokens, but the model only 50" in said(small)
    short = save_model(
        tmp_path / "short", "ForSequenceClassification", num_labels=1,
        max_position_embeddings=12, **words,
    )  # fmt: skip
    assert "the model takes 12" in said(short)

    model = transformers.LlamaForSequenceClassification.from_pretrained(one)
    model.score.weight.data.fill_(math.nan)
    model.save_pretrained(tmp_path / "nan")
    word_tokenizer().save_pretrained(tmp_path / "nan")
    assert "not-a-number: its weights are damaged, or overflow in float32" in said(tmp_path / "nan")

    headless = save_model(tmp_path / "headless", "ForCausalLM", **words)
    config = (headless / "config.json").read_text()
    (headless / "config.json").write_text(
        config.replace("ForCausalLM", "ForSequenceClassification")
    )
    assert "weights lack score.weight" in said(headless)
    (headless / "config.json").write_text("{")
    assert "config.json cannot be read" in said(headless)
    torch.save({}, prm / "pytorch_model.bin")
    (prm / "model.safetensors").rename(prm / "gone")
    assert "pickled weights can run code" in said(prm, "--reward-token", "ки")
    (prm / "model.safetensors").write_bytes(b"damaged")
    assert "cannot be loaded" in said(prm, "--reward-token", "ки")

    monkeypatch.setattr("arborsim_torch.models.free_bytes", lambda device: 1000)
    assert "GB are free on cpu" in said(one)


def test_memory_that_runs_out_while_scoring_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(
        tmp_path / "orm", "ForSequenceClassification", vocab=GAME.vocab_size, num_labels=1
    )

    def full(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(transformers.LlamaForSequenceClassification, "forward", full)
    error = fail(capsys, tmp_path, *SEARCH, "--reward", folder)
    assert "--reward orm: out of memory on cpu with 6 thoughts at once" in error


def test_resuming_with_another_reward_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.parquet"
    arguments = ["record", "--out", str(out), *SEARCH, "--reward"]
    assert main([*arguments, "verifier"]) == 0
    assert main([*arguments, "value", "--resume"]) == 2
    assert "another search_parameters" in capsys.readouterr().err
