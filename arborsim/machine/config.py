"""Read the shape of a model from its Hugging Face ``config.json``.

What its layers are made of is declared by its family (`arborsim.machine.families`), and the type of
quantised weights by its ``quantization_config`` (`arborsim.machine.weights`).  Counted is the
language model, and not a vision or audio tower next to it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.core.geometry import HEAD, ROUTER, Geometry, Matrix, feed_forward, latent_attention
from arborsim.machine.families import Numbers, nested
from arborsim.machine.names import type_name
from arborsim.machine.weights import quantised_weights, with_weights

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
#: What ``--kv-dtype`` takes, and the bytes of one number.
KV_DTYPES = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
_INDEX_SCALE_BYTES = 4  # of the 8-bit key that an index keeps of a token


def geometry_from_config(text: str, name: str, origin: str, family: str = "") -> Geometry:
    """Geometry of the model `name` whose config.json is `text`; `origin` names it in messages.

    `family` reads it as another ``model_type`` than its own.  The number of weights follows from
    the shape unless ``num_parameters`` gives it.  Raises `UsageError` if the text is not JSON, the
    family is not known, or keys are missing or senseless.
    """
    whole = parse_config(text, origin)
    config = nested(whole, origin)
    kind = family or config.get("model_type", "llama")
    if not isinstance(kind, str):
        raise UsageError(f"{origin}: model_type must be a name, not {kind!r:.40}")
    n = Numbers(config, kind, origin)
    width = _dtype(whole, config, origin)
    experts = _experts(n)
    found: dict[str, Any] = _shape(n) | _cache(n, width) | experts
    matrices, others = _matrices(n, found)
    parameters = sum(each.out_features * each.in_features * each.layers for each in matrices)
    parameters += others + experts.get("expert_parameters", 0)
    if n["tied"]:
        parameters -= n.count("vocab") * n.count("embedding_dim")
    quantised = whole.get("quantization_config") or config.get("quantization_config")
    found |= quantised_weights(quantised, found["layers"], bool(experts), origin)
    try:
        made = Geometry(
            name=f"{name}, read as {family}" if family else name,
            parameters=n.count("num_parameters", 1) if "num_parameters" in config else parameters,
            kv_bytes_per_element=width,
            weight_bytes_per_element=width,
            **found,
        )
        usual = made.usual_matrices() == matrices
        return made if usual else replace(made, matrices=matrices)
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


def _shape(n: Numbers) -> dict[str, int]:
    """Sizes that are the same in every layer, or those of the layers that keep every token."""
    names = ("heads", "kv_heads", "head_dim", "hidden", "vocab")
    found = {name: n.count(name, 1) for name in names}
    kept = n.count("full_layers") + n.count("window_layers")
    return {
        **found,
        "layers": max(n.count("layers", 1), kept),
        "intermediate": max(1, n.count("width")),
    }


def _cache(n: Numbers, width: int) -> dict[str, int]:
    """The fields that say what layers keep of a sequence."""
    window_layers = n.count("window_layers")
    layers = max(n.count("layers", 1), kept := n.count("full_layers") + window_layers)
    found = {"cacheless_layers": layers - kept}
    if n["latent"]:
        rope = n.count("qk_rope_head_dim", 1)
        found |= {
            "head_dim": n.count("qk_nope_head_dim", 1) + rope,
            "latent_dim": n.count("latent_rank", 1),
            "rope_dim": rope,
            "value_dim": n.count("v_head_dim", 1),
            "query_rank": n.count("query_rank"),
        }
        elements = found["latent_dim"] + rope
    else:
        value = n.count("value_dim", 1)
        elements = n.count("kv_heads", 1) * (n.count("head_dim", 1) + value)
        if value != n["head_dim"]:
            found["value_dim"] = value
    if window_layers:
        found |= {"window": n.count("window", 1), "window_layers": window_layers}
        each = n.count("window_head_dim") + n.count("window_value_dim")
        windowed = elements if n["latent"] else n.count("window_kv_heads") * each
        if windowed != elements:
            found["window_elements"] = windowed
    if state_layers := n.count("state_layers"):
        conv, state = n.count("conv_numbers") * width, n.count("state_numbers")
        found["state_bytes"] = state_layers * (conv + state * (n.count("state_bytes") or width))
    if index_dim := n.count("index_dim"):
        found["index_bytes_per_token"] = n.count("index_layers") * (index_dim + _INDEX_SCALE_BYTES)
    return found


def _experts(n: Numbers) -> dict[str, int]:
    """The fields of a mixture of experts, or nothing."""
    experts, layers = n.count("experts"), n.count("expert_layers")
    if not experts or not layers:
        return {}
    dim, hidden = n.count("expert_dim", 1), n.count("hidden", 1)
    gated = bool(n["expert_gated"])
    inner = (2 if gated else 1) * dim
    one = hidden * (inner + dim) + bool(n["expert_bias"]) * (inner + hidden)
    return {
        "experts": experts,
        "experts_per_token": n.count("per_token", 1),
        "expert_parameters": layers * experts * one,
        "expert_dim": dim,
        "expert_layers": layers,
        "shared_dim": n.count("shared_dim"),
        "ungated_experts": 0 if gated else 1,
    }


def _matrices(n: Numbers, found: dict[str, int]) -> tuple[tuple[Matrix, ...], int]:
    """The matrices of the layers and of the output, and the number of all other weights."""
    hidden, vocab = n.count("hidden", 1), n.count("vocab", 1)
    made: list[tuple[Any, ...]] = []
    others = 0
    for kind in ("", "window_", "cross_"):
        matrices, vectors = _attention(n, kind, found)
        made += matrices
        others += vectors
    width, gates = n.count("width"), 2 if n["gated"] else 1
    layers = n.count("feed_forward_layers")
    made += feed_forward("", width, hidden, layers, gates)
    others += layers * int(n["feed_forward_bias"] or 0) * (gates * width + hidden)
    if found.get("experts"):
        layers, shared = found["expert_layers"], found["shared_dim"]
        made.append((ROUTER, n.count("router_rows"), hidden, layers))
        made += feed_forward("shared_", shared, hidden, layers, gates)
        others += layers * n.count("router_vectors")
        if shared:
            others += layers * int(n["feed_forward_bias"] or 0) * (gates * shared + hidden)
    if layers := n.count("state_layers"):
        made.append(("mixer_in", n.count("mixer_in"), hidden, layers, "out"))
        made.append(("mixer_out", hidden, n.count("mixer_out"), layers, "in"))
        others += layers * n.count("mixer_vectors")
    depth, embedding = n.count("layers"), n.count("embedding_dim", 1)
    made.append((HEAD, vocab, embedding, 1, "out"))
    others += depth * (n.count("norms") * n.count("norm") + n.count("layer_extra"))
    others += n.count("embeddings") * embedding + n.count("final_norm") + n.count("extra")
    others += vocab * n.count("head_bias")
    return tuple(Matrix(*each) for each in made if all(each[1:4])), others


def _attention(n: Numbers, kind: str, found: dict[str, int]) -> tuple[list[tuple[Any, ...]], int]:
    """The matrices and other weights of the layers of a kind of attention."""
    layers = n.count(f"{kind}layers" if kind else "attention_layers")
    sharing = 0 if kind == "cross_" else n.count(f"{kind}sharing_layers")
    if kind == "window_" and _alike(n):
        return [], 0  # they are among the others
    if not kind and _alike(n):
        layers, sharing = (
            layers + n.count("window_layers"),
            sharing + n.count("window_sharing_layers"),
        )
    hidden, total = n.count("hidden", 1), layers + sharing
    name, extra = kind if kind != "cross_" else "", kind.removesuffix("_") or "attention"
    vectors = total * n.signed(f"{extra}_vectors") - sharing * n.count("sharing_vectors")
    if n["latent"] and kind != "cross_":
        return _latent(n, found, layers, vectors)
    heads, head_dim = n.count(f"{name}heads", 1), n.count(f"{name}head_dim", 1)
    kv_heads, value = n.count(f"{name}kv_heads", 1), n.count(f"{name}value_dim", 1)
    queries, kv = heads * head_dim, kv_heads * (head_dim + value)
    bias = int(n["qkv_bias"] or 0)
    vectors += bias * (total * queries + layers * kv)
    vectors += total * int(n["output_bias"] or 0) * hidden
    gate = n.count("attention_gate")
    return [
        (f"{kind}qkv", queries + kv, hidden, layers, "out", head_dim, kv, head_dim + value),
        (f"{kind}shared_query", queries, hidden, sharing, "out", head_dim),
        (f"{kind}output", hidden, heads * value, total, "in", value),
        (f"{kind}gate", gate, hidden, total, "out", max(1, gate // heads)),
    ], vectors


def _alike(n: Numbers) -> bool:
    """Whether layers with a window have the sizes of the others, and one set of matrices."""
    names = ("heads", "kv_heads", "head_dim", "value_dim")
    alike = all(n[name] == n[f"window_{name}"] for name in names)
    return bool(n["latent"]) or (alike and n["window_vectors"] == n["attention_vectors"])


def _latent(
    n: Numbers, found: dict[str, int], layers: int, vectors: int
) -> tuple[list[tuple[Any, ...]], int]:
    hidden, heads, rank = found["hidden"], found["heads"], found["query_rank"]
    sizes = found["head_dim"], found["rope_dim"], found["latent_dim"], found["value_dim"]
    made = latent_attention(hidden, layers, heads, *sizes, rank)
    bias = bool(n["qkv_bias"]) * (rank + found["latent_dim"] + found["rope_dim"])
    bias += bool(n["output_bias"]) * hidden
    vectors += layers * (rank + found["latent_dim"] + bias)
    gate = n.count("attention_gate")
    made.append(("gate", gate, hidden, layers, "out", max(1, gate // heads)))
    if index_dim := n.count("index_dim"):
        indexed, queries = n.count("index_layers"), n.count("index_heads")
        made.append(("index_query", queries * index_dim, rank, indexed))
        made.append(("index_key", index_dim + queries, hidden, indexed))
        vectors += indexed * 2 * index_dim
    return made, vectors


def _dtype(whole: dict[str, Any], config: dict[str, Any], origin: str) -> int:
    """Bytes per element; a configuration that names no type is taken as bf16."""
    for where in (whole, config):
        for key in ("dtype", "torch_dtype"):
            if where.get(key) is not None:
                name = str(where[key]).removeprefix("torch.")
                if name not in _BYTES:
                    raise UsageError(f"{origin}: {key} '{name}' is none of {', '.join(_BYTES)}")
                return _BYTES[name]
    return 2
