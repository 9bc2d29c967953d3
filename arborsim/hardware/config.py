"""Read the shape of a model from its Hugging Face ``config.json``.

Only models whose cache holds full keys and values for every layer and token are accepted; others
(latent attention, sliding windows, hybrids) are refused by name instead of being counted wrongly.
"""

from __future__ import annotations

import json
from typing import Any

from arborsim.errors import UsageError
from arborsim.trace.schema import Geometry

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
#: Keys that give away a cache, or a number of weights, that the formulas here do not describe.
_OTHER_FORMS = {
    "kv_lora_rank": "latent attention",
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "ssm_cfg": "state-space layers",
}


def geometry_from_config(text: str, name: str, origin: str) -> Geometry:
    """Geometry of the model whose configuration is `text`.

    ``head_dim`` is read where present (it need not be ``hidden / heads``), KV heads default to the
    query heads, and the number of parameters follows from the shape unless ``num_parameters``
    gives it.

    Parameters
    ----------
    text : str
        Contents of a config.json.
    name : str
        What to call the model.
    origin : str
        Names the file in error messages.

    Raises
    ------
    UsageError
        Not JSON, keys missing or senseless, or a cache of another form.
    """
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{origin} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{origin} is not a model configuration: it holds no JSON object")
    dtype = _dtype(config, origin)
    config = config.get("text_config", config)  # multimodal models nest the language model
    _refuse_other_forms(config, origin)
    hidden = _count(config, "hidden_size", origin)
    heads = _count(config, "num_attention_heads", origin)
    head_dim = config.get("head_dim")
    if head_dim is None and hidden % heads:
        raise UsageError(f"{origin}: hidden_size {hidden} is no multiple of {heads} heads")
    shape = {
        "layers": _count(config, "num_hidden_layers", origin),
        "heads": heads,
        "kv_heads": _count(config, "num_key_value_heads", origin, heads),
        "head_dim": _count(config, "head_dim", origin, hidden // heads),
        "hidden": hidden,
        "intermediate": _count(config, "intermediate_size", origin),
        "vocab": _count(config, "vocab_size", origin),
    }
    parameters = _count(config, "num_parameters", origin, num_parameters(config, **shape))
    return Geometry(
        name=name,
        parameters=parameters,
        kv_bytes_per_element=dtype,
        weight_bytes_per_element=dtype,
        **shape,
    )


def num_parameters(
    config: dict[str, Any], *, layers: int, heads: int, kv_heads: int, head_dim: int,
    hidden: int, intermediate: int, vocab: int,
) -> int:  # fmt: skip
    """Weights of a decoder of the Llama family (gated MLP, RMS norms) of this shape."""
    family = config.get("model_type", "llama")
    projections = (heads + 2 * kv_heads) * head_dim  # outputs of query, key and value
    attention = hidden * projections + heads * head_dim * hidden
    if config.get("attention_bias", family == "qwen2"):
        attention += projections
    if config.get("attention_bias", False):
        attention += hidden  # Llama's flag also gives the output projection a bias
    if family == "qwen3":
        attention += 2 * head_dim  # norms of query and key
    layer = attention + 3 * hidden * intermediate + 2 * hidden
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings", False) else 2)
    return layers * layer + embeddings + hidden


def _refuse_other_forms(config: dict[str, Any], origin: str) -> None:
    for key, form in _OTHER_FORMS.items():
        if config.get(key):
            raise UsageError(f"{origin} describes {form} ({key}), which is not supported")
    sliding = config.get("sliding_window") and config.get("use_sliding_window", True)
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if sliding or kinds:
        found = ", ".join(sorted(kinds)) or f"sliding_window {config['sliding_window']}"
        raise UsageError(f"{origin} has layers without full attention ({found}): not supported")


def _count(config: dict[str, Any], key: str, origin: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise UsageError(f"{origin} lacks {key}: is it a model's config.json?")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{origin}: {key} must be a positive whole number, not {value!r}")
    return value


def _dtype(config: dict[str, Any], origin: str) -> int:
    """Bytes per element; a configuration that names no type is taken as bf16."""
    nested = config.get("text_config", config)
    for where in (config, nested):
        for key in ("dtype", "torch_dtype"):
            if where.get(key) is not None:
                name = str(where[key]).removeprefix("torch.")
                if name not in _BYTES:
                    raise UsageError(f"{origin}: {key} '{name}' is none of {', '.join(_BYTES)}")
                return _BYTES[name]
    return 2
