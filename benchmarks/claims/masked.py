"""Algorithm 1 of the memory-hierarchy paper, literally, on a batch of greedy searches.

Where tokens lie changes no output (Proposition 1), so only what is destroyed is played: it is
masked.  All searches of a batch have as many tokens, hence as many candidates, at every step.  It
takes a fifth of the time of live runs, and it differentiates: the loss's gradients by cached keys
and values (appendix C) are a score here that no live run under inference mode could have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from arborsim_torch.reference import Problem, Task

SINKS = 4
REACH = 8  #: neighbours on either side that redundancy looks at
LOOKS = 4  #: decisions from one look at errors to the next
LOOK = 16  #: steps between two looks for searches that can no longer succeed


@dataclass(frozen=True)
class Rule:
    """What is destroyed, and when.

    Attributes
    ----------
    score
        "attention" (cumulative, mean over layers and heads), "value" (that times the mean L1 norm
        of the values), either followed by " - redundancy" (divided by its largest, less the mean
        cosine of the key to those of the nearest candidates), "gradient" (cumulative norms of the
        loss's gradients by key and value) or "random".
    ratio, total
        Share that is destroyed: of the candidates of each decision, or if `total` of all that there
        ever were.
    interval, window
        Steps between decisions; protected newest tokens.
    """

    score: str = "attention"
    ratio: float = 0.05
    total: bool = False
    interval: int = 12
    window: int = 24


@dataclass(frozen=True)
class Found:
    """One search: was it right, and which share of its generated tokens was destroyed at the end.

    `steps` are the tokens generated before it ended, or could no longer succeed.
    """

    correct: bool
    steps: int
    destroyed: int


class Batch:
    """Searches side by side: their caches, scores and what is destroyed of each."""

    def __init__(self, model: Any, prompts: torch.Tensor, capacity: int, gradient: bool) -> None:
        config = model.config
        rows, self.prompt = prompts.shape
        self.model, self.gradient = model, gradient
        self.length = self.held = (
            0  # tokens, and slots in use: as many, unless a subclass frees some
        )
        self.weights: list[torch.Tensor] = []  #: of the last token, per layer [rows, heads, tokens]
        shape = (rows, config.num_key_value_heads, capacity, config.head_dim)
        layers = range(config.num_hidden_layers)
        self.keys = [torch.empty(shape) for _ in layers]
        self.values = [torch.empty(shape) for _ in layers]
        self.attended = torch.zeros(rows, capacity, dtype=torch.float64)
        self.moved = torch.zeros(rows, capacity, dtype=torch.float64)
        self.dead = torch.zeros(rows, capacity, dtype=torch.bool)
        with torch.no_grad():
            self.logits = self._forward(prompts, [])
        self.attended.zero_()  # s = 0 after the prompt (Algorithm 1, line 1)

    def step(self, tokens: torch.Tensor) -> None:
        """Append a token to each search, ``[rows]``, and add up its attention and gradients."""
        cached: list[torch.Tensor] = []
        with torch.set_grad_enabled(self.gradient):
            self.logits = self._forward(tokens[:, None], cached)
            if self.gradient:
                loss = -torch.log_softmax(self.logits, -1).max(-1).values.sum()
                norms = [each.norm(dim=-1).mean(1) for each in torch.autograd.grad(loss, cached)]
                total = torch.stack(norms).sum(0) / len(self.keys)
                self.moved[:, : self.length] += total.double()
                self.logits = self.logits.detach()

    def _forward(self, ids: torch.Tensor, cached: list[torch.Tensor]) -> torch.Tensor:
        """Logits after the last token; cached keys and values become leaves in `cached`."""
        config, inner = self.model.config, self.model.model
        rows, count = ids.shape
        start, end = self.held, self.held + count
        x = inner.embed_tokens(ids)
        rotary = inner.rotary_emb(x, torch.arange(self.length, self.length + count)[None])
        later = torch.ones(count, end, dtype=torch.bool).triu(start + 1)
        received = torch.zeros(rows, end)
        self.weights = []
        for i, layer in enumerate(inner.layers):
            keys, values, part = self.keys[i], self.values[i], layer.self_attn
            h = layer.input_layernorm(x)
            q, k, v = (
                projection(h).view(rows, count, -1, config.head_dim).transpose(1, 2)
                for projection in (part.q_proj, part.k_proj, part.v_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, *rotary)
            keys[:, :, start:end] = k.detach()
            values[:, :, start:end] = v.detach()
            if torch.is_grad_enabled():
                # What is cached is a leaf; the new token's own part keeps its way to lower layers.
                leaves = [torch.zeros(*k.shape[:2], end, k.shape[3]) for _ in range(2)]
                for leaf, old in zip(leaves, (keys, values), strict=True):
                    leaf[:, :, :start] = old[:, :, :start]
                    leaf.requires_grad_()
                    cached.append(leaf)
                now = [torch.nn.functional.pad(each, (0, 0, start, 0)) for each in (k, v)]
                all_keys, all_values = (a + b for a, b in zip(leaves, now, strict=True))
            else:
                all_keys, all_values = keys[:, :, :end], values[:, :, :end]
            groups = k.shape[1]
            q = q.reshape(rows, groups, -1, config.head_dim)  # heads of a group, then queries
            logits = (q * config.head_dim**-0.5) @ all_keys.transpose(2, 3)
            gone = self.gone(i, end)
            spread = logits.view(rows, groups, -1, count, end)
            spread.masked_fill_(gone | later if count > 1 else gone, float("-inf"))
            weights = spread.view(rows, -1, count, end).softmax(-1)
            self.weights.append(weights.detach()[:, :, -1])
            received += self.weights[-1].mean(1)
            out = weights.view(rows, groups, -1, end) @ all_values
            out = out.view(rows, -1, count, config.head_dim).transpose(1, 2)
            x = x + part.o_proj(out.reshape(rows, count, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            self.seen(q, weights, x)
        self.attended[:, :end] += received.double() / len(self.keys)
        self.length, self.held = self.length + count, end
        logits_: torch.Tensor = self.model.lm_head(inner.norm(x[:, -1]))
        return logits_

    def gone(self, layer: int, end: int) -> torch.Tensor:
        """What a layer cannot read of `end` slots, bool ``[rows, KV heads or 1, 1, 1, end]``."""
        return self.dead[:, None, None, None, :end]

    def seen(self, queries: torch.Tensor, weights: torch.Tensor, hidden: torch.Tensor) -> None:
        """A layer was run: its rotated queries ``[rows, KV heads, queries of a group,
        head_dim]``, weights ``[rows, heads, queries, slots]`` and output."""

    def keep(self, rows: list[int]) -> None:
        """Go on with these searches only."""
        for cache in (*self.keys, *self.values):  # in place: copies of all would take seconds
            for new, old in enumerate(rows):
                if new != old:
                    cache[new, :, : self.held] = cache[old, :, : self.held]
        self.keys = [each[: len(rows)] for each in self.keys]
        self.values = [each[: len(rows)] for each in self.values]
        self.attended, self.moved = self.attended[rows], self.moved[rows]
        self.dead, self.logits = self.dead[rows], self.logits[rows]
        self.weights = [each[rows] for each in self.weights]

    def lowest(self, score: torch.Tensor, ratio: float, window: int) -> torch.Tensor:
        """The share of the candidates that scores lowest, bool ``[rows, tokens]``."""
        first, last = self.prompt + SINKS, max(self.prompt + SINKS, self.length - window)
        order = score[:, first:last].sort(dim=1, stable=True).indices
        found = torch.zeros(len(score), self.length, dtype=torch.bool)
        return found.scatter_(1, first + order[:, : int(ratio * (last - first))], True)

    def errors(self, gone: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of every head's last output without the tokens `gone`, ``[rows, tokens]``: its error and
        the bound of equation 4, float64 ``[rows, layers x heads]``."""
        found, limits = [], []
        for weights, values in zip(self.weights, self.values, strict=True):
            heads = weights.shape[1]
            v = (
                values[:, :, : self.length]
                .double()
                .repeat_interleave(heads // values.shape[1], dim=1)
            )
            lost = weights.double().masked_fill(~gone[:, None], 0)
            kept = weights.double() - lost
            mass = lost.sum(-1, keepdim=True)
            # What is kept grows by mass / (1 - mass): written so that little mass cancels nothing.
            change = kept * (mass / (1 - mass)) - lost
            found.append((change[:, :, None] @ v)[:, :, 0].norm(dim=-1))
            limits.append(2 * (lost * v.norm(dim=-1)).sum(-1))
        return torch.cat(found, 1), torch.cat(limits, 1)

    def destroy(self, rule: Rule, draws: np.random.Generator) -> None:
        """Lines 18 to 22: the lowest candidates of each search are gone for good."""
        first, last = self.prompt + SINKS, self.length - rule.window
        if last <= first:
            return
        dead = self.dead[:, first:last]
        gone = int(dead[0].sum())
        left = last - first - gone
        share = rule.ratio * (last - first) - gone if rule.total else rule.ratio * left
        if (count := int(share)) <= 0:
            return
        if rule.score == "random":
            score = torch.from_numpy(draws.random(dead.shape))
        elif rule.score == "gradient":
            score = self.moved[:, first:last]
        else:
            score = self.attended[:, first:last]
            if rule.score.startswith("value"):
                sizes = [each[:, :, first:last].abs().sum(-1).mean(1) for each in self.values]
                score = score * torch.stack(sizes).mean(0)
            if rule.score.endswith("redundancy"):
                score = score / score.masked_fill(dead, 0).max(1, keepdim=True).values
                score = score - self._redundancy(dead, first, last)
        lowest = score.masked_fill(dead, float("inf")).sort(dim=1, stable=True).indices[:, :count]
        dead.scatter_(1, lowest, True)

    def _redundancy(self, dead: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Mean cosine of each candidate's keys, of all layers and heads, to its neighbours'."""
        at = (~dead).nonzero()[:, 1].view(len(dead), -1)
        keys = torch.cat([each[:, :, first:last] for each in self.keys], 1).transpose(1, 2)
        near = keys.flatten(2).gather(1, at[:, :, None].expand(-1, -1, keys[0, 0].numel()))
        near = torch.nn.functional.normalize(near.double(), dim=-1)
        n = near.shape[1]
        total, count = torch.zeros(at.shape, dtype=torch.float64), torch.zeros(n)
        for lag in range(1, min(REACH, n - 1) + 1):
            cosine = (near[:, lag:] * near[:, :-lag]).sum(-1)
            total[:, lag:] += cosine
            total[:, :-lag] += cosine
            count[lag:] += 1
            count[:-lag] += 1
        return torch.zeros(dead.shape, dtype=torch.float64).scatter_(1, at, total / count)


def greedy(
    batch: Batch, task: Task, problems: Sequence[Problem], tokens: list[list[int]],
    give_up: bool = False,
) -> Iterator[tuple[int, list[int], list[int]]]:  # fmt: skip
    """Search greedily, and write each problem's tokens down.

    After every step of the batch its number, which rows of the last step go on, and the problem of
    each row now.  With `give_up` searches end that can no longer succeed, too.
    """
    rows = list(range(len(problems)))
    for step in range(1, task.max_tokens + 1):
        picked = batch.logits.argmax(-1)
        for i, token in zip(rows, picked.tolist(), strict=True):
            tokens[i].append(token)
        over = [task.is_finished(problems[i], tokens[i]) for i in rows]
        if give_up and step % LOOK == 0:
            over = [
                over[row] or task.judge(problems[i], tokens[i]).dead for row, i in enumerate(rows)
            ]
        still = [row for row in range(len(rows)) if not over[row]]
        if not still:
            return
        if len(still) < len(rows):
            rows = [rows[row] for row in still]
            batch.keep(still)
            picked = picked[still]
        batch.step(picked)
        yield step, still, rows


def search(model: Any, task: Task, problems: Sequence[Problem], rule: Rule) -> list[Found]:
    """Search greedily; prompts must be of one length."""
    prompts = torch.tensor([each.prompt for each in problems])
    batch = Batch(
        model, prompts, prompts.shape[1] + task.max_tokens, gradient=rule.score == "gradient"
    )
    draws = np.random.default_rng(problems[0].index)
    tokens: list[list[int]] = [[] for _ in problems]
    destroyed = [0] * len(problems)
    for step, _, rows in greedy(batch, task, problems, tokens, give_up=True):
        if step % rule.interval == 0:
            batch.destroy(rule, draws)
            for row, i in enumerate(rows):
                destroyed[i] = int(batch.dead[row].sum())
    verdicts = [task.judge(p, t) for p, t in zip(problems, tokens, strict=True)]
    return [
        Found(v.finished and v.correct, len(t), gone)
        for v, t, gone in zip(verdicts, tokens, destroyed, strict=True)
    ]


@dataclass(frozen=True)
class Observed:
    """One search with everything kept.

    Attributes
    ----------
    prompt
        Its tokens.
    attended, moved
        The scores "attention" and "gradient" of all tokens at the end, float64 ``[tokens]``.
    over, worst
        By the share evicted: heads whose error exceeded the bound of equation 4, as a share of all
        heads at every fourth decision, and the largest error as a multiple of the bound.
    """

    prompt: int
    attended: np.ndarray
    moved: np.ndarray
    over: dict[float, float]
    worst: dict[float, float]


def observe(
    model: Any, task: Task, problems: Sequence[Problem], ratios: Sequence[float], rule: Rule
) -> list[Observed]:
    """Search greedily, destroy nothing, and see what destroying `ratios` would do to outputs."""
    prompts = torch.tensor([each.prompt for each in problems])
    batch = Batch(model, prompts, prompts.shape[1] + task.max_tokens, gradient=True)
    tokens: list[list[int]] = [[] for _ in problems]
    seen: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    excess: dict[tuple[int, float], list[np.ndarray]] = {}

    def see(rows: list[int]) -> None:
        for row, i in enumerate(rows):
            seen[i] = (
                batch.attended[row, : batch.length].numpy(),
                batch.moved[row, : batch.length].numpy(),
            )

    see(list(range(len(problems))))
    for step, _, rows in greedy(batch, task, problems, tokens):
        see(rows)
        for ratio in ratios if step % (LOOKS * rule.interval) == 0 else ():
            gone = batch.lowest(batch.attended, ratio, rule.window)
            if gone.any():
                error, limit = batch.errors(gone)
                for i, each in zip(rows, (error / limit).nan_to_num(0).numpy(), strict=True):
                    excess.setdefault((i, ratio), []).append(each)
    found = []
    for i in range(len(problems)):
        by = {r: np.concatenate(excess[i, r]) for r in ratios if (i, r) in excess}
        over = {r: float((each > 1 + 1e-6).mean()) for r, each in by.items()}
        worst = {r: float(each.max()) for r, each in by.items()}
        found.append(Observed(prompts.shape[1], *seen[i], over, worst))
    return found
