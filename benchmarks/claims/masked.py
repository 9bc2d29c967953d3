"""Algorithm 1 of the memory-hierarchy paper, literally, on a batch of greedy searches.

Where tokens lie changes no output (Proposition 1), so only what is destroyed is played: it is
masked.  All searches of a batch have as many tokens, hence as many candidates, at every step.  It
takes a fifth of the time of live runs, and it differentiates: the loss's gradients by cached keys
and values (appendix C) are a score here that no live run under inference mode could have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from arborsim_torch.masked.table import Table
from arborsim_torch.reference import Problem, Task
from benchmarks.greedy import greedy

SINKS = 4
REACH = 8  #: neighbours on either side that redundancy looks at
LOOKS = 4  #: decisions from one look at errors to the next


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


class Batch(Table):
    """Searches side by side: their caches, scores and what is destroyed of each."""

    def __init__(self, model: Any, prompts: torch.Tensor, capacity: int, gradient: bool) -> None:
        rows, self.prompt = prompts.shape
        super().__init__(model, rows, capacity)
        self.gradient = gradient
        self.weights: list[torch.Tensor] = []  #: of the last token, per layer [rows, heads, tokens]
        self.attended = torch.zeros(rows, capacity, dtype=torch.float64)
        self.moved = torch.zeros(rows, capacity, dtype=torch.float64)
        self.dead = torch.zeros(rows, capacity, dtype=torch.bool)
        self._cached: list[torch.Tensor] = []  # keys and values that became leaves
        with torch.no_grad():
            self._append(prompts)
        self.attended.zero_()  # s = 0 after the prompt (Algorithm 1, line 1)

    def step(self, tokens: torch.Tensor) -> None:
        """Append a token to each search, ``[rows]``, and add up its attention and gradients."""
        with torch.set_grad_enabled(self.gradient):
            self._append(tokens[:, None])
            if self.gradient:
                loss = -torch.log_softmax(self.logits, -1).max(-1).values.sum()
                gradients = torch.autograd.grad(loss, self._cached)
                norms = [each.norm(dim=-1).mean(1) for each in gradients]
                total = torch.stack(norms).sum(0) / len(self.keys)
                self.moved[:, : self.length] += total.double()
                self.logits = self.logits.detach()

    def _append(self, ids: torch.Tensor) -> None:
        self.weights, self._cached = [], []
        self.logits = self.model.lm_head(self.forward(ids)[:, -1])
        received = torch.stack([each.mean(1) for each in self.weights]).sum(0)
        self.attended[:, : self.length] += received.double() / len(self.keys)

    def store(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        old = self.length
        cached = super().store(layer, key.detach(), value.detach())
        if not torch.is_grad_enabled():
            return cached
        # What is cached is a leaf; the new token's own part keeps its way to lower layers.
        leaves = [torch.zeros_like(each) for each in cached]
        for leaf, each in zip(leaves, cached, strict=True):
            leaf[:, :, :old] = each[:, :, :old]
            self._cached.append(leaf.requires_grad_())
        now = [torch.nn.functional.pad(each, (0, 0, old, 0)) for each in (key, value)]
        return leaves[0] + now[0], leaves[1] + now[1]

    def gone(self, layer: int, end: int) -> torch.Tensor:
        return self.dead[:, None, None, None, :end]

    def seen(self, layer: int, queries: torch.Tensor, weights: torch.Tensor | None) -> None:
        assert weights is not None
        self.weights.append(weights.detach()[:, :, -1])

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
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
