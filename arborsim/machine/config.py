"""Read the shape of a model from its Hugging Face ``config.json``.

Accepted are caches of full keys and values, of latent vectors (DeepSeek-V2 and V3) and of sliding
windows, the mixtures of experts of DeepSeek, Qwen3, gpt-oss and Mixtral, and quantised weights
(`arborsim.machine.weights`); others (hybrids, state spaces, other mixtures) are refused by name
instead of being counted wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.core.geometry import Geometry
from arborsim.machine.names import type_name
from arborsim.machine.weights import quantised_weights, with_weights

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
#: What ``--kv-dtype`` takes, and the bytes of one number.
KV_DTYPES = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
_DEEPSEEK = ("deepseek_v2", "deepseek_v3")
_GEMMA = ("gemma2", "gemma3", "gemma3_text")
#: Mixtures of experts: the keys of their number and of the width of one.
_MIXTURES = {
    "deepseek_v2": ("n_routed_experts", "moe_intermediate_size"),
    "deepseek_v3": ("n_routed_experts", "moe_intermediate_size"),
    "gpt_oss": ("num_local_experts", "intermediate_size"),
    "mixtral": ("num_local_experts", "intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
}
_SAVED_EXPERTS = "num_local_experts"  # what transformers 5 writes for any family
#: Keys that mean a cache, or a number of weights, that the formulas here do not describe.
_OTHER_FORMS = {
    "ssm_cfg": "state-space layers",
    "hybrid_override_pattern": "state-space layers",
    "global_head_dim": "layers with caches of different widths",
    "num_kv_shared_layers": "layers that share their cache",
}
#: What configurations of these families leave out.
_GEMMA_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {**_GEMMA_DEFAULTS, "layer_pattern": 2},
    "gemma3_text": {**_GEMMA_DEFAULTS, "vocab_size": 262208, "layer_pattern": 6},
    "gpt_oss": {"head_dim": 64, "attention_bias": True, "layer_pattern": 2},
}
_DEFAULTS["gemma3"] = _DEFAULTS["gemma3_text"]
_OPTIONAL_COUNTS = ("q_lora_rank", "n_shared_experts", "decoder_sparse_step")
_COUNTS_OF_LAYERS = ("first_k_dense_replace", "max_window_layers")


def geometry_from_config(text: str, name: str, origin: str) -> Geometry:
    """Geometry of the model `name` whose config.json is `text`; `origin` names it in messages.

    ``head_dim`` is read where present (it need not be ``hidden / heads``), KV heads default to the
    query heads, and the number of parameters follows from the shape unless ``num_parameters``
    gives it.  A multimodal model's language model is nested as ``text_config``.  The rest of the
    model is not counted.  Raises `UsageError` if it is not JSON, keys are missing or senseless, or
    the cache has another form.
    """
    config = parse_config(text, origin)
    dtype = _dtype(config, origin)
    quantised = config.get("quantization_config")
    config = config.get("text_config", config)
    if not isinstance(config, dict) or not isinstance(config.get("model_type", ""), str):
        raise UsageError(f"{origin}: text_config must be an object and model_type a name")
    config = {**_DEFAULTS.get(config.get("model_type", ""), {}), **config}
    _check_optional_counts(config, origin)
    _refuse_other_forms(config, origin)
    hidden = _count(config, "hidden_size", origin)
    heads = _count(config, "num_attention_heads", origin)
    latent = _latent(config, origin)
    if latent:
        head_dim = _count(config, "qk_nope_head_dim", origin) + latent["rope_dim"]
    elif config.get("head_dim") is None and hidden % heads:
        raise UsageError(f"{origin}: hidden_size {hidden} is no multiple of {heads} heads")
    else:
        head_dim = _count(config, "head_dim", origin, hidden // heads)
    shape = {
        "layers": _count(config, "num_hidden_layers", origin),
        "heads": heads,
        "kv_heads": _count(config, "num_key_value_heads", origin, heads),
        "head_dim": head_dim,
        "hidden": hidden,
        "intermediate": _count(config, "intermediate_size", origin),
        "vocab": _count(config, "vocab_size", origin),
    }
    experts = _experts(config, shape["layers"], hidden, origin)
    parameters = num_parameters(config, **shape, **experts)
    quantised = quantised or config.get("quantization_config")
    found: dict[str, Any] = {
        **shape,
        **latent,
        **_window(config, shape["layers"], origin),
        **experts,
        **quantised_weights(quantised, shape["layers"], bool(experts), origin),
    }
    try:
        return Geometry(
            name=name,
            parameters=_count(config, "num_parameters", origin, parameters),
            kv_bytes_per_element=dtype,
            weight_bytes_per_element=dtype,
            **found,
        )
    except ValueError as error:
        raise UsageError(f"{origin}: {error}") from None


def parse_config(text: str, origin: str) -> dict[str, Any]:
    """The JSON object of a configuration, or a `UsageError` that names its `origin`."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{origin} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{origin} is not a model configuration: it holds no JSON object")
    return config


