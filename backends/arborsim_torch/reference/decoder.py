"""Batched generation with a preallocated key-value cache.

All rows of a batch have the same length, so there is no padding and no mask.  The weights and the
arithmetic are those of the Llama that is passed in; only the cache is managed here, because
appending to it by concatenation would copy all of it for every token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from arborsim_torch.kernels.fused import sdpa

from .tasks import Problem, Task

COMPACT_BELOW = 0.8  #: drop finished rows when fewer than this share are alive


class Decoder:
    """A batch of sequences of equal length, of at most `capacity` tokens, and its cache."""

    def __init__(self, model: LlamaForCausalLM, batch: int, capacity: int) -> None:
        config: Any = model.config  # Any: transformers types its sizes as optional
        self.model = model
        self.length = 0  #: tokens in the cache, per row
        self.forgotten = 0  #: tokens that were there and no longer are
        shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
        layers = range(config.num_hidden_layers)
        self._keys = [torch.empty(shape, dtype=model.dtype, device=model.device) for _ in layers]
        self._values = [torch.empty_like(keys) for keys in self._keys]

    @torch.no_grad()
    def append(self, ids: torch.Tensor) -> torch.Tensor:
        """Append tokens (batch, T); return logits after the last one, (batch, vocab).

        T > 1 is possible for the first call only.
        """
        batch, count = ids.shape
        if count > 1 and self.length:
            raise ValueError("only the first call may append several tokens")
        config, inner = self.model.config, self.model.model
        start, end = self.length, self.length + count
        x = inner.embed_tokens(ids)
        positions = torch.arange(start, end, device=ids.device) + self.forgotten
        rotary = inner.rotary_emb(x, positions[None])
        for layer, all_keys, all_values in zip(inner.layers, self._keys, self._values, strict=True):
            part = layer.self_attn
            h = layer.input_layernorm(x)
            q, k, v = (
                projection(h).view(batch, count, -1, config.head_dim).transpose(1, 2)
                for projection in (part.q_proj, part.k_proj, part.v_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, *rotary)
            all_keys[:, :, start:end] = k
            all_values[:, :, start:end] = v
            keys, values = all_keys[:, :, :end], all_values[:, :, :end]
            if count > 1:
                out = sdpa(q, keys, values, causal=True).transpose(1, 2)
            else:  # the query heads of a group become the rows of one small matrix
                groups = q.reshape(batch, keys.shape[1], -1, config.head_dim)
                out = sdpa(groups, keys, values)
            x = x + part.o_proj(out.reshape(batch, count, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.length = end
        logits: torch.Tensor = self.model.lm_head(inner.norm(x[:, -1]))
        return logits

    def forget(self, start: int, stop: int) -> None:
        """Remove the tokens in these slots of the cache; later ones keep their true positions."""
        if not 0 <= start <= stop <= self.length:
            raise ValueError(f"slots {start} to {stop} of {self.length}")
        for cached in (*self._keys, *self._values):
            moved = cached[:, :, stop : self.length].clone()
            cached[:, :, start : start + moved.shape[2]] = moved
        self.length -= stop - start
        self.forgotten += stop - start

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only these rows (integer indices), in this order."""
        self._keys = [keys[rows] for keys in self._keys]
        self._values = [values[rows] for values in self._values]


@dataclass(frozen=True)
class Generation:
    """A continuation of a prompt (and a prefix)."""

    tokens: tuple[int, ...]  #: all generated ids, the given prefix included
    logprob: float  #: sum of the log-probabilities of the newly generated tokens
    value: float | None  #: the model's own value, p(yes), where it last stated one; else None


