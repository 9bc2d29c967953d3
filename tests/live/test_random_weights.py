"""Models with random weights at a known geometry: true bytes, refused where they cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arborsim.core.errors import UsageError
from arborsim_torch import models
from arborsim_torch.models import load_model
from tests.live.tiny import torch

SHAPE = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 50,
}  # fmt: skip


def config(tmp_path: Path, **others: Any) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE | others))
    return f"config:{path}"


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        ({"dtype": "float16"}, "auto", torch.float16),
        ({"torch_dtype": "torch.float32"}, "auto", torch.float32),
        ({}, "auto", torch.bfloat16),
        ({"dtype": "float16"}, "float32", torch.float32),
    ],
)
def test_type_of_the_weights(tmp_path: Path, stored: dict, asked: str, expected: Any) -> None:
    loaded = load_model(config(tmp_path, **stored), dtype=asked)
    assert loaded.model.dtype == expected
    assert loaded.random_weights
    ids = torch.tensor([[1, 2, 3]])
    assert torch.isfinite(loaded.model(ids).logits.float()).all()


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="float8"):
        load_model(config(tmp_path, dtype="float8"))
    with pytest.raises(UsageError, match="mamba"):
        load_model(config(tmp_path, model_type="mamba"))
    with pytest.raises(UsageError, match="--task chain"):
        load_model(config(tmp_path), task="chain")
    monkeypatch.setattr(models, "free_bytes", lambda device: 1000)
    with pytest.raises(UsageError, match="are free on cpu"):
        load_model(config(tmp_path))