def with_kv_dtype(geometry: Geometry, dtype: str) -> Geometry:
    """The model with a cache of one of `KV_DTYPES`; ``fp8`` is a byte a number, without scales."""
    dtype = type_name("a KV cache", KV_DTYPES, dtype)
    width = KV_DTYPES.get(dtype, geometry.kv_bytes_per_element)  # the model's own
    if width == geometry.kv_bytes_per_element:
        return geometry
    return replace(geometry, name=f"{geometry.name}, {dtype} KV", kv_bytes_per_element=width)


def with_types(geometry: Geometry, weights: str = "", kv_dtype: str = "") -> Geometry:
    """The model with weights and cache of these types, as far as they are given."""
    geometry = with_weights(geometry, weights) if weights else geometry
    return with_kv_dtype(geometry, kv_dtype) if kv_dtype else geometry


def num_parameters(
    config: dict[str, Any], *, layers: int, heads: int, kv_heads: int, head_dim: int,
    hidden: int, intermediate: int, vocab: int, experts: int = 0, expert_layers: int = 0,
    expert_parameters: int = 0, shared_dim: int = 0, **_: int,
) -> int:  # fmt: skip
    """Weights of a decoder of this shape, of the family that `config` names."""
    family = config.get("model_type", "llama")
    if family in _DEEPSEEK:
        attention = _latent_attention_parameters(config, heads, head_dim, hidden)
    else:
        projections = (heads + 2 * kv_heads) * head_dim  # outputs of query, key and value
        attention = hidden * projections + heads * head_dim * hidden
        if config.get("attention_bias", family == "qwen2"):
            attention += projections
        if config.get("attention_bias", False):
            attention += hidden  # Llama's flag also gives the output projection a bias
        if family in ("qwen3", "qwen3_moe", "gemma3", "gemma3_text"):
            attention += 2 * head_dim  # norms of query and key
        if family == "gpt_oss":
            attention += heads  # attention sinks
    norms = (4 if family in _GEMMA else 2) * hidden
    dense = 3 * hidden * intermediate  # gate, up and down
    router = experts * hidden + (experts if family in ("deepseek_v3", "gpt_oss") else 0)  # biases
    feed_forward = (layers - expert_layers) * dense + expert_parameters
    feed_forward += expert_layers * (router + 3 * hidden * shared_dim)
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings", False) else 2)
    return layers * (attention + norms) + feed_forward + embeddings + hidden


def _latent_attention_parameters(
    config: dict[str, Any], heads: int, head_dim: int, hidden: int
) -> int:
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    values, query_rank = config["v_head_dim"], config.get("q_lora_rank")
    down = hidden * (rank + rope) + rank  # with the norm of the latent vector
    up = rank * heads * (head_dim - rope + values)
    query = hidden * heads * head_dim
    if query_rank:
        query = hidden * query_rank + query_rank + query_rank * heads * head_dim
    return int(query + down + up + heads * values * hidden)


def _latent(config: dict[str, Any], origin: str) -> dict[str, int]:
    """The fields of latent attention, or nothing."""
    if not config.get("kv_lora_rank"):
        if config.get("model_type") in _DEEPSEEK:
            raise UsageError(f"{origin}: kv_lora_rank is missing, the rank of latent attention")
        return {}
    if config.get("model_type") not in _DEEPSEEK:
        raise _unsupported("latent attention (kv_lora_rank)", _DEEPSEEK, origin)
    return {
        "latent_dim": _count(config, "kv_lora_rank", origin),
        "rope_dim": _count(config, "qk_rope_head_dim", origin),
        "value_dim": _count(config, "v_head_dim", origin),
        "query_rank": config.get("q_lora_rank") or 0,
    }


