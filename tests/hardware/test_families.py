"""Families of models against transformers' own modules, built without memory (the meta device).

The oracle is independent: the parameters of the module that transformers builds from a family's
configuration, and the tensors that its own cache holds after a pass over 6 and over 7 tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from arborsim.machine.config import geometry_from_config
from arborsim.machine.families import _table, family_names
from tests.live.tiny import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
)

#: Parts of a model that are no language model.
TOWERS = ("vision", "image_", "visual", "audio_", "multi_modal", "embed_tokens_extend")
#: A buffer that is stored with the weights, and a parameter in other families.
ROUTER_BIAS = "e_score_correction_bias"
#: Flags that add or leave out weights: each is turned around.
FLAGS = (
    "attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qkv_bias", "bias", "use_qk_norm",
    "qk_layernorm", "lm_head_bias", "decoder_bias", "conv_bias", "use_conv_bias", "mamba_conv_bias",
    "mamba_proj_bias", "mamba_rms_norm", "multi_query", "new_decoder_architecture", "parallel_attn",
    "use_parallel_residual", "enable_bias", "attention_out_bias", "use_post_norm", "gating",
    "use_sandwich_norm", "layernorm_embedding", "is_decoder", "tie_word_embeddings",
)  # fmt: skip
DECLARED = sorted(set(family_names()) & set(CAUSAL))


class NotBuilt(Exception):
    """The installed transformers cannot build the family from such a configuration."""


def built(family: str, **changes: Any) -> tuple[Any, Any]:
    """Configuration and module; what the class itself cannot build is no question to us."""
    try:
        config = CONFIG_MAPPING[family](**changes)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    except Exception as error:  # each class has its own
        raise NotBuilt(family) from error
    return config, model


def weights(model: Any) -> int:
    stored = set(model.state_dict())
    biases = ((n, b) for n, b in model.named_buffers() if ROUTER_BIAS in n and n in stored)
    named = [*model.named_parameters(), *biases]
    return sum(p.numel() for n, p in named if not any(tower in n for tower in TOWERS))


def tensors(model: Any, tokens: int) -> Iterator[tuple[str, Any]]:
    """Names and tensors of the cache after a pass."""
    with torch.no_grad(), torch.device("meta"):
        ids = torch.zeros(1, tokens, dtype=torch.long)
        cache = model(input_ids=ids, use_cache=True).past_key_values
    for layer in cache.layers:
        for name, value in vars(layer).items():
            for each in value.values() if isinstance(value, dict) else [value]:
                if torch.is_tensor(each):
                    yield name, each


def kept(model: Any) -> tuple[int, int] | None:
    """Bytes of a token, and of the states of a sequence; None where no pass can be run."""
    try:
        shorter, longer = (list(tensors(model, tokens)) for tokens in (6, 7))
    except Exception:  # the class's own: a look at a value, which meta tensors have not
        return None
    sizes = [
        sum(t.nbytes for name, t in each if name in ("keys", "values"))
        for each in (shorter, longer)
    ]
    return sizes[1] - sizes[0], sum(t.nbytes for name, t in longer if "states" in name)


def geometry(config: Any, family: str) -> Any:
    text = json.dumps({**config.to_dict(), "dtype": "bfloat16"}, default=str)
    return geometry_from_config(text, family, f"{family}.json")


#: Where a class of transformers has no default of its own.
GIVEN: dict[str, dict[str, Any]] = {"deepseek_v2": {"num_experts_per_tok": 6}}
#: Families that keep their states outside of the layers of the cache.
ELSEWHERE = ("minimax",)
LAYERS = 6  # enough for every kind of layer that these have, and quickly built


def small(family: str) -> dict[str, Any]:
    """A configuration of few layers; some classes have lists of the whole number of layers."""
    given = GIVEN.get(family, {})
    for changes in ({**given, "num_hidden_layers": LAYERS}, given):
        try:
            built(family, **changes)
        except NotBuilt:
            continue
        return changes
    pytest.skip("the installed transformers cannot build it from its own defaults")


@pytest.mark.parametrize("family", DECLARED)
def test_weights_and_cache_are_those_of_transformers(family: str) -> None:
    config, model = built(family, **small(family))
    found = geometry(config, family)
    assert found.parameters == weights(model)
    if cache := kept(model):
        assert found.kv_bytes_per_token == cache[0]
        assert found.state_bytes == cache[1] or family in ELSEWHERE


@pytest.mark.parametrize("family", DECLARED)
def test_flags_add_and_leave_out_what_they_do_in_transformers(family: str) -> None:
    """Every flag of a family turned around, alone: biases, norms, gates, tied embeddings."""
    changes = small(family)
    config, _ = built(family, **changes)
    parts = [each for each in ("text_config", "thinker_config") if hasattr(config, each)]
    for flag in FLAGS:
        if parts:  # the flag of the whole is turned, and the language model has its own
            continue
        before = config.to_dict().get(flag)
        if isinstance(before, bool) and flag in _table("defaults.toml")[family]:
            try:
                turned, model = built(family, **changes, **{flag: not before})
            except NotBuilt:
                continue
            assert geometry(turned, family).parameters == weights(model), flag
