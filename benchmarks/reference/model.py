"""The reference models: tiny Llamas, initialised so that they learn to look up.

Plain `LlamaForCausalLM` weights, nothing custom at run time.  Two things at
initialisation turn hours of training into minutes:

*  Token embeddings are of unit scale, share a constant direction, and the
   matrices that write to the residual stream start small, so that tokens stay
   recognisable through all layers.
*  In layer 0 one head copies the previous token from the start, and for `chain`
   another the last but one.  Induction ("what followed this token, or this and any
   other, the last time?") needs them, and finding them by gradient descent is a
   long plateau.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from arborsim_torch.reference.tasks import Task

CONSTANT_NORM = 8.0  #: length of the direction that all embeddings share
WRITE_SCALE = 0.05  #: shrinks o_proj and down_proj
COPY_NORM = 8.0  #: length of what a look-back head writes
ATTENTION_MARGIN = 14.0  #: log odds of the token looked back to against its neighbours
PAIR_DECAY = 0.7  #: weight of a RoPE pair relative to the next faster one


def make_config(task: Task, **overrides: Any) -> LlamaConfig:
    """Return the reference architecture for `task`: 6 layers, d 128, 1.3 M parameters."""
    settings: dict[str, Any] = {
        "vocab_size": task.vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": task.vocab.bos_id,
        "eos_token_id": task.eos_id,
        "pad_token_id": task.pad_id,
        "attn_implementation": "sdpa",
    }
    return LlamaConfig(**{**settings, **overrides})


def make_model(config: LlamaConfig, seed: int, look_back: int = 2) -> LlamaForCausalLM:
    """Build the model of `config` and initialise it from `seed`; see `initialise`."""
    model = LlamaForCausalLM(config)
    initialise(model, torch.Generator().manual_seed(seed), look_back)
    return model


@torch.no_grad()
def grow(model: LlamaForCausalLM, config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """Return `model` with the larger vocabulary and the more layers of `config`.

    The first ids of the vocabulary are the model's; a new row is the mean of the old ones plus a
    random direction of matching length, in the embeddings and in the head.  Where `config` has a
    multiple of the model's layers, every layer is followed by new ones, initialised as at the
    start of a training: they write little at first, so the function hardly changes.
    """
    generator = torch.Generator().manual_seed(seed)
    grown = LlamaForCausalLM(config)
    initialise(grown, generator, look_back=0)
    times, rest = divmod(config.num_hidden_layers, model.config.num_hidden_layers)
    if rest:
        raise ValueError(f"{config.num_hidden_layers} layers are no multiple of the model's")
    old = model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = old[name]
        mean = rows.mean(dim=0)
        count = config.vocab_size - rows.shape[0]
        noise = torch.randn(count, rows.shape[1], generator=generator)
        length = (rows - mean).norm(dim=1).mean()
        new = mean + noise * (length / noise.norm(dim=1, keepdim=True))
        old[name] = torch.cat([rows, new])
    weights = {}
    for name, value in old.items():
        before, layers, after = name.partition(".layers.")
        layer, _, part = after.partition(".")
        known = f"{before}{layers}{int(layer) * times}.{part}" if layers else name
        weights[known] = value
    missing = grown.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    return grown


@torch.no_grad()
def initialise(model: LlamaForCausalLM, generator: torch.Generator, look_back: int = 2) -> None:
    """Set all weights of a Llama as described at the top of this module, in place.

    There are `look_back` heads: 0, 1 (the previous token) or, 2, also the one before.  At most one
    per group of query heads.
    """

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    config: Any = model.config  # Any: transformers types its sizes as optional
    width = config.hidden_size
    if not 0 <= look_back <= config.num_key_value_heads:
        raise ValueError(f"{look_back} look-back heads do not fit")
    constant = torch.nn.functional.normalize(normal(width), dim=0)

    embeddings = normal(config.vocab_size, width)
    # Identities live across the constant direction, not along it.
    embeddings -= torch.outer(embeddings @ constant, constant)
    # Of equal length, so that RMSNorm leaves every token as much of the constant.
    embeddings *= math.sqrt(width) / embeddings.norm(dim=1, keepdim=True)
    model.model.embed_tokens.weight.copy_(embeddings + CONSTANT_NORM * constant)
    model.lm_head.weight.copy_(normal(config.vocab_size, width) * 0.02)

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for part in (attention.q_proj, attention.k_proj, attention.v_proj):
            part.weight.copy_(normal(*part.weight.shape) / math.sqrt(width))
        for part in (mlp.gate_proj, mlp.up_proj):
            part.weight.copy_(normal(*part.weight.shape) / math.sqrt(width))
        for part in (attention.o_proj, mlp.down_proj):
            scale = WRITE_SCALE / math.sqrt(part.weight.shape[1])
            part.weight.copy_(normal(*part.weight.shape) * scale)
    for group in range(look_back):
        _plant_look_back_head(model, group, group + 1, constant, normal)


def _plant_look_back_head(
    model: LlamaForCausalLM, group: int, back: int, constant: torch.Tensor, normal: Any
) -> None:
    """Make the first head of a layer-0 group copy the identity of the token `back` before.

    Query and key read the constant direction only, so both are the same vector at every position,
    before RoPE turns pair i of them by position times w_i.  The key is turned by `back` steps more:
    the score at distance m - n is sum_i a_i cos((m - n - back) w_i), largest at m - n = back.  The
    weights a_i fall geometrically: the fast pairs tell neighbours apart, and enough of the slow
    ones keep the fast ones from agreeing again at a larger distance.
    """
    config: Any = model.config
    size = config.head_dim
    half = size // 2
    frequencies = model.model.rotary_emb.inv_freq.float().cpu()
    # What RMSNorm leaves of the constant direction, tokens being of norm sqrt(d).
    width = config.hidden_size
    reading = CONSTANT_NORM / math.sqrt(1.0 + CONSTANT_NORM**2 / width)
    weights = PAIR_DECAY ** torch.arange(half)
    lead = (weights * (1.0 - torch.cos(frequencies))).sum()  # over its neighbours
    amplitude = torch.sqrt(weights * ATTENTION_MARGIN * math.sqrt(size) / lead) / reading

    query = torch.cat([amplitude, torch.zeros(half)])
    turn = back * frequencies
    key = torch.cat([amplitude * torch.cos(turn), amplitude * torch.sin(turn)])
    attention = model.model.layers[0].self_attn
    head = group * (config.num_attention_heads // config.num_key_value_heads)
    of_group = slice(group * size, (group + 1) * size)
    of_head = slice(head * size, (head + 1) * size)
    attention.q_proj.weight[of_head] = torch.outer(query, constant)
    attention.k_proj.weight[of_group] = torch.outer(key, constant)

    # Read `size` directions across the constant one, write them to as many
    # random orthogonal ones: a copy that later layers can tell from the token.
    basis = normal(width, size)
    basis -= torch.outer(constant, constant @ basis)
    read = torch.linalg.qr(basis)[0].T
    write = torch.linalg.qr(normal(width, size))[0]
    attention.v_proj.weight[of_group] = read
    attention.o_proj.weight[:, of_head] = write * (COPY_NORM / math.sqrt(size))