def _experts(config: dict[str, Any], layers: int, hidden: int, origin: str) -> dict[str, int]:
    """The fields of a mixture of experts, or nothing."""
    known = dict.fromkeys(key for key, _ in _MIXTURES.values())
    found = [key for key in known if config.get(key)]
    if not found:
        return {}
    family = config.get("model_type", "")
    number, width = _MIXTURES.get(family, ("", ""))
    if number and number not in found and _SAVED_EXPERTS in found:
        number = _SAVED_EXPERTS
    if number not in found:
        raise _unsupported(f"a mixture of experts ({found[0]})", _MIXTURES, origin)
    experts, dim = _count(config, number, origin), _count(config, width, origin)
    used = _count(config, "num_experts_per_tok", origin, config.get("experts_per_token"))
    with_experts = _layers_with_experts(config, layers)
    if not with_experts:
        return {}
    one = 3 * hidden * dim + (2 * dim + hidden if family == "gpt_oss" else 0)  # biases
    return {
        "experts": experts,
        "experts_per_token": used,
        "expert_parameters": with_experts * experts * one,
        "expert_dim": dim,
        "expert_layers": with_experts,
        "shared_dim": dim * (config.get("n_shared_experts") or 0),
    }


def _layers_with_experts(config: dict[str, Any], layers: int) -> int:
    """Every ``decoder_sparse_step``-th layer, but for the first ones and those listed as dense."""
    step = config.get("decoder_sparse_step") or 1
    first = min(layers, config.get("first_k_dense_replace") or 0)
    dense = set(config.get("mlp_only_layers") or ())
    listed = sum(first <= layer < layers and (layer + 1) % step == 0 for layer in dense)
    return int(layers // step - first // step - listed)


def _unsupported(form: str, families: Iterable[str], origin: str) -> UsageError:
    return UsageError(
        f"{origin} describes {form}, which is supported for model_type "
        f"{', '.join(sorted(families))} only"
    )


def _window(config: dict[str, Any], layers: int, origin: str) -> dict[str, int]:
    """The window and the number of layers that have it, or nothing."""
    if not config.get("sliding_window") or not config.get("use_sliding_window", True):
        return {}
    kinds, family = config.get("layer_types"), config.get("model_type")
    pattern = config.get("sliding_window_pattern") or config.get("layer_pattern")
    if kinds:
        count = sum(kind == "sliding_attention" for kind in kinds)
        if len(kinds) != layers:
            raise UsageError(f"{origin}: layer_types names {len(kinds)} of {layers} layers")
    elif family in ("mistral", "mixtral"):
        count = layers
    elif family in (*_GEMMA, "gpt_oss") and isinstance(pattern, int) and pattern > 0:
        count = layers - layers // pattern
    elif family in ("qwen2", "qwen3"):
        count = max(0, layers - int(config.get("max_window_layers") or 0))
    else:
        raise UsageError(
            f"{origin} has sliding_window {config['sliding_window']} and does not say which "
            "layers: add layer_types, one of full_attention and sliding_attention per layer"
        )
    window = _count(config, "sliding_window", origin)
    return {"window": window, "window_layers": count} if count else {}


def _check_optional_counts(config: dict[str, Any], origin: str) -> None:
    """Counts that may be missing, null or 0, and lists that may be missing."""
    for key in (*_OPTIONAL_COUNTS, *_COUNTS_OF_LAYERS):
        value = config.get(key)
        if value is not None and (not isinstance(value, int) or value < 0):
            raise UsageError(f"{origin}: {key} must be a whole number, not {value!r}")
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise UsageError(f"{origin}: mlp_only_layers must be a list of numbers, not {dense!r:.40}")
    kinds = config.get("layer_types")
    names = isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
    if kinds is not None and not names:
        raise UsageError(f"{origin}: layer_types must be a list of names, not {kinds!r:.40}")


def _refuse_other_forms(config: dict[str, Any], origin: str) -> None:
    for key, form in _OTHER_FORMS.items():
        if config.get(key):
            raise UsageError(f"{origin} describes {form} ({key}), which is not supported")
    kinds = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        found = ", ".join(sorted(kinds))
        raise UsageError(f"{origin} has layers of other kinds ({found}): not supported")
    windowed = "sliding_attention" in (config.get("layer_types") or ())
    if windowed and not config.get("sliding_window"):
        raise UsageError(f"{origin} has layers with a sliding window and lacks sliding_window")


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
    nested = config.get("text_config")
    for where in (config, nested if isinstance(nested, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if where.get(key) is not None:
                name = str(where[key]).removeprefix("torch.")
                if name not in _BYTES:
                    raise UsageError(f"{origin}: {key} '{name}' is none of {', '.join(_BYTES)}")
                return _BYTES[name]
    return 2
