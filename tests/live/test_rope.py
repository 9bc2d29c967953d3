"""The RoPE that traces hold is the one that transformers applies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arborsim.core.shape import Rope
from arborsim_torch.models import rope_of
from tests.live.tiny import DIM, tiny_model, torch

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip


def scaled_model(kind: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=11, hidden_size=32, intermediate_size=16, num_hidden_layers=1, head_dim=DIM,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
        rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, **SCALINGS.get(kind, {})},
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("kind", sorted(SCALINGS))
def test_rotates_as_transformers_does(kind: str) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = scaled_model(kind)
    rope = rope_of(model)
    assert rope is not None
    assert rope.rotary_dim == DIM
    assert (rope.scaling != 1.0) == (kind == "yarn")
    positions = torch.arange(0, 250, 3)
    vectors = torch.randn(1, 2, len(positions), DIM)
    cos, sin = model.model.rotary_emb(vectors, positions[None])
    turned, _ = apply_rotary_pos_emb(vectors, vectors, cos, sin)
    ours = rope.rotate(vectors.numpy(), positions.numpy())
    np.testing.assert_allclose(ours, turned.numpy(), atol=2e-6)
    back = rope.unrotate(turned.numpy(), positions.numpy())
    np.testing.assert_allclose(back, vectors.numpy(), atol=2e-6)


def test_the_middle_of_a_head_stays_where_a_part_is_rotated() -> None:
    rope = Rope((1.0, 0.5))
    np.testing.assert_array_equal(rope.rotate(np.arange(8.0), np.array(9))[4:], np.arange(4.0) + 4)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rope_that_changes_with_length_is_unknown(kind: str) -> None:
    model = tiny_model("llama")
    model.model.rotary_emb.rope_type = kind
    assert rope_of(model) is None