def generate(
    model: LlamaForCausalLM,
    task: Task,
    problems: Sequence[Problem],
    *,
    prefixes: Sequence[Sequence[int]] | None = None,
    forget: Sequence[int] | None = None,
    temperature: float = 0.0,
    seeds: Sequence[Sequence[int]] | None = None,
    max_tokens: int | None = None,
    stop: Callable[[Problem, Sequence[int]], bool] | None = None,
    batch: int = 64,
) -> list[Generation]:
    """Generate one continuation per problem, at most `batch` at a time.

    It follows the tokens of `prefixes`, of which the last `forget` leave the cache once they are
    computed: what follows cannot read them.  Temperature 0 takes the most probable token, else each
    problem has the seed of its draws.  Results do not depend on how problems are batched, up to
    rounding.  Generation ends after `max_tokens`, prefix included (the task's by default), or when
    `stop` says so, e.g. ``task.is_thought_end``, by default ``task.is_finished``.
    """
    starts = [tuple(p) for p in prefixes] if prefixes is not None else [()] * len(problems)
    if temperature > 0 and seeds is None:
        raise ValueError("sampling needs a seed per problem")
    lost = list(forget) if forget is not None else [0] * len(problems)
    by_length: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for i, problem in enumerate(problems):
        by_length[len(problem.prompt), len(starts[i]), lost[i]].append(i)
    found: dict[int, Generation] = {}
    for members in by_length.values():
        for at in range(0, len(members), batch):
            rows = members[at : at + batch]
            done = _generate_batch(
                model,
                task,
                [problems[i] for i in rows],
                [starts[i] for i in rows],
                lost[rows[0]],
                temperature,
                [np.random.default_rng(list(seeds[i])) for i in rows] if seeds else [],
                task.max_tokens if max_tokens is None else max_tokens,
                stop or task.is_finished,
            )
            found.update(zip(rows, done, strict=True))
    return [found[i] for i in range(len(problems))]


def _generate_batch(
    model: LlamaForCausalLM,
    task: Task,
    problems: list[Problem],
    starts: list[tuple[int, ...]],
    forget: int,
    temperature: float,
    rngs: list[np.random.Generator],
    max_tokens: int,
    stop: Callable[[Problem, Sequence[int]], bool],
) -> list[Generation]:
    """Generate for prompts of one length and prefixes of one length, of which as much is lost."""
    tokens = [list(start) for start in starts]
    logprobs = np.zeros(len(problems))
    values: list[float | None] = [None] * len(problems)
    alive = set(range(len(problems)))
    prompts = [[*p.prompt, *start] for p, start in zip(problems, starts, strict=True)]
    decoder = Decoder(model, len(problems), len(problems[0].prompt) + max_tokens)
    rows = sorted(alive)  # problem of each row of the decoder
    feed = torch.tensor(prompts, device=model.device)
    for _ in range(max_tokens - len(starts[0])):
        scores = torch.log_softmax(decoder.append(feed).float(), -1)
        if decoder.forgotten < forget:
            decoder.forget(decoder.length - forget, decoder.length)
        picked = _pick(scores, temperature, [rngs[i] for i in rows] if rngs else [])
        chosen = scores.gather(1, picked[:, None])[:, 0].tolist()
        for row, (i, token) in enumerate(zip(rows, picked.tolist(), strict=True)):
            if i not in alive:
                continue
            if task.is_value_next(problems[i], tokens[i]):
                values[i] = float(task.value_from_model(scores[row]))
            tokens[i].append(token)
            logprobs[i] += chosen[row]
        alive = {i for i in alive if not stop(problems[i], tokens[i])}
        if not alive:
            break
        feed = picked[:, None]
        if len(alive) < COMPACT_BELOW * len(rows):
            still = [row for row, i in enumerate(rows) if i in alive]
            rows = [rows[row] for row in still]
            decoder.keep(torch.tensor(still, device=feed.device))
            feed = feed[still]
    return [
        Generation(tuple(t), float(p), v) for t, p, v in zip(tokens, logprobs, values, strict=True)
    ]


def _pick(
    scores: torch.Tensor, temperature: float, rngs: list[np.random.Generator]
) -> torch.Tensor:
    """Pick a token per row of log-probabilities (batch, vocab), one draw per row."""
    if temperature == 0:
        return scores.argmax(-1)
    mass = torch.softmax(scores.double() / temperature, -1).cumsum(-1)
    draws = torch.tensor([rng.random() for rng in rngs], dtype=torch.float64, device=mass.device)
    return torch.searchsorted(mass, draws[:, None] * mass[:, -1:], right=True)[:, 0]
